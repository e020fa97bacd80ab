"""The live page: its numbers, and the page itself in a browser."""

import asyncio
import contextlib
import re
import shutil
import socket

import httpx
import numpy as np
import pytest
import uvicorn
from observed_echo import observed_echo
from starlette.applications import Starlette

from jaxserve import AsyncLLM, RequestOutputKind, SamplingParams
from jaxserve.metrics import NUM_STEP_RECORDS, StepRecord
from jaxserve.server.page import LatencyWindow, LivePage, page, tokens_per_s
from jaxserve.server.progress import ProgressWatch

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def llm():
    llm = AsyncLLM.over(observed_echo, {})
    yield llm
    llm.shutdown()


def client(live: LivePage, engine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Starlette(routes=live.routes(engine)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def serve(llm, live: LivePage, prompt: str, num_tokens: int, kind=RequestOutputKind.DELTA) -> None:
    params = SamplingParams(max_tokens=num_tokens, output_kind=kind)
    watch = ProgressWatch()
    async for output in llm.generate(prompt, params, f"request {prompt} {kind}"):
        live.observe(output, watch.advance(output))


# -------------------------------------------------------------------------------------------------------- the numbers


def test_percentiles_of_the_window_are_within_its_bound():
    rng, window = np.random.default_rng(0), LatencyWindow()
    latencies = rng.lognormal(-4, 1.5, size=3000)
    for i, part in enumerate(np.split(latencies, 30)):
        window.add(part.tolist(), 1000.0 + i)
    found = window.summary(1029.5)
    assert found["count"] == 3000
    for name, share in (("p50_s", 50), ("p99_s", 99)):
        true = np.percentile(latencies, share, method="inverted_cdf")
        assert found[name] == pytest.approx(true, rel=0.025)
        assert abs(found[name] - np.percentile(latencies, share - 5)) > 0.025 * found[name]  # the bound has teeth


def test_the_window_holds_one_minute_by_the_second():
    window = LatencyWindow()
    window.add([0.1, 0.1], 100.2)
    window.add([0.4], 101.9)
    series = window.summary(102.0)["series"]
    assert len(series) == 60
    assert series[-3:] == [pytest.approx((0.1, 0.1), rel=0.025), pytest.approx((0.4, 0.4), rel=0.025), (None, None)]
    assert window.summary(160.5)["count"] == 1  # the first second has left
    assert window.summary(500.0) == {"count": 0, "p50_s": None, "p99_s": None, "series": [(None, None)] * 60}
    window.add([0.0, 1e9], 500.0)  # whatever comes has a place
    assert window.summary(500.0)["count"] == 2
    assert len(window._seconds) == 1


def record(step: int, start: float, duration: float, num_new_tokens: int) -> StepRecord:
    return StepRecord(step, start, duration, 1, 0, 0, 0, 0, num_new_tokens, 1, 0, 0.0, 0)


def test_tokens_a_second_are_those_of_the_last_seconds():
    steps = [record(i, i, 1.0, 10) for i in range(1, 10)]  # the last ends at 10
    assert tokens_per_s(steps, 10.0) == pytest.approx(10.0)
    assert tokens_per_s(steps, 12.5) == pytest.approx(30 / 5)  # those that end after 7.5
    assert tokens_per_s(steps, 60.0) == tokens_per_s([], 60.0) == 0.0
    full = [record(i, 100 + i / 1000, 0.001, 2) for i in range(NUM_STEP_RECORDS)]  # reach back half a second only
    assert tokens_per_s(full, 100 + NUM_STEP_RECORDS / 1000) == pytest.approx(2000)


def test_live_json_tells_gauges_latencies_and_steps(llm):
    live = LivePage("tiny")

    async def main():
        await serve(llm, live, "abcd", 4)
        await serve(llm, live, "abc", 3, RequestOutputKind.FINAL_ONLY)
        async with client(live, lambda: llm) as http:
            first = (await http.get("/live.json")).json()
            await serve(llm, live, "ab", 2)
            second = (await http.get(f"/live.json?since={first['last_step']}")).json()
            both = await asyncio.gather(*(http.get("/live.json?since=999999") for _ in range(3)))
        return first, second, [answer.json() for answer in both]

    first, second, others = asyncio.run(main())
    assert (first["state"], first["model"], first["num_layers"]) == ("running", "tiny", 8)
    assert (first["num_requests_running"], first["num_requests_waiting"], first["kv_cache_usage"]) == (0, 3, 0.25)
    assert first["tokens_per_s"] == pytest.approx(7 / 5)
    assert (first["ttft"]["count"], first["tbt"]["count"]) == (2, 5)
    assert 0 < first["tbt"]["p50_s"] <= first["tbt"]["p99_s"] < 10
    assert len(first["ttft"]["series"]) == 60
    steps = first["steps"]
    assert [step["step"] for step in steps] == list(range(1, first["last_step"] + 1))
    assert sum(step["num_prefill_tokens"] for step in steps) == 7
    assert sum(step["num_decode_rows"] for step in steps) == 5
    assert {(step["layer_lo"], step["layer_hi"]) for step in steps if step["num_prefill_rows"]} == {(0, 4), (4, 8)}
    assert [step["step"] for step in second["steps"]] == [first["last_step"] + 1, first["last_step"] + 2]
    assert second["tbt"]["count"] == 6
    assert [other["steps"] for other in others] == [[]] * 3
    assert len(live._steps) == second["last_step"]


def test_a_since_that_is_no_step_is_refused():
    async def main():
        async with client(LivePage("tiny"), lambda: None) as http:
            return [await http.get("/live.json", params={"since": since}) for since in ("-1", "x", "9" * 99, HOSTILE)]

    for answer in asyncio.run(main()):
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        assert "since must be the number of a step" in answer.json()["error"]["message"]


def test_live_json_says_when_there_is_no_engine():
    ended = AsyncLLM.over(observed_echo, {})
    ended.shutdown()

    async def main():
        async with client(LivePage("m"), lambda: None) as one, client(LivePage("m"), lambda: ended) as other:
            return await one.get("/live.json"), await other.get("/live.json")

    loading, dead = asyncio.run(main())
    assert (loading.status_code, loading.json()) == (503, {"state": "loading", "model": "m"})
    assert (dead.status_code, dead.json()) == (503, {"state": "ended", "model": "m"})


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_needs_nothing_from_elsewhere():
    text, headers = page()
    assert re.findall(r"https?://[^\"\s]*", text) == ["http://www.w3.org/2000/svg"]  # a name, which nobody fetches
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


@contextlib.asynccontextmanager
async def http_server(live: LivePage, llm):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(Starlette(routes=live.routes(lambda: llm)), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            await serving


async def in_browser(url: str, profile) -> str:
    """The page's elements after some seconds of the browser's own time, which waits for the network."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--virtual-time-budget=2500",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return (await asyncio.wait_for(process.communicate(), 60))[0].decode()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise


def text_of(dom: str, element: str) -> str:
    (content,) = re.findall(rf'id="{element}"[^>]*>(.*?)</(?:div|span|h2)>', dom)
    return re.sub("<[^>]*>", "", content)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_a_browser_shows_the_numbers_and_the_strip_chart_and_no_text_of_users(llm, tmp_path):
    live = LivePage(HOSTILE)  # a model's name is the operator's, and shown as it is

    async def main():
        await asyncio.gather(*(serve(llm, live, prompt, 40) for prompt in (HOSTILE, HOSTILE + "x")))
        async with http_server(live, llm) as url:
            return await in_browser(url, tmp_path)

    dom = asyncio.run(main())
    assert text_of(dom, "state") == "live"
    assert text_of(dom, "running") == "0"
    assert text_of(dom, "waiting") == "3"
    assert text_of(dom, "kv") == "25.0 %"
    assert float(text_of(dom, "rate")) > 0
    for element in ("ttft-p50", "ttft-p99", "tbt-p50", "tbt-p99"):
        assert re.fullmatch(r"[\d.]+ m?s", text_of(dom, element))
    assert text_of(dom, "tbt-top").endswith("78 measured")
    assert int(re.findall(r'id="strip"[^>]*data-steps="(\d+)"', dom)[0]) >= 40
    bars = {lane: int(count) for lane, count in re.findall(r'data-lane="([^"]*)" data-bars="(\d+)"', dom)}
    assert set(bars) == {"step time", "decode rows", "prefill rows", "prefill tokens", "layers of prefill"}
    assert bars["prefill rows"] == bars["prefill tokens"] == bars["layers of prefill"] >= 1
    assert bars["decode rows"] >= 39
    assert "<title>jaxserve</title>" in dom
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in dom.split("<main>")[0]
    assert "<img" not in dom
    assert "owned" not in dom.split("<main>")[1]  # prompts and request ids stay out

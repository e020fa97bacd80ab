"""The Ray Serve application on a local cluster of two replicas, with the demo model and plain HTTP."""

import concurrent.futures
import os
import signal
import socket

import httpx
import pytest
from ray import serve
from ray_processes import processes

import jaxserve.ray
from jaxserve import LLM, ParameterError, SamplingParams
from jaxserve.server.errors import as_api_error

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
OPTIONS = {"max_model_len": 256, "max_num_seqs": 8, "warm_up": "off", "dtype": "float32"}
PROMPTS = [f"The number {i} is" for i in range(24)]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM("smollm2-135m", **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def url(cluster) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(jaxserve.ray.build_app("smollm2-135m", replicas=2, **OPTIONS))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def complete(url: str, prompt: str, **options) -> dict:
    body = {"model": "smollm2-135m", "prompt": prompt, "temperature": 0, "max_tokens": 24, **options}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


def test_a_stream_and_an_error_pass_through(url, expected):
    body = {"model": "smollm2-135m", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 24, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3
    wrong = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": -1}, timeout=120)
    assert wrong.status_code == 400
    assert "max_tokens" in wrong.text
    assert complete(url, PROMPTS[0])["choices"][0]["text"] == expected[0]


def test_an_error_that_only_the_engine_finds_is_answered_as_by_one_server(url):
    body = {"model": "smollm2-135m", "prompt": [1, 10**6], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    expected = as_api_error(ParameterError("prompt", 10**6, "token ids in the vocabulary [0, 49152)"))
    assert (answer.status_code, answer.content) == (400, expected.body())


def test_prompts_that_begin_alike_find_their_prefix_cached(url):
    stories = [f"{name} went out to sea one day. " * 10 for name in ("Anna", "Bert", "Carl", "Dora", "Emil", "Fred")]
    for story in stories:
        complete(url, story + "First,", max_tokens=1)
    again = [complete(url, story + "Then,", max_tokens=1)["usage"] for story in stories]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] > 32 for usage in again)


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_no_request_is_lost_when_a_process_is_killed(url, expected, victim):
    replicas = processes("ray::ServeReplica:default:engine")
    target = replicas[0] if victim == "replica" else replicas[0].children()[-1]
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(complete, url, prompt) for prompt in PROMPTS]
        next(concurrent.futures.as_completed(answers))
        os.kill(target.pid, signal.SIGKILL)
        assert [answer.result()["choices"][0]["text"] for answer in answers] == expected

"""The live page at / and the numbers behind it, GET /live.json. It shows no text that a user wrote."""

import base64
import collections
import hashlib
import importlib.resources
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import EngineDeadError
from jaxserve.metrics import NUM_STEP_RECORDS, StepRecord
from jaxserve.outputs import RequestOutput
from jaxserve.server.errors import bad_request
from jaxserve.server.progress import Progress

WINDOW_S = 60
RATE_WINDOW_S = 5.0


class LatencyWindow:
    """Latencies of the last minute by the second, in buckets that grow by 5 %: percentiles are within 2.5 %."""

    _FLOOR_S, _GROWTH = 1e-5, 1.05
    _LOG_GROWTH = math.log(_GROWTH)

    def __init__(self) -> None:
        self._seconds: dict[int, collections.Counter[int]] = {}  # second -> bucket -> count

    def add(self, latencies_s: Iterable[float], now: float) -> None:
        counts = self._seconds.get(int(now))
        if counts is None:
            counts = self._seconds[int(now)] = collections.Counter()
            for second in [s for s in self._seconds if s <= int(now) - WINDOW_S]:
                del self._seconds[second]
        for latency_s in latencies_s:
            counts[int(math.log(max(latency_s / self._FLOOR_S, 1.0)) / self._LOG_GROWTH)] += 1

    def summary(self, now: float) -> dict[str, Any]:
        """p50 and p99 in seconds of the last minute (None = nothing came), and of each of its seconds, oldest first."""
        seconds = [self._seconds.get(int(now) - age, collections.Counter()) for age in reversed(range(WINDOW_S))]
        total: collections.Counter[int] = collections.Counter()
        for counts in seconds:
            total.update(counts)
        p50, p99 = self._percentiles(total)
        return {
            "count": total.total(),
            "p50_s": p50,
            "p99_s": p99,
            "series": [self._percentiles(counts) for counts in seconds],
        }

    def _percentiles(self, counts: collections.Counter[int]) -> tuple[float | None, float | None]:
        ranks = [math.ceil(share * counts.total()) for share in (0.5, 0.99)]
        found: list[float | None] = [None, None]
        passed = 0
        for bucket, count in sorted(counts.items()):
            for i, rank in enumerate(ranks):
                if passed < rank <= passed + count:
                    found[i] = self._FLOOR_S * self._GROWTH ** (bucket + 0.5)
            passed += count
        return found[0], found[1]


class LivePage:
    """An `Observer`, and the routes that show what it saw."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.monotonic):
        self._model_name, self._now = model_name, now
        self._ttft, self._tbt = LatencyWindow(), LatencyWindow()
        self._steps: collections.deque[StepRecord] = collections.deque(maxlen=NUM_STEP_RECORDS)

    def observe(self, output: RequestOutput, progress: Progress) -> None:
        now = self._now()
        if progress.first_token_s is not None:
            self._ttft.add([progress.first_token_s], now)
        if progress.gaps_s:
            self._tbt.add(progress.gaps_s, now)

    def routes(self, engine: Callable[[], AsyncLLM | None]) -> list[Route]:
        """GET / and GET /live.json over `engine()`, which is None while the model loads."""
        text, headers = page()

        async def index(request: Request) -> Response:
            return HTMLResponse(text, headers=headers)

        async def live(request: Request) -> Response:
            since = request.query_params.get("since", "0")
            if not re.fullmatch("[0-9]{1,15}", since):
                return bad_request(f"since must be the number of a step, got {since[:40]!r}", "since").response()
            try:
                llm = engine()
                if llm is None:
                    return _json({"state": "loading", "model": self._model_name}, 503)
                return _json(await self._live(llm, int(since)))
            except EngineDeadError:
                return _json({"state": "ended", "model": self._model_name}, 503)

        return [Route("/", index), Route("/live.json", live)]

    async def _live(self, llm: AsyncLLM, since: int) -> dict[str, Any]:
        values = await llm.get_metrics()
        await self._take_steps(llm)
        now = self._now()
        last = self._steps[-1].step if self._steps else 0
        return {
            "state": "running",
            "model": self._model_name,
            "num_requests_running": values["jaxserve:num_requests_running"],
            "num_requests_waiting": values["jaxserve:num_requests_waiting"],
            "kv_cache_usage": values["jaxserve:kv_cache_usage_perc"],
            "tokens_per_s": tokens_per_s(self._steps, now),
            "ttft": self._ttft.summary(now),
            "tbt": self._tbt.summary(now),
            "last_step": last,
            "num_layers": max((step.layer_hi for step in self._steps), default=0),
            "steps": [step._asdict() for step in self._steps if step.step > since],
        }

    async def _take_steps(self, llm: AsyncLLM) -> None:
        new = await llm.recent_steps(since=self._steps[-1].step if self._steps else 0)
        last = self._steps[-1].step if self._steps else 0  # another call may have taken them meanwhile
        self._steps.extend(step for step in new if step.step > last)


def tokens_per_s(steps: Sequence[StepRecord], now: float) -> float:
    """Tokens given out over the last seconds: five, or as many as `steps` reach back."""
    start = now - RATE_WINDOW_S
    if len(steps) == NUM_STEP_RECORDS:
        start = max(start, steps[0].start_time)
    return sum(step.num_new_tokens for step in steps if step.end_time > start) / (now - start)


def page() -> tuple[str, dict[str, str]]:
    """The page, and headers that let the browser run nothing but its own style and script."""
    text = importlib.resources.files("jaxserve.server").joinpath("page.html").read_text(encoding="utf-8")
    style, script = (_hash_of(tag, text) for tag in ("style", "script"))
    policy = f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:"
    fixed = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-cache"}
    return text, {"Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'", **fixed}


def _hash_of(tag: str, text: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, {"Cache-Control": "no-store"}, "application/json")

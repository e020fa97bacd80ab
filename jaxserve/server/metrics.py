"""GET /metrics for Prometheus: mostly vLLM's stems, behind `jaxserve:`, labelled with the model's name.

Gauges and counters are the engine's own, asked for at each scrape. Histograms of requests are filled by `observe`.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import EngineDeadError
from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.server.progress import Progress

PREFIX = "jaxserve:"
GAUGES = {
    "num_requests_running": "Sequences that take part in steps.",
    "num_requests_waiting": "Sequences in the queue.",
    "kv_cache_usage_perc": "Share of the KV cache's pages that sequences hold, 0 to 1.",
    "start_load_seconds": "Time that the weights took to load.",
    "start_engine_seconds": "Time that the engine took to start after that.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts taken in.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Sequences that lost their pages to others and were computed anew.",
    "num_steps": "Steps of the engine.",
    "expert_bytes": "Bytes of experts' weights that steps have read, of a mixture of experts.",
    "num_stalls": "Steps that waited for a compile after warm-up.",
    "compile_seconds": "Time spent on compiles.",
}

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                 640, 2560)  # fmt: skip
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
           40, 80)  # fmt: skip
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
             960, 1920, 7680)  # fmt: skip
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Each gap between two tokens of a sequence.", TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean gap between tokens of a request.", TOKEN_S),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_S),
    "request_queue_time_seconds": ("From arrival to the first step.", REQUEST_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", REQUEST_S),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_S),
    "request_inference_time_seconds": ("From the first step to the last token.", REQUEST_S),
    "request_prompt_tokens": ("Tokens of the prompt.", TOKENS),
    "request_generation_tokens": ("Tokens generated, of all samples.", TOKENS),
}


class Histogram:
    """Counts values by upper bounds; ten times as fast as the Prometheus client's, which matters once a token."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, help_text: str, model_name: str) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        family.add_metric([model_name], buckets, self._sum)
        return family


class ServerMetrics:
    """An `Observer`, and the route that shows what it saw."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def observe(self, output: RequestOutput, progress: Progress) -> None:
        if progress.first_token_s is not None:
            self._histograms["time_to_first_token_seconds"].observe(progress.first_token_s)
        for gap in progress.gaps_s:
            self._histograms["inter_token_latency_seconds"].observe(gap)
        if output.finished and output.metrics is not None:
            self._observe_end(len(output.prompt_token_ids), output.metrics)

    def _observe_end(self, num_prompt_tokens: int, times: RequestMetrics) -> None:
        first_step, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        spans = {
            "e2e_request_latency_seconds": (times.arrival_time, times.finished_time),
            "request_queue_time_seconds": (times.arrival_time, first_step),
            "request_prefill_time_seconds": (first_step, first),
            "request_decode_time_seconds": (first, last),
            "request_inference_time_seconds": (first_step, last),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                self._histograms[name].observe(end - start)
        if gaps := times.inter_token_latencies:
            self._histograms["request_time_per_output_token_seconds"].observe(sum(gaps) / len(gaps))
        self._histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(times.num_generation_tokens)

    def routes(self, engine: Callable[[], AsyncLLM | None]) -> list[Route]:
        """GET /metrics over `engine()`; 503 while that is None, or has ended."""

        async def metrics(request: Request) -> Response:
            llm = engine()
            if llm is None:
                return PlainTextResponse("the model is still loading\n", 503)
            try:
                values = await llm.get_metrics()
            except EngineDeadError:  # whose text is not for everybody
                return PlainTextResponse("the engine has ended\n", 503)
            return Response(self.expose(values), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

        return [Route("/metrics", metrics)]

    def expose(self, values: Mapping[str, float]) -> bytes:
        """All metrics, with `values` of `AsyncLLM.get_metrics`, in Prometheus' text format (0.0.4).

        Never as OpenMetrics, which the client library writes with other names: it allows no colon.
        """
        registry = CollectorRegistry()
        registry.register(_Families([*engine_families(values, self._model_name), *self._families()]))
        return generate_latest(registry)

    def _families(self) -> Iterator[Metric]:
        for name, histogram in self._histograms.items():
            yield histogram.family(name, HISTOGRAMS[name][0], self._model_name)


class _Families(Collector):
    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def engine_families(values: Mapping[str, float], model_name: str) -> Iterator[Metric]:
    """What `AsyncLLM.get_metrics` gives; a gauge that it lacks is left out."""
    for stem, help_text in GAUGES.items():
        if (value := values.get(PREFIX + stem)) is not None:
            family = GaugeMetricFamily(PREFIX + stem, help_text, labels=["model_name"])
            family.add_metric([model_name], value)
            yield family
    for stem, help_text in COUNTERS.items():
        family = CounterMetricFamily(PREFIX + stem, help_text, labels=["model_name"])
        if (value := values.get(PREFIX + stem)) is not None:
            family.add_metric([model_name], value)
        yield family
    success = CounterMetricFamily(
        f"{PREFIX}request_success", "Sequences that ended, by the reason.", labels=["model_name", "finished_reason"]
    )
    for reason, count in _labelled(values, "request_success"):
        success.add_metric([model_name, reason], count)
    yield success
    if buckets := _labelled(values, "iteration_tokens_bucket"):
        family = HistogramMetricFamily(
            f"{PREFIX}iteration_tokens_total", "Tokens that a step computed.", labels=["model_name"]
        )
        family.add_metric([model_name], buckets, values[f"{PREFIX}iteration_tokens"])
        yield family


def _labelled(values: Mapping[str, float], stem: str) -> list[tuple[str, float]]:
    """Label and value of each name like `jaxserve:request_success{finished_reason="stop"}`."""
    return [(name.split('"')[1], value) for name, value in values.items() if name.startswith(f"{PREFIX}{stem}{{")]

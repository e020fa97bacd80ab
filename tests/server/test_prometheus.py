"""GET /metrics, read by Prometheus' own parsers."""

import asyncio
import gc

import httpx
import pytest
from observed_echo import observed_echo
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from jaxserve import AsyncLLM, RequestOutputKind, SamplingParams
from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.output_processor import OutputProcessor
from jaxserve.server.metrics import HISTOGRAMS, ServerMetrics
from jaxserve.server.progress import ProgressWatch

MODEL = 'a "model"\n'


def samples(text: str) -> dict:
    """Values by name and labels but the model's, which must be right."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found[(sample.name.removeprefix("jaxserve:"), *labels.values())] = sample.value
    return found


def exposed(metrics: ServerMetrics, values=None) -> dict:
    return samples(metrics.expose(values or {}).decode())


def observe_run(metrics: ServerMetrics, kind: RequestOutputKind, n: int = 1) -> None:
    """One request that arrives at 0, is scheduled at 1, and whose samples get tokens at 2, 2.5 and (two) at 4."""
    params = SamplingParams(max_tokens=8, output_kind=kind)
    cores = [CoreRequest(seq_id=i, prompt_token_ids=[1] * 30, params=params, eos_token_ids=[]) for i in range(n)]
    outputs, watch = OutputProcessor(None), ProgressWatch()
    outputs.add("r", None, cores)
    for now, tokens, reason in ((2.0, [5], None), (2.5, [6], None), (4.0, [7, 8], "length")):
        updates = [
            CoreOutput(seq_id=i, new_token_ids=tokens, finish_reason=reason, first_scheduled_time=1.0) for i in range(n)
        ]
        for output in outputs.process(updates, now)[0]:
            metrics.observe(output, watch.advance(output))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_histograms_hold_the_times_of_a_request_whatever_the_kind_of_its_outputs(kind, n):
    metrics = ServerMetrics(MODEL)
    observe_run(metrics, kind, n)
    found = exposed(metrics)
    assert {name: (found[f"{name}_count",], found[f"{name}_sum",]) for name in HISTOGRAMS} == {
        "time_to_first_token_seconds": (1, 2.0),
        "inter_token_latency_seconds": (3 * n, 2.0 * n),
        "request_time_per_output_token_seconds": (1, pytest.approx(2 / 3)),
        "e2e_request_latency_seconds": (1, 4.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 1.0),
        "request_decode_time_seconds": (1, 2.0),
        "request_inference_time_seconds": (1, 3.0),
        "request_prompt_tokens": (1, 30.0),
        "request_generation_tokens": (1, 4.0 * n),
    }
    gaps = [found["inter_token_latency_seconds_bucket", bound] for bound in ("0.001", "0.4", "0.5", "1.0", "+Inf")]
    assert gaps == [n, n, 2 * n, 2 * n, 3 * n]  # 0, 0.5 and 1.5 s; a bound holds what equals it


def test_a_request_whose_reader_went_away_is_forgotten():
    watch, outputs = ProgressWatch(), OutputProcessor(None)
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA)
    outputs.add("r", None, [CoreRequest(seq_id=0, prompt_token_ids=[1], params=params, eos_token_ids=[])])
    for output in outputs.process([CoreOutput(seq_id=0, new_token_ids=[5])], 1.0)[0]:
        watch.advance(output)
    assert len(watch) == 1
    outputs.process([CoreOutput(seq_id=0, new_token_ids=[], finish_reason="abort")], 2.0)  # nobody takes it
    del output
    gc.collect()
    assert len(watch) == 0


def test_a_request_that_was_aborted_in_the_queue_has_an_end_and_no_more():
    metrics, outputs = ServerMetrics(MODEL), OutputProcessor(None)
    core = CoreRequest(seq_id=0, prompt_token_ids=[1], params=SamplingParams(), eos_token_ids=[])
    outputs.add("r", None, [core])
    (output,) = outputs.process([CoreOutput(seq_id=0, new_token_ids=[], finish_reason="abort")], 3.0)[0]
    metrics.observe(output, ProgressWatch().advance(output))
    found = exposed(metrics)
    assert found["e2e_request_latency_seconds_sum",] == 3.0
    assert found["request_queue_time_seconds_count",] == found["time_to_first_token_seconds_count",] == 0


def app(metrics: ServerMetrics, engine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Starlette(routes=metrics.routes(engine)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def test_a_scrape_shows_what_the_engine_counted_and_what_was_observed():
    metrics, llm = ServerMetrics(MODEL), AsyncLLM.over(observed_echo, {})

    async def serve(prompt: str, num_tokens: int) -> None:
        params, watch = SamplingParams(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA), ProgressWatch()
        async for output in llm.generate(prompt, params, prompt):
            metrics.observe(output, watch.advance(output))

    async def main():
        await asyncio.gather(serve("abcd", 3), serve("ab", 5))
        async with app(metrics, lambda: llm) as client:
            return await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    try:
        answer = asyncio.run(main())
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = samples(answer.text)
        expected = {
            ("num_requests_running",): 0,
            ("num_requests_waiting",): 3,
            ("kv_cache_usage_perc",): 0.25,
            ("prompt_tokens_total",): 6,
            ("generation_tokens_total",): 8,
            ("num_preemptions_total",): 7,
            ("prefix_cache_queries_total",): 100,
            ("prefix_cache_hits_total",): 40,
            ("request_success_total", "length"): 2,
            ("expert_bytes_total",): 100 * found["num_steps_total",],
            ("time_to_first_token_seconds_count",): 2,
            ("inter_token_latency_seconds_count",): 6,
            ("request_generation_tokens_sum",): 8,
            ("iteration_tokens_total_sum",): 6 + 8 - 2,
            ("iteration_tokens_total_bucket", "+Inf"): found["num_steps_total",],
        }
        assert {name: found[name] for name in expected} == expected
    finally:
        llm.shutdown()


def test_while_there_is_no_engine_a_scrape_gets_503():
    llm = AsyncLLM.over(observed_echo, {})
    llm.shutdown()

    async def main():
        async with app(ServerMetrics(MODEL), lambda: None) as client:
            loading = await client.get("/metrics")
        async with app(ServerMetrics(MODEL), lambda: llm) as client:
            ended = await client.get("/metrics")
        return loading, ended

    loading, ended = asyncio.run(main())
    assert (loading.status_code, loading.text) == (503, "the model is still loading\n")
    assert (ended.status_code, ended.text) == (503, "the engine has ended\n")

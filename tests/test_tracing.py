"""Spans of requests: real SDK, in-memory exporter; once a real OTLP/gRPC receiver on loopback."""

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
import time

import grpc
import httpx
import pytest
from echo_core import echo
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve import AsyncLLM, EngineDeadError, ParameterError, QueueFullError, SamplingParams, tracing
from jaxserve.config import RuntimeOptions
from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.output_processor import OutputProcessor
from jaxserve.server.app import build_app
from jaxserve.server.options import ServerOptions

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    return tracing.RequestTracer(SimpleSpanProcessor(exporter), model="tiny")


@pytest.fixture
def llm(tracer, monkeypatch):
    monkeypatch.setattr(tracing, "configured", lambda endpoint, model=None: tracer)
    llm = AsyncLLM.over(echo, {})
    yield llm
    llm.shutdown()


async def last(llm, prompt, request_id, **options):
    params = SamplingParams(max_tokens=3)
    return [output async for output in llm.generate(prompt, params, request_id, **options)][-1]


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def core_request(**options) -> CoreRequest:
    params = SamplingParams(max_tokens=8, temperature=0.5)
    return CoreRequest(seq_id=0, prompt_token_ids=[1, 2], params=params, eos_token_ids=[], **options)


def test_a_request_is_a_span_with_its_phases_below_at_their_times(exporter, tracer):
    outputs, now = OutputProcessor(None, tracer), time.monotonic()
    outputs.add("r", None, [core_request(arrival_time=now)], {"Traceparent": TRACEPARENT})
    scheduled = CoreOutput(seq_id=0, new_token_ids=[5], first_scheduled_time=now + 1, num_cached_tokens=1)
    outputs.process([scheduled], now + 3)
    outputs.process([CoreOutput(seq_id=0, new_token_ids=[6], finish_reason="length")], now + 7)
    spans = by_name(exporter)
    request = spans.pop("llm_request")
    assert request.kind is SpanKind.SERVER
    assert request.status.status_code is StatusCode.UNSET
    assert (request.context.trace_id, request.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert all(span.parent.span_id == request.context.span_id for span in spans.values())
    times = {name: ((s.start_time - request.start_time) / 1e9, (s.end_time - request.start_time) / 1e9)
             for name, s in spans.items()}  # fmt: skip
    assert times == {name: pytest.approx(span, abs=1e-6)
                     for name, span in {"queue": (0, 1), "prefill": (1, 3), "decode": (3, 7)}.items()}  # fmt: skip
    assert (request.end_time - request.start_time) / 1e9 == pytest.approx(7, abs=1e-6)
    assert request.start_time / 1e9 == pytest.approx(time.time(), abs=30)  # the clock on the wall
    expected = {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "r",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.latency.time_in_queue": pytest.approx(1),
        "gen_ai.latency.time_to_first_token": pytest.approx(3),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(2),
        "gen_ai.latency.time_in_model_decode": pytest.approx(4),
        "gen_ai.latency.time_in_model_inference": pytest.approx(6),
        "gen_ai.latency.e2e": pytest.approx(7),
    }
    assert {name: request.attributes[name] for name in expected} == expected


def test_spans_follow_a_clock_that_was_set_after_the_start(exporter, tracer, monkeypatch):
    an_hour_ns, time_ns = 3600 * 10**9, time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + an_hour_ns)
    outputs = OutputProcessor(None, tracer)
    outputs.add("r", None, [core_request(arrival_time=time.monotonic())])
    outputs.process([CoreOutput(seq_id=0, new_token_ids=[5], finish_reason="stop")], time.monotonic())
    assert by_name(exporter)["llm_request"].start_time / 1e9 == pytest.approx(time.time() + 3600, abs=30)


def test_a_request_that_ends_in_prefill_has_no_decode(exporter, tracer):
    outputs = OutputProcessor(None, tracer)
    outputs.add("r", None, [core_request()])
    outputs.process([CoreOutput(seq_id=0, new_token_ids=[], finish_reason="abort", first_scheduled_time=1.0)], 2.0)
    spans = by_name(exporter)
    assert set(spans) == {"llm_request", "queue", "prefill"}
    assert spans["prefill"].end_time - spans["prefill"].start_time == pytest.approx(1e9)
    assert spans["llm_request"].parent is None


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "00-zz-1-01"}, {"traceparent": b"x", 3: "y"}])
def test_without_a_well_formed_parent_a_request_is_a_trace_of_its_own(exporter, tracer, headers):
    outputs = OutputProcessor(None, tracer)
    outputs.add("r", None, [core_request()], headers)
    outputs.process([CoreOutput(seq_id=0, new_token_ids=[5], finish_reason="stop")], 2.0)
    assert by_name(exporter)["llm_request"].parent is None


def test_headers_that_are_no_mapping_are_refused_before_anything_is_touched(tracer):
    outputs = OutputProcessor(None, tracer)
    with pytest.raises(TypeError, match="trace_headers must be None or a mapping of names, got str"):
        outputs.add("r", None, [core_request()], TRACEPARENT)
    assert len(outputs) == 0


def test_every_request_ends_its_span_however_it_ends(exporter, llm):
    async def main():
        await last(llm, "abc", "served", trace_headers={"traceparent": TRACEPARENT})
        with pytest.raises(QueueFullError):
            await last(llm, "full", "refused")
        stream = llm.generate("abc", SamplingParams(max_tokens=3000), "dropped")
        await anext(stream)
        await stream.aclose()
        waiting = asyncio.ensure_future(last(llm, "abc", "another"))
        with pytest.raises(EngineDeadError):
            await last(llm, "crash", "deadly")
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())
    ended = {s.attributes["gen_ai.request.id"]: s for s in exporter.get_finished_spans() if s.name == "llm_request"}
    assert set(ended) == {"served", "refused", "dropped", "another", "deadly"}
    assert ended["served"].context.trace_id == TRACE_ID
    assert ended["served"].status.is_ok
    assert ended["refused"].attributes["error.type"] == "QueueFullError"
    assert ended["refused"].status.status_code is StatusCode.ERROR
    assert ended["dropped"].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "EngineDeadError" in {ended[name].attributes.get("error.type") for name in ("another", "deadly")}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector does first."""

    def __init__(self):
        self.requests = []

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_by_otlp_before_shutdown_returns(monkeypatch):
    receiver, server = Receiver(), grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    try:
        llm = AsyncLLM.over(echo, {})
        asyncio.run(last(llm, "abc", "r"))
        llm.shutdown()
    finally:
        server.stop(None)
    resource = receiver.requests[0].resource_spans[0]
    assert "jaxserve" in {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
    assert {span.name for scope in resource.scope_spans for span in scope.spans} == {
        "llm_request"
    }  # echo says no times


def test_a_collector_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(tracing, "SHUTDOWN_TIMEOUT_S", 0.01)
    answered = threading.Event()

    class Waiting(InMemorySpanExporter):
        def shutdown(self) -> None:
            answered.wait()
            super().shutdown()

    exporter = Waiting()
    tracing.RequestTracer(SimpleSpanProcessor(exporter)).shutdown()
    assert not exporter._stopped
    answered.set()


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported():
    program = (
        "import sys, os; os.environ.pop('OTEL_EXPORTER_OTLP_ENDPOINT', None)\n"
        "from jaxserve import AsyncLLM, LLM, tracing\n"
        "assert tracing.configured(None) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_endpoint_without_opentelemetry_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ValueError, match=r'pip install "jaxserve\[tracing\]"'):
        tracing.configured("http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")  # perhaps another library's
    assert tracing.configured(None) is None
    assert "requests are not traced" in caplog.text


def test_an_endpoint_must_be_a_url():
    with pytest.raises(ParameterError, match="otlp_traces_endpoint must be a URL such as http"):
        RuntimeOptions(otlp_traces_endpoint="localhost:4317")


def test_a_request_over_http_goes_below_the_callers_span(exporter, llm):
    async def ask() -> None:
        transport = httpx.ASGITransport(build_app(llm, ServerOptions(served_model_name="m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "abc", "max_tokens": 2}
            await client.post("/v1/completions", json=body, headers={"Traceparent": TRACEPARENT})

    asyncio.run(ask())
    span = by_name(exporter)["llm_request"]
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)

"""OpenTelemetry: one span a request, with its time in the queue, in prefill and in decode below it.

Nothing of OpenTelemetry is imported unless an endpoint is named. The spans of a request are made when it ends, from
the times in its `RequestMetrics`, so a request that runs costs nothing.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.exceptions import how_to_install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from jaxserve.output_processor import RequestState
    from jaxserve.outputs import RequestMetrics

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SHUTDOWN_TIMEOUT_S = 5.0
INSTALL = how_to_install("tracing")


def configured(endpoint: str | None, *, model: str | None = None) -> "RequestTracer | None":
    """A tracer that sends to `endpoint` by OTLP/gRPC; None = to where OpenTelemetry's variables say, or no tracer.

    Raises:
        ValueError: an endpoint is given and OpenTelemetry is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        if endpoint is None:  # the variables may be meant for others
            logger.warning("an OpenTelemetry endpoint is set, but requests are not traced: %s", INSTALL)
            return None
        raise ValueError(f"otlp_traces_endpoint needs OpenTelemetry: {INSTALL}") from error
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model=model)


class RequestTracer:
    """Makes the spans of requests and hands them to `processor`.

    Attributes are those of OpenTelemetry's conventions for generative AI, and vLLM's where those have none. None of
    them holds text of a prompt or an answer.
    """

    def __init__(self, processor: "SpanProcessor", *, model: str | None = None):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "jaxserve"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxserve")
        self._propagator = TraceContextTextMapPropagator()
        self._model = {} if model is None else {"gen_ai.request.model": model}

    def context(self, headers: Mapping[str, str]) -> Any:
        """The parent that a `traceparent` among `headers` names; none, or one that is not well formed: a new trace."""
        from opentelemetry.context import Context

        known = {name.lower(): value for name, value in headers.items() if isinstance(name, str)}
        wanted = {name: known[name] for name in self._propagator.fields if isinstance(known.get(name), str)}
        return self._propagator.extract(wanted, context=Context())

    def end(self, request: "RequestState", error: BaseException | None = None) -> None:
        """Makes the spans of a request that has ended; `error` is what it ended with, if it was not served."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        times = request.metrics
        end_time = time.monotonic() if times.finished_time is None else times.finished_time
        epoch_ns = time.time_ns() - time.monotonic_ns()  # anew for each, since the clock on the wall may be set

        def ns(monotonic_s: float) -> int:
            return epoch_ns + round(monotonic_s * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            context=request.trace_context,
            kind=SpanKind.SERVER,
            attributes=self._model | attributes(request),
            start_time=ns(times.arrival_time),
        )
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        below = set_span_in_context(span)
        for name, start, end in phases(times, end_time):
            child = self._tracer.start_span(name, context=below, start_time=ns(start))
            child.end(ns(end))
        span.end(ns(end_time))

    def shutdown(self) -> None:
        """Sends what is not sent yet, but waits for a few seconds at most: a collector may be away."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-traces", daemon=True)
        sending.start()
        sending.join(SHUTDOWN_TIMEOUT_S)


def phases(times: "RequestMetrics", end_time: float) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of each phase that the request is known to have come to."""
    if times.first_scheduled_time is None:  # refused, or ended before the engine told when it was scheduled
        return
    yield "queue", times.arrival_time, times.first_scheduled_time
    if times.first_token_time is None or times.last_token_time is None:
        yield "prefill", times.first_scheduled_time, end_time
        return
    yield "prefill", times.first_scheduled_time, times.first_token_time
    yield "decode", times.first_token_time, times.last_token_time


def attributes(request: "RequestState") -> dict[str, Any]:
    params, times = request.params, request.metrics
    found = {
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.id": request.request_id.encode(errors="replace").decode(),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.choice.count": len(request.sequences),
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": times.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.response.finish_reasons": [s.finish_reason for s in request.sequences if s.finish_reason is not None],
        "gen_ai.latency.time_in_queue": _between(times.arrival_time, times.first_scheduled_time),
        "gen_ai.latency.time_to_first_token": _between(times.arrival_time, times.first_token_time),
        "gen_ai.latency.time_in_model_prefill": _between(times.first_scheduled_time, times.first_token_time),
        "gen_ai.latency.time_in_model_decode": _between(times.first_token_time, times.last_token_time),
        "gen_ai.latency.time_in_model_inference": _between(times.first_scheduled_time, times.last_token_time),
        "gen_ai.latency.e2e": _between(times.arrival_time, times.finished_time),
    }
    return {name: value for name, value in found.items() if value is not None}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start

"""A gRPC server over AsyncLLM: `python server.py --model smollm2-135m --port 50051`. Binds loopback by default.

grpc.health.v1 answers to two names: "" is liveness (the engine has not died), "jaxserve.v1.Generation" is readiness
(the model is loaded as well).
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

try:
    import generation_pb2 as pb
    import generation_pb2_grpc as rpc
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from jaxserve import AsyncLLM, EngineDeadError, QueueFullError, RequestOutput, RequestOutputKind, SamplingParams
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed; at the root of the checkout: "
        f'.venv/bin/pip install -e ".[grpc]", then run this with .venv/bin/python'
    )

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
MESSAGE_BYTES = 256 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server that gets half of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # a long prefill sends nothing; pings are no abuse then
    ("grpc.http2.max_ping_strikes", 0),
]
STATUS = (  # the first that fits
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (EngineDeadError, grpc.StatusCode.UNAVAILABLE),
)
GRACE_S = 5.0
HEALTH_INTERVAL_S = 0.5

logger = logging.getLogger("grpc_server")


class Generation(rpc.GenerationServicer):
    """The service. `engine` is None until the model is loaded."""

    def __init__(self) -> None:
        self.engine: AsyncLLM | None = None

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async with contextlib.aclosing(self._generate(request, context.time_remaining())) as responses:
                async for response in responses:
                    yield response
        except (ValueError, NotImplementedError, EngineDeadError) as error:
            await _refuse(context, error)

    async def _generate(
        self, request: pb.GenerateRequest, time_left_s: float | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        request_id = request.request_id or uuid.uuid4().hex
        samples: dict[int, pb.Completion] = {}
        stream = self._engine().generate(
            prompt_of(request),
            params_of(request.sampling_params),
            request_id,
            priority=request.priority,
            deadline=time_left_s,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        )
        async with contextlib.aclosing(stream):  # a cancelled call ends here, and the request with it
            async for output in stream:
                for delta in collect(output, samples):
                    yield pb.GenerateResponse(request_id=request_id, delta=delta)
        for index in sorted(samples):
            yield pb.GenerateResponse(request_id=request_id, completion=samples[index])

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        try:
            for request_id in request.request_ids:
                await self._engine().abort(request_id)
        except EngineDeadError as error:
            await _refuse(context, error)
        return pb.AbortResponse()

    def _engine(self) -> AsyncLLM:
        if self.engine is None:
            raise EngineDeadError("the model is still loading; ask grpc.health.v1 when it is ready")
        return self.engine


async def _refuse(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    code = next(code for kind, code in STATUS if isinstance(error, kind))
    await context.abort(code, str(error))
    raise AssertionError("abort raises")


def prompt_of(request: pb.GenerateRequest) -> str | list[int]:
    """Raises ValueError when neither form of prompt is set."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case _:
            raise ValueError("prompt must be set: give text or token_ids")


def params_of(message: pb.SamplingParams) -> SamplingParams:
    """Takes over only the fields that are set: an unset one has SamplingParams' default."""
    options: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "logit_bias":
            options[field.name] = dict(value)
        else:
            options[field.name] = list(value) if field.is_repeated else value
    return SamplingParams.of(**options, output_kind=RequestOutputKind.DELTA)


def collect(output: RequestOutput, samples: dict[int, pb.Completion]) -> list[pb.Delta]:
    """Adds one DELTA output to each sample's completion; returns what to send now."""
    deltas = []
    for part in output.outputs:
        sample = samples.setdefault(part.index, pb.Completion(index=part.index, text=""))
        sample.text += part.text
        sample.token_ids.extend(part.token_ids)
        sample.num_prompt_tokens = len(output.prompt_token_ids)
        sample.num_cached_tokens = output.num_cached_tokens
        if part.finish_reason is not None:
            sample.finish_reason = part.finish_reason
        if isinstance(part.stop_reason, str):
            sample.stop_string = part.stop_reason
        elif part.stop_reason is not None:
            sample.stop_token_id = part.stop_reason
        if part.text or part.token_ids:
            deltas.append(pb.Delta(index=part.index, text=part.text, token_ids=part.token_ids))
    return deltas


class Server:
    """Binds at once, so that health answers while `run` loads the model; `run` lasts until `stop` is set.

    Raises:
        RuntimeError: the address is taken.
    """

    def __init__(self, address: str) -> None:
        self.stop = asyncio.Event()
        self.generation = Generation()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=OPTIONS)
        rpc.add_GenerationServicer_to_server(self.generation, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._server.add_insecure_port(address)

    async def run(self, load: Callable[[], AsyncLLM]) -> None:
        await self._say(alive=True, ready=False)
        await self._server.start()
        try:
            self.generation.engine = await asyncio.to_thread(load)
            await self._say(alive=True, ready=True)
            logger.info("ready")
            await self._watch(self.generation.engine)
        finally:
            await self._say(alive=not self.stop.is_set(), ready=False)
            await self._server.stop(GRACE_S)
            if self.generation.engine is not None:
                self.generation.engine.shutdown()

    async def _watch(self, engine: AsyncLLM) -> None:
        """Until told to stop; a dead engine turns health to NOT_SERVING, and whoever reads it restarts the server."""
        while not self.stop.is_set():
            try:
                await engine.check_health()
            except EngineDeadError as error:
                logger.error("the engine died: %s", error)
                await self._say(alive=False, ready=False)
                await self.stop.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), HEALTH_INTERVAL_S)

    async def _say(self, *, alive: bool, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name, serving in (("", alive), (SERVICE, ready)):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="jaxserve over gRPC", formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="name, folder, .gguf file or Hugging Face id")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; there is no TLS here: keep to loopback")
    parser.add_argument("--port", type=int, default=50051, help="0 takes a free one")
    parser.add_argument("--max-model-len", type=int, default=None, help="longest prompt and answer together, in tokens")
    parser.add_argument("--max-num-queued-reqs", type=int, default=None, help="more waiting requests are refused")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    server = Server(f"{options.host}:{options.port}")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop.set)
    print(f"listening on {options.host}:{server.port}", flush=True)
    limits = {"max_model_len": options.max_model_len, "max_num_queued_reqs": options.max_num_queued_reqs}
    await server.run(lambda: AsyncLLM(options.model, **limits))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(main(arguments()))
    except EngineDeadError as error:  # it could not load the model
        sys.exit(f"error: {error}")

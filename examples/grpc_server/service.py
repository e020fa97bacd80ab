"""The service jaxserve.v1.Generation over an AsyncLLM."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import generation_pb2 as pb
import generation_pb2_grpc as rpc
import grpc
from guard import Refusal
from messages import params_message, params_of, prompt_of, request_id_of, responses

import jaxserve
from jaxserve import EngineDeadError, RequestOutput

if TYPE_CHECKING:
    from jaxserve import AsyncLLM  # which imports jax: later, in the thread that loads the model

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name


class Generation(rpc.GenerationServicer):
    """The service. `engine` is None until the model is loaded."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.engine: AsyncLLM | None = None
        self._start = time.monotonic()
        self._draining = False
        self._active: set[str] = set()  # ids of the requests whose calls are open
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> str:
        if self._draining:
            return "draining"
        if self.engine is None:
            return "loading"
        return "dead" if self.engine.errored else "serving"

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        engine, time_left_s = self._serving_engine(), context.time_remaining()
        if time_left_s is not None and time_left_s <= 0:
            raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline had passed when the call came")
        with self._claim(request_id_of(request)) as request_id:
            stream = engine.generate(
                prompt_of(request),
                params_of(request, engine.get_default_sampling_params()),
                request_id,
                priority=request.priority,
                deadline=time_left_s,
                cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
                trace_headers=dict(context.invocation_metadata() or ()),
            )
            num_tokens: dict[int, int] = {}
            async with contextlib.aclosing(stream):  # a cancelled call ends here, and the request with it
                async for output in stream:
                    self._check_not_cut(output)
                    for response in responses(output, num_tokens):
                        await context.write(response)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        engine = self._loaded_engine()
        for request_id in request.request_ids:
            await engine.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        engine = self._loaded_engine()
        return pb.GetModelInfoResponse(
            name=self.model_name,
            max_model_len=engine.limits.max_model_len,
            vocab_size=engine.limits.vocab_size,
            max_logprobs=engine.limits.max_logprobs,
            default_sampling_params=params_message(engine.get_default_sampling_params()),
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        metrics = {}
        if self.engine is not None:
            with contextlib.suppress(EngineDeadError):
                metrics = await self.engine.get_metrics()
        return pb.GetServerInfoResponse(
            version=jaxserve.__version__,
            state=self.state,
            uptime_s=time.monotonic() - self._start,
            num_active_requests=len(self._active),
            metrics=metrics,
        )

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Takes no more requests, and returns when the open calls are done; cuts them after `grace_s` or at `hurry`."""
        self._draining = True
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, hurry)]
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for request_id in list(self._active):
            assert self.engine is not None
            await self.engine.abort(request_id)

    @contextlib.contextmanager
    def _claim(self, request_id: str | None) -> Iterator[str]:
        """Holds an id for as long as its call is open."""
        if request_id in self._active:
            details = f"request_id {request_id!r} is in use; give each running request an id of its own"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, details)
        claimed = request_id or uuid.uuid4().hex
        self._active.add(claimed)
        self._idle.clear()
        try:
            yield claimed
        finally:
            self._active.remove(claimed)
            if not self._active:
                self._idle.set()

    def _check_not_cut(self, output: RequestOutput) -> None:
        """Raises Refusal where the server, not the client, has ended the request early."""
        for sample in output.outputs:
            if sample.finish_reason == "abort" and sample.stop_reason == "deadline":
                raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the answer was complete")
            if sample.finish_reason == "abort" and self._draining:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the server stopped before the answer was complete")

    def _serving_engine(self) -> "AsyncLLM":
        if self._draining:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the server is stopping; ask another one")
        return self._loaded_engine()

    def _loaded_engine(self) -> "AsyncLLM":
        if self.engine is None:
            details = "the model is still loading; ask grpc.health.v1 when it is ready"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, details)
        return self.engine

"""Who may call, and what an error becomes: stands before every method of the server."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxserve import EngineDeadError, QueueFullError

STATUS = (  # the first that fits
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (EngineDeadError, grpc.StatusCode.UNAVAILABLE),
)
OPEN = (  # to all: they say no more than a probe needs
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
MAX_DETAIL_CHARS = 1000  # they travel in a header

logger = logging.getLogger("grpc_server")


class Refusal(Exception):
    """Ends a call with this status."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(details)
        self.code = code


class Guard(grpc.aio.ServerInterceptor):
    """Asks for the token, where there is one, and turns the exceptions of unary-request methods into statuses."""

    def __init__(self, token: str | None):
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if not self._may_enter(handler_call_details):
            return grpc.stream_stream_rpc_method_handler(_deny)  # fits every method, and reads no request
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:  # reflection's, which has errors of its own
            return handler
        return _guarded(handler)

    def _may_enter(self, call: grpc.HandlerCallDetails) -> bool:
        if self._expected is None or call.method.startswith(OPEN):
            return True
        given = [value for key, value in call.invocation_metadata if key == "authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0].encode(), self._expected)


async def _deny(_: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the metadata must hold authorization: Bearer <token>")


def _guarded(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    parse = handler.request_deserializer
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def run(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(parse(data), context)
        except grpc.aio.AbortError:  # has said its status
            raise
        except Exception as error:
            code, details = status_of(error)
            await context.abort(code, details[:MAX_DETAIL_CHARS])

    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(run, response_serializer=handler.response_serializer)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Status and details for an exception; one that is nobody's mistake but ours is logged."""
    if isinstance(error, Refusal):
        return error.code, str(error)
    for kind, code in STATUS:
        if isinstance(error, kind):
            return code, str(error)
    logger.error("a call failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, "an error in the server; its log has the details"

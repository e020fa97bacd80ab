"""The two POST endpoints as ASGI applications: body in, answer or stream out, and an end when the client leaves.

How this works. The request runs in a task of its own while another waits for the client's disconnect; whichever ends
first ends both, and a cancelled request is aborted in the engine, wherever it stands. A stream begins with the first
output, so that whatever is refused has a status. A client that reads slowly stops our writes; the engine goes on, and
what it says meanwhile is merged in the request's mailbox.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from jaxserve.async_engine import AsyncLLM
from jaxserve.server.answer import Answer
from jaxserve.server.errors import ApiError, as_api_error, bad_request
from jaxserve.server.service import Service

STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy must not hold events back
    ],
}
DONE = b"data: [DONE]\n\n"
CLOSE = {"Connection": "close"}  # the rest of the body is not wanted


class ClientLeft(Exception):
    """Nobody is there to answer."""


class Understand(Protocol):
    """Makes an `Answer` of a decoded request."""

    def __call__(self, request: Any, llm: AsyncLLM, model: str, /) -> Awaitable[Answer]: ...


class Endpoint:
    """Answers POSTs of `request_type`."""

    def __init__(self, service: Service, request_type: type[msgspec.Struct], understand: Understand):
        self._service, self._understand = service, understand
        self._decoder = msgspec.json.Decoder(request_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def start_and_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            options = self._service.options
            body = await read_body(scope, receive, options.max_request_bytes, options.stall_timeout_s)
            await until_disconnect(receive, self._answer(body, Headers(scope=scope), start_and_send))
        except ClientLeft:
            pass
        except Exception as error:
            if started:
                raise
            await as_api_error(error).response()(scope, receive, send)

    async def _answer(self, body: bytes, headers: Headers, send: Callable[[Any], Awaitable[None]]) -> None:
        llm = self._service.engine()
        answer = await self._understand(decode(self._decoder, body), llm, self._service.options.served_model_name)
        outputs = self._service.generate(
            answer.id,
            answer.prompts,
            answer.params,
            priority=answer.priority,
            salt=answer.cache_salt,
            trace_headers=headers,
        )
        async with contextlib.aclosing(outputs):
            if answer.stream:
                async with contextlib.aclosing(answer.events(outputs)) as events:
                    await send_events(send, events)
            else:
                await send_whole(send, await answer.collect(outputs))


def decode(decoder: msgspec.json.Decoder, body: bytes) -> Any:
    """Raises ApiError or msgspec.ValidationError for a body that is no such request."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body must be a JSON object in UTF-8: {error}", code="invalid_json") from error


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The body of a request.

    Raises:
        ApiError: 413, it is longer than `limit` bytes; a longer one is not read to its end. 408, it took too long.
        ClientLeft: the client went before its end.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(scope, receive, limit)
    except TimeoutError as error:
        message = f"the request must come within {timeout_s:g} s"
        raise ApiError(408, message, code="request_timeout", headers=CLOSE) from error


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdecimal() and int(declared.lstrip("0")[:20] or 0) > limit:  # int() refuses thousands of digits
        raise _too_large(limit)
    parts: list[bytes] = []
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        more = message.get("more_body", False)
        if num_bytes > limit:
            raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the request must be at most {limit} bytes; the server's --max-request-bytes says so"
    return ApiError(413, message, code="request_too_large", headers=CLOSE)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it when the client leaves. Raises what `work` raises, or ClientLeft."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_whole(send: Callable[[Any], Awaitable[None]], body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_events(send: Callable[[Any], Awaitable[None]], events: AsyncGenerator[bytes]) -> None:
    """Sends a stream of server-sent events. What fails after the first one becomes an event itself."""
    event = await anext(events, b"")
    await send(STREAM_START)
    try:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    except Exception as error:
        event = b"data: %b\n\n" % as_api_error(error).body()
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": DONE})

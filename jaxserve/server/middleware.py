"""What every request passes first: the API key, and its id's echo. Plain ASGI, as it wraps each write of a stream."""

import hmac
import re
from collections.abc import Collection, Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import ApiError

REQUEST_ID = "x-request-id"
_VALID_ID = re.compile(r"[!-~]{1,128}")


class Gate:
    """Echoes a well-formed X-Request-Id, and asks for `Authorization: Bearer KEY` but for the paths in `open_paths`."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Collection[str]):
        self._app, self._open_paths = app, frozenset(open_paths)
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        echo = [(REQUEST_ID.encode(), request_id.encode())] if _VALID_ID.fullmatch(request_id) else []

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *echo]}
            await send(message)

        app = self._app
        if scope["path"] not in self._open_paths and not self._admits(headers.get("authorization", "")):
            app = _unauthorized(given="authorization" in headers).response()
        await app(scope, receive, send_with_id)

    def _admits(self, authorization: str) -> bool:
        """Takes the same time for any key, right or wrong."""
        scheme, _, key = authorization.partition(" ")
        found = [hmac.compare_digest(_digest(key.strip()), digest) for digest in self._digests]
        return not self._digests or (any(found) and scheme.lower() == "bearer")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _unauthorized(*, given: bool) -> ApiError:
    message = "the API key is wrong" if given else "this server needs an API key: send Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

"""Every error as OpenAI's clients expect it: {"error": {"message", "type", "param", "code"}} and a status."""

import logging
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxserve.exceptions import EngineDeadError, ParameterError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

RETRY_AFTER = {"Retry-After": "1"}  # seconds
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorInfo(msgspec.Struct, kw_only=True):
    """`param` names the field of the request that is at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    """The body of every answer that is no success."""

    error: ErrorInfo


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(
            ErrorResponse(error=ErrorInfo(message=str(self), type=kind, param=self.param, code=self.code))
        )

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def unsupported(message: str, param: str) -> ApiError:
    return bad_request(message, param, "unsupported")


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers=RETRY_AFTER)


def as_api_error(error: Exception) -> ApiError:
    """What to answer. Errors that are no fault of the caller are logged, and their text stays here."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            message = f"{error.detail}; /openapi.json lists the paths that exist and their methods"
            return ApiError(error.status_code, message, code="http_error", headers=error.headers)
        case QueueFullError():
            return unavailable(str(error), "queue_full")
        case EngineDeadError():
            return unavailable("the engine has ended, and this server ends with it", "engine_dead")
        case msgspec.ValidationError():
            return _of_body(str(error))
        case ParameterError():
            return bad_request(str(error), error.parameter)
        case RequestError():
            return bad_request(str(error))
        case NotImplementedError():
            return bad_request(str(error), code="unsupported")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def _of_body(message: str) -> ApiError:
    """Names the field as far as msgspec tells it: `... - at `$.messages[0].role``."""
    path = re.search(r" - at `\$\.?(.*)`$", message)
    where = "" if path is None else path[1]
    unknown = re.match(r"Object contains unknown field `(.*?)`", message)
    if unknown is not None:
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return bad_request(f"unknown field {name!r}; /openapi.json lists those that exist", name, "unknown_field")
    return bad_request(f"the body has a wrong value: {message}", where or None)

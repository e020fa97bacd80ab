"""/openapi.json, made from the structs of protocol.py."""

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.server import protocol
from jaxserve.server.errors import ErrorResponse
from jaxserve.server.info import OPEN_PATHS

REF = "#/components/schemas/{name}"
STRUCTS = (
    protocol.CompletionRequest,
    protocol.Completion,
    protocol.ChatCompletionRequest,
    protocol.ChatCompletion,
    protocol.ModelList,
    protocol.ModelCard,
    protocol.Status,
    protocol.Version,
    ErrorResponse,
)
REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "Comes back with the answer: up to 128 printable ASCII characters without spaces.",
    "schema": {"type": "string"},
}

EVENT = {
    "type": "object",
    "description": "One event; its data is a chunk as JSON, an error as JSON, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


async def document(request: Request) -> Response:
    return Response(encoded(), media_type="application/json")


@functools.cache
def encoded() -> bytes:
    return msgspec.json.encode(schema())


def schema() -> dict[str, Any]:
    """The OpenAPI document."""
    _, schemas = msgspec.json.schema_components(STRUCTS, ref_template=REF)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": {
            "/v1/completions": _post("Go on from a prompt.", protocol.CompletionRequest, protocol.Completion),
            "/v1/chat/completions": _post(
                "Answer a conversation.", protocol.ChatCompletionRequest, protocol.ChatCompletion
            ),
            "/v1/models": _get("The model that is served.", protocol.ModelList, errors=(401, 503)),
            "/v1/models/{model}": {
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                **_get("One model by its id.", protocol.ModelCard, errors=(401, 404, 503)),
            },
            "/health": _get("Does the engine live?", protocol.Status, other={503: protocol.Status}),
            "/ready": _get("Are requests taken?", protocol.Status, other={503: protocol.Status}),
            "/version": _get("Of jaxserve.", protocol.Version),
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # the server asks for a key only where it was given one
    }
    for path in OPEN_PATHS:
        document["paths"][path]["get"]["security"] = []
    return document


def _post(summary: str, request: type, answer: type) -> dict[str, Any]:
    ok = _answer(answer, "The answer; with stream, server-sent events that each hold a chunk, and [DONE].")
    ok["content"]["text/event-stream"] = {"schema": EVENT}
    return {
        "post": {
            "summary": summary,
            "parameters": [REQUEST_ID],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
            "responses": {"200": ok, **_errors(400, 401, 404, 408, 413, 503)},
        }
    }


def _get(
    summary: str,
    answer: type,
    *,
    errors: tuple[int, ...] = (),
    other: dict[int, type] | None = None,
) -> dict[str, Any]:
    others = {str(status): _answer(kind, "No.") for status, kind in (other or {}).items()}
    operation = {"summary": summary, "responses": {"200": _answer(answer, "Yes."), **others, **_errors(*errors)}}
    return {"get": operation}


def _errors(*statuses: int) -> dict[str, Any]:
    meaning = {
        400: "A value that cannot be served; `param` names it.",
        401: "The API key is missing or wrong.",
        404: "No such model.",
        408: "The body took too long to come.",
        413: "The body is too long.",
        503: "The queue is full, or the server is loading or stopping: try again after Retry-After seconds.",
    }
    return {str(status): _answer(ErrorResponse, meaning[status]) for status in statuses}


def _answer(kind: type, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(kind)}}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}

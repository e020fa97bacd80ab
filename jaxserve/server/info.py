"""The endpoints that only tell: /v1/models, /health, /ready, /version."""

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxserve
from jaxserve.server.errors import RETRY_AFTER, ApiError
from jaxserve.server.protocol import ModelCard, ModelList, Status, Version
from jaxserve.server.service import Service

OPEN_PATHS = ("/health", "/ready", "/version")  # where no API key is asked for


def as_json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def routes(service: Service) -> Sequence[Route]:
    created = int(time.time())

    def card() -> ModelCard:
        limits = service.loaded().limits
        return ModelCard(id=service.options.served_model_name, created=created, max_model_len=limits.max_model_len)

    async def models(request: Request) -> Response:
        return as_json(ModelList(data=[card()]))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name != service.options.served_model_name:
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return as_json(card())

    async def health(request: Request) -> Response:
        """The process and its engine live: what a liveness probe asks."""
        return as_json(Status(status="ok")) if service.is_alive() else _not("the engine has ended")

    async def ready(request: Request) -> Response:
        """The model is loaded and requests are taken: what a readiness probe asks."""
        return as_json(Status(status="ok")) if service.is_ready() else _not("loading, stopping or ended")

    async def version(request: Request) -> Response:
        return as_json(Version(version=jaxserve.__version__))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        *map(Route, OPEN_PATHS, (health, ready, version)),
    ]


def _not(status: str) -> Response:
    return as_json(Status(status=status), 503, RETRY_AFTER)

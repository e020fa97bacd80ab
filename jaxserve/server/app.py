"""`build_app`: the ASGI application."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.async_engine import AsyncLLM
from jaxserve.server import info, openapi
from jaxserve.server.chat import ChatAnswer
from jaxserve.server.completions import CompletionAnswer
from jaxserve.server.endpoint import Endpoint
from jaxserve.server.errors import ApiError, as_api_error
from jaxserve.server.middleware import Gate
from jaxserve.server.options import ServerOptions
from jaxserve.server.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.server.service import Observer, Service


def build_app(
    llm: AsyncLLM | None,
    options: ServerOptions,
    *,
    observers: Sequence[Observer] = (),
    open_routes: Sequence[Route] = (),
) -> Starlette:
    """The HTTP API over `llm`, for any ASGI server.

    Args:
        llm: the engine; None while it loads, when `app.state.service.llm` takes it later.
        observers: each is called for every `RequestOutput` of a request, before it is written.
        open_routes: further routes, which ask for no API key; their paths hold no parameters.
    """
    service = Service(llm, options, observers)
    app = Starlette(
        routes=[
            Route("/v1/completions", Endpoint(service, CompletionRequest, CompletionAnswer.of), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(service, ChatCompletionRequest, ChatAnswer.of), methods=["POST"]),
            *info.routes(service),
            Route("/openapi.json", openapi.document),
            *open_routes,
        ],
        middleware=[
            Middleware(
                Gate, api_keys=options.api_keys, open_paths=(*info.OPEN_PATHS, *(route.path for route in open_routes))
            )
        ],
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_error, Exception: _answer_error},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()

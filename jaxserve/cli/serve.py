"""`jaxserve serve`: the OpenAI-compatible HTTP server."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.options import ENGINE_OPTIONS, ProfileOption, takes
from jaxserve.exceptions import how_to_install
from jaxserve.server.options import MAX_REQUEST_BYTES, ServerOptions

if TYPE_CHECKING:
    from jaxserve.server.run import HttpServer

KEY_VARIABLE = "JAXSERVE_API_KEY"


@takes(engine=ENGINE_OPTIONS)
def serve(
    engine: dict[str, Any],
    host: Annotated[str, typer.Option(help="Address to bind. There is no TLS here.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="A key that clients must send as a bearer token; may be given several times. /, /live.json, /metrics, "
            "/version and the probes stay open.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests and answers.  [default: that of --model]")
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(help="Longest body of a request.")] = MAX_REQUEST_BYTES,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests may go on after SIGTERM or Ctrl-C.")
    ] = 30.0,
    profile: ProfileOption = None,
) -> None:
    """Serve the model over HTTP, to clients of OpenAI's API: completions and chat, whole or streamed.

    /health tells whether the engine lives, /ready whether requests are taken, /openapi.json what may be asked; / shows
    the engine at work, /metrics is for Prometheus. The first SIGTERM or Ctrl-C refuses new requests and lets running
    ones end; the second, or --drain-timeout, cuts them, and their clients get an error. A dead engine ends the server,
    with exit code 1.
    """
    try:
        from jaxserve.server.run import HttpServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise ValueError(f"serve needs an HTTP server: {how_to_install('server')}") from error
    if not api_key and KEY_VARIABLE in os.environ:
        raise ValueError(f"{KEY_VARIABLE} must hold a key, got nothing; unset it to serve without keys")
    options = ServerOptions(
        served_model_name=served_model_name or engine["model"],
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        max_request_bytes=max_request_bytes,
        drain_timeout_s=drain_timeout,
    )
    server = HttpServer(options)
    shown_host = f"[{host}]" if ":" in host else host
    print(f"listening on http://{shown_host}:{server.port}, loading {engine['model']}", flush=True)
    asyncio.run(_until_stopped(server, engine, profile), loop_factory=server.loop_factory)


async def _until_stopped(server: "HttpServer", engine: dict[str, Any], profile: Path | None) -> None:
    def stop() -> None:
        print(f"stopping: {server.service.num_running} requests may end, the next signal ends them", flush=True)
        server.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await server.run(lambda: driver.start_async(engine), on_ready=lambda: print("ready", flush=True), profile=profile)

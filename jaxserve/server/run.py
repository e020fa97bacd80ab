"""`HttpServer`: from binding the port to the last drained request.

How this works. The port is bound before the model is loaded, so that probes get answers: /health says yes, /ready no.
A stop (SIGTERM, SIGINT) turns /ready to no, refuses new requests, and lets running ones go on up to a limit; then the
port closes. A dead engine turns /health to no, and ends the server after a moment, with an error, for whoever
supervises it to start a new one.
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import uvicorn

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import EngineDeadError
from jaxserve.server.app import build_app
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import ServerOptions
from jaxserve.server.page import LivePage

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.25
DEATH_NOTICE_S = 1.0  # for probes and clients to hear of a dead engine from us
CLOSE_TIMEOUT_S = 5.0  # for the last bytes of drained requests
KEEP_ALIVE_S = 75  # longer than clients and proxies keep a connection, so that it is theirs to close
BACKLOG = 2048


class HttpServer:
    """Binds at once; `run` serves until `stop`.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, options: ServerOptions):
        metrics, page = ServerMetrics(options.served_model_name), LivePage(options.served_model_name)
        app = build_app(
            None,
            options,
            observers=(metrics.observe, page.observe),
            open_routes=[route for part in (metrics, page) for route in part.routes(lambda: self.service.llm)],
        )
        self.service = app.state.service
        self._socket = bind(options)
        self._stopped = asyncio.Event()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
        )
        self.loop_factory = config.get_loop_factory()  # uvloop's where it is installed
        self._server = _Uvicorn(config)

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def stop(self) -> None:
        """Begins to drain; called again, ends what still runs. From the loop's thread only."""
        if self._stopped.is_set():
            self.service.hurry()
        self._stopped.set()

    async def run(
        self,
        load: Callable[[], AsyncLLM],
        on_ready: Callable[[], None] = lambda: None,
        profile: str | os.PathLike[str] | None = None,
    ) -> None:
        """Serves the engine that `load` makes, and shuts it down at the end.

        `profile` is a folder for a JAX profiler trace of all that the engine does until the last request is drained.

        Raises:
            EngineDeadError: the engine ended, or could not start.
            Exception: what else `load` raises.
        """
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            if await self._load(load):
                gc.collect()
                gc.freeze()  # or each full collection looks at all modules, and every stream waits for 0.1 s
                engine = self.service.loaded()
                if profile is not None:
                    await engine.start_profile(profile)
                on_ready()
                await self._watch()
                await self.service.drain()
                if profile is not None:
                    await engine.stop_profile()
        finally:
            self.service.close()
            self._server.should_exit = True
            await serving
            if self.service.llm is not None:
                self.service.llm.shutdown()

    async def _load(self, load: Callable[[], AsyncLLM]) -> bool:
        """False when a stop came first; an engine that comes later is ended at once."""
        loading: Future[AsyncLLM] = Future()
        loading.set_running_or_notify_cancel()
        threading.Thread(target=_load_into, args=(loading, load), name="load-model", daemon=True).start()
        loaded, stopped = asyncio.wrap_future(loading), asyncio.create_task(self._stopped.wait())
        await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loaded.done():
            loaded.cancel()
            loading.add_done_callback(_discard)
            return False
        self.service.llm = loaded.result()
        return True

    async def _watch(self) -> None:
        """Until a stop. Raises EngineDeadError when the engine ends before."""
        engine = self.service.loaded()
        while not self._stopped.is_set():
            try:
                await engine.check_health()
            except EngineDeadError as error:
                logger.error("the engine died: %s", error)
                await asyncio.sleep(DEATH_NOTICE_S)
                raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), HEALTH_INTERVAL_S)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: its own handlers close the port at once, and raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _load_into(loading: Future[AsyncLLM], load: Callable[[], AsyncLLM]) -> None:
    try:
        loading.set_result(load())
    except BaseException as error:  # or the server would wait for ever
        loading.set_exception(error)


def _discard(loading: Future[AsyncLLM]) -> None:
    if loading.exception() is None:
        loading.result().shutdown()


def bind(options: ServerOptions) -> socket.socket:
    """A listening socket. What is accepted from it inherits the limit for readers that stall."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * options.stall_timeout_s))
    listener.setblocking(False)
    return listener

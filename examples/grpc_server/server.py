"""A gRPC server over AsyncLLM: `python server.py --model smollm2-135m --port 50051`. Binds loopback by default.

How this works. `Server` binds at once, so that health answers while the model loads in a thread; service.py serves,
behind the interceptor of guard.py. grpc.health.v1 answers to three names: "" is liveness (the engine has not died),
"jaxserve.v1.Generation" and "inference.GRPCInferenceService" are readiness (the model is loaded as well).
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

try:
    import generation_pb2_grpc as rpc
    import grpc
    import open_inference_pb2_grpc as oip_rpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection
    from guard import Guard
    from kserve_facade import KSERVE_SERVICE, KServeFacade
    from options import CHANNEL_OPTIONS, check_token, engine_options, parser, server_credentials
    from service import SERVICE, Generation

    import jaxserve
    from jaxserve import EngineDeadError
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed; at the root of the checkout: "
        f'.venv/bin/pip install -e ".[grpc]", then run this with .venv/bin/python'
    )

if TYPE_CHECKING:
    from jaxserve import AsyncLLM

HEALTH_INTERVAL_S = 0.5
CLOSE_S = 1.0  # for last statuses to reach their clients; health watchers end then

logger = logging.getLogger("grpc_server")


class Server:
    """Binds at once; `run` lasts until `interrupt`.

    Args:
        credentials: None = plain text.
        token: None = everybody may call.
        grace_s: how long requests may go on after `interrupt`.

    Raises:
        OSError: the address is taken, or the certificate and the key do not fit.
    """

    def __init__(
        self,
        address: str,
        *,
        model_name: str,
        credentials: grpc.ServerCredentials | None = None,
        token: str | None = None,
        grace_s: float = 20.0,
    ) -> None:
        self.generation = Generation(model_name)
        self._grace_s = grace_s
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._health = health.aio.HealthServicer()
        self._server = server = grpc.aio.server(options=CHANNEL_OPTIONS, interceptors=[Guard(token)])
        rpc.add_GenerationServicer_to_server(self.generation, server)
        oip_rpc.add_GRPCInferenceServiceServicer_to_server(KServeFacade(self.generation), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [SERVICE, KSERVE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        try:
            secure = credentials is not None
            self.port = server.add_secure_port(address, credentials) if secure else server.add_insecure_port(address)
        except RuntimeError as error:
            reason = "is it free, and does the key fit the certificate?" if secure else "is it free?"
            raise OSError(f"cannot listen on {address}: {reason}") from error

    def interrupt(self) -> None:
        """Stops the server: at first running requests are waited for, at the second call no longer."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self, load: "Callable[[], AsyncLLM]") -> None:
        """Serves the engine that `load` gives; shuts it down at the end. Raises what `load` raises."""
        await self._say(alive=True, ready=False)
        await self._server.start()
        try:
            self.generation.engine = await self._load(load)
            if self.generation.engine is not None:
                await self._say(alive=True, ready=True)
                logger.info("ready")
                await self._watch(self.generation.engine)
        finally:
            await self._health.enter_graceful_shutdown()
            await self.generation.drain(self._grace_s, self._hurry)
            await self._server.stop(CLOSE_S)
            if self.generation.engine is not None:
                self.generation.engine.shutdown()

    async def _load(self, load: "Callable[[], AsyncLLM]") -> "AsyncLLM | None":
        """None when told to stop meanwhile. The thread is a daemon, so it does not hold up the end of the process."""
        loaded: concurrent.futures.Future[AsyncLLM] = concurrent.futures.Future()

        def run() -> None:
            try:
                engine = load()
                gc.collect()
                gc.freeze()  # else each full collection walks over jax's modules, and all streams wait for 0.1 s
                loaded.set_result(engine)
            except BaseException as error:
                loaded.set_exception(error)

        threading.Thread(target=run, name="load", daemon=True).start()
        loading, stopping = asyncio.wrap_future(loaded), asyncio.create_task(self._stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if loading.done():
            return loading.result()
        loaded.add_done_callback(lambda future: None if future.exception() else future.result().shutdown())
        return None

    async def _watch(self, engine: "AsyncLLM") -> None:
        """Until told to stop; a dead engine turns health to NOT_SERVING, and whoever reads it restarts the server."""
        while not self._stop.is_set():
            try:
                await engine.check_health()
            except EngineDeadError as error:
                logger.error("the engine died: %s", error)
                await self._say(alive=False, ready=False)
                await self._stop.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), HEALTH_INTERVAL_S)

    async def _say(self, *, alive: bool, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name, serving in (("", alive), (SERVICE, ready), (KSERVE_SERVICE, ready)):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


async def main(options: argparse.Namespace) -> None:
    credentials = server_credentials(options.tls_cert, options.tls_key, options.tls_client_ca)
    host = f"[{options.host}]" if ":" in options.host and not options.host.startswith("[") else options.host
    server = Server(
        f"{host}:{options.port}",
        model_name=options.served_model_name or options.model,
        credentials=credentials,
        token=check_token(options.token),
        grace_s=options.grace_s,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.interrupt)
    if credentials is None and host not in ("127.0.0.1", "[::1]", "localhost"):
        logger.warning("%s is not loopback, and without --tls-cert everything travels in plain text", host)
    print(f"listening on {host}:{server.port}", flush=True)
    await server.run(lambda: jaxserve.AsyncLLM(**engine_options(options)))  # imports jax in the thread that loads


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(main(parser().parse_args()))
    except (
        EngineDeadError,
        ValueError,
        NotImplementedError,
        OSError,
    ) as error:  # a model that cannot load, a bad option
        sys.exit(f"error: {error}")

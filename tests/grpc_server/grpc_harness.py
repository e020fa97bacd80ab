"""What the tests of the gRPC example share: its server over a fake token core, and clients of it."""

import asyncio
import contextlib
import importlib
import os
import sys
import threading
import time
from pathlib import Path

import grpc
from gated_echo import gated_echo
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve import AsyncLLM

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpc_server"
sys.path.insert(0, str(EXAMPLE))  # a folder of scripts, no package
client, guard, messages, options, server, service = map(
    importlib.import_module, ("client", "guard", "messages", "options", "server", "service")
)
pb, rpc = map(importlib.import_module, ("generation_pb2", "generation_pb2_grpc"))

SERVICE, KSERVE_SERVICE = "jaxserve.v1.Generation", "inference.GRPCInferenceService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WAIT_S = 30.0
Code = grpc.StatusCode


class Running:
    """A server on an event loop in a thread of its own, and a plain channel to it."""

    def __init__(self, config, options):
        self._config, self._options = config, options
        self._bound = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._run, name="server", daemon=True)
        self.thread.start()
        assert self._bound.wait(WAIT_S)
        self.address = f"127.0.0.1:{self.server.port}"
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpc.GenerationStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def _run(self):
        async def main():
            self.loop, self.server = asyncio.get_running_loop(), server.Server("127.0.0.1:0", **self._options)
            self._bound.set()
            await self.server.run(lambda: AsyncLLM.over(gated_echo, self._config))

        try:
            asyncio.run(main())
        except Exception as error:
            self.error = error

    def interrupt(self):
        self.loop.call_soon_threadsafe(self.server.interrupt)

    def run(self, coroutine):
        """Runs a client of grpc.aio, which shall not have two loops in one process."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def ended(self):
        """Waits for the server's end; the error that it ended with."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.error

    def status(self, name, **call):
        return self.health.Check(health_pb2.HealthCheckRequest(service=name), **call).status

    def health_becomes(self, name, status):
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True, timeout=WAIT_S)
        assert any(response.status == status for response in watch)
        watch.cancel()

    def info(self):
        metadata = [("authorization", f"Bearer {self._options.get('token')}")]
        return self.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)

    def settled(self, **expected):
        """Waits until the engine's counters have these values, and no call of Generate is open."""
        end = time.monotonic() + WAIT_S
        while (info := self.info()).num_active_requests or any(info.metrics[k] != v for k, v in expected.items()):
            assert time.monotonic() < end, f"expected {expected}, got {info}"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(*, ready=True, options=None, **config):
    """`Server(**options)` over a core with this config, until the block's end."""
    running = Running(config, {"model_name": "echo", **(options or {})})
    try:
        if ready:
            running.health_becomes(SERVICE, SERVING)
        yield running
    finally:
        running.channel.close()
        if running.thread.is_alive():
            running.interrupt()
        assert running.ended() is None


def request(text="abc", request_id=None, stream=None, **params):
    return pb.GenerateRequest(
        text=text, request_id=request_id, stream=stream, sampling_params=pb.SamplingParams(**params)
    )


def refusal(call):
    """The status of a call that must fail; takes what comes before."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("expected a refusal, the call ended well")


def text_of(responses, index=0):
    return "".join(r.delta.text for r in responses if r.HasField("delta") and r.delta.index == index)


def environment(**variables):
    """Of a process that shall find jaxserve and the tests' cores."""
    paths = [ROOT, ROOT / "tests", ROOT / "tests" / "grpc_server"]
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths)), **variables}

"""The gRPC example as a front end for `benchmarks.frontend_load`, which says how it measures.

`over_grpc(factory, config)` starts the example's server in a process of its own, over the token core that
`factory(config)` makes, and gives a client of it, the server's process id, and a function that tells how many sequences
run at the end. The client is grpc.aio's; every delta is a message.
"""

import asyncio
import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks._front_ends import Running, server_in_process, told
from jaxserve import AsyncLLM
from jaxserve.engine_process import CoreFactory

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpc_server"
NUM_CHANNELS = 8  # connections that the streams share


@functools.cache
def example(name: str) -> Any:
    """A module of the example, which is a folder of scripts."""
    sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


class Grpc:
    """A client with a few connections."""

    def __init__(self, channels: list[grpc.aio.Channel]):
        self._stubs = itertools.cycle([example("generation_pb2_grpc").GenerationStub(channel) for channel in channels])

    async def generate(self, num_tokens: int, on_text: Callable[[str], bool]) -> None:
        """Runs one request to its end; text goes to `on_text` as it comes, and False from that ends the call."""
        pb = example("generation_pb2")
        params = pb.SamplingParams(max_tokens=num_tokens)
        call = next(self._stubs).Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), sampling_params=params))
        async for response in call:
            if response.HasField("delta") and not on_text(response.delta.text):
                call.cancel()
                break

    async def num_running(self) -> float:
        """Sequences that still run once aborts have had a moment to arrive."""
        info = example("generation_pb2").GetServerInfoRequest()
        for _ in range(100):
            running = (await next(self._stubs).GetServerInfo(info)).metrics["running"]
            if not running:
                break
            await asyncio.sleep(0.05)
        return running


@contextlib.asynccontextmanager
async def over_grpc(factory: CoreFactory, config: Any) -> AsyncGenerator[Running]:
    """A loaded server over `factory(config)`, whose core must count `running` in its metrics."""
    local = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share one connection
    async with contextlib.AsyncExitStack() as stack:
        port, pid, _ = await stack.enter_async_context(server_in_process(serve, (factory, config)))
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", local))
            for _ in range(NUM_CHANNELS)
        ]
        await until_ready(channels[0])
        client = Grpc(channels)
        yield Running(client, pid, client.num_running)


async def until_ready(channel: grpc.aio.Channel) -> None:
    service = health_pb2.HealthCheckRequest(service=example("service").SERVICE)
    watch = health_pb2_grpc.HealthStub(channel).Watch(service, wait_for_ready=True)
    async for response in watch:
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()


async def serve(core: tuple[CoreFactory, Any], pipe: Connection) -> None:
    """Tells its port, and serves until the pipe closes."""
    server = example("server").Server("127.0.0.1:0", model_name="paced")
    running = asyncio.create_task(server.run(lambda: AsyncLLM.over(*core)))
    pipe.send(server.port)
    await told(pipe, running)
    server.interrupt()
    await running

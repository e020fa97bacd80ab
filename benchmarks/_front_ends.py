"""The ways to the engine whose cost `frontend_load` compares: in process, and each server with a lean client of it."""

import asyncio
import contextlib
import multiprocessing
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from benchmarks._paced_core import paced
from jaxserve import AsyncLLM, RequestOutputKind, SamplingParams

type OnText = Callable[[str], bool]  # False: the client leaves


class FrontEnd(Protocol):
    """A way to the engine, seen by a client."""

    async def generate(self, num_tokens: int, on_text: OnText) -> None:
        """Runs one request to its end; text goes to `on_text` as it comes."""
        ...


class Running(NamedTuple):
    """A started front end."""

    client: FrontEnd
    pid: int  # of the process whose memory counts
    end: Callable[[], Awaitable[float]]  # to be called once, at the end: how many sequences still run


class InProcess:
    """No front end: readers beside the engine's own."""

    def __init__(self, llm: AsyncLLM):
        self._llm, self._number = llm, 0

    async def generate(self, num_tokens: int, on_text: OnText) -> None:
        params = SamplingParams(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA)
        self._number += 1
        async with contextlib.aclosing(self._llm.generate([1], params, str(self._number))) as outputs:
            async for output in outputs:
                if not on_text(output.outputs[0].text):
                    break


class Http:
    """Streams of /v1/completions, one connection a request. Reads no more than the texts, as a lean client would."""

    def __init__(self, port: int):
        self._port = port

    async def generate(self, num_tokens: int, on_text: OnText) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        transport, _ = await loop.create_connection(
            lambda: _HttpStream(num_tokens, on_text, done), "127.0.0.1", self._port
        )
        try:
            await done
        finally:
            transport.close()


class _HttpStream(asyncio.Protocol):
    def __init__(self, num_tokens: int, on_text: OnText, done: asyncio.Future[None]):
        body = b'{"prompt":[1],"stream":true,"max_tokens":%d}' % num_tokens
        self._request = b"POST /v1/completions HTTP/1.1\r\nHost: l\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        self._on_text, self._done, self._rest = on_text, done, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.endswith(b"[DONE]"):
                self._done.set_result(None)
            elif (text := re.search(rb'"text":"([0-9a-f]*)"', event)) is not None and not self._on_text(
                text[1].decode()
            ):
                self._done.set_result(None)
                return

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))


async def serve_http(config: dict, pipe: Connection) -> None:
    """Tells its port; whatever is said to it asks how many sequences still run."""
    from jaxserve.server.options import ServerOptions
    from jaxserve.server.run import HttpServer

    server = HttpServer(ServerOptions(served_model_name="paced", port=0))
    running = asyncio.create_task(
        server.run(lambda: AsyncLLM.over(paced, config), on_ready=lambda: pipe.send(server.port))
    )
    while await told(pipe, running):
        pipe.send(await num_running(server.service.loaded()))
    server.stop()
    await running


async def num_running(llm: AsyncLLM) -> float:
    """Sequences that still run once aborts have had a moment to arrive."""
    for _ in range(100):
        if not (running := (await llm.get_metrics())["running"]):
            break
        await asyncio.sleep(0.05)
    return running


async def told(pipe: Connection, running: asyncio.Task[None]) -> bool:
    """True when something was said; False when the other end has gone, or `running` has ended."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    reading = asyncio.create_task(readable.wait())
    await asyncio.wait((reading, running), return_when=asyncio.FIRST_COMPLETED)
    reading.cancel()
    loop.remove_reader(pipe.fileno())
    try:
        return not running.done() and pipe.recv() is not None
    except EOFError:
        return False


@contextlib.asynccontextmanager
async def server_in_process(
    serve: Callable[[Any, Connection], Coroutine[Any, Any, None]], config: Any
) -> AsyncGenerator[tuple[int, int, Connection]]:
    """Runs `serve(config, pipe)` in a process of its own until its pipe closes: port, process id, and our end.

    Raises:
        EOFError: it ended before it told its port; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(serve, config, theirs))  # no daemon: it has a child of its own
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield await asyncio.to_thread(ours.recv), process.pid, ours
    finally:
        ours.close()
        await asyncio.to_thread(process.join)


def _run(serve: Callable[[Any, Connection], Coroutine[Any, Any, None]], config: Any, pipe: Connection) -> None:
    asyncio.run(serve(config, pipe))


@contextlib.asynccontextmanager
async def in_process(config: dict) -> AsyncGenerator[Running]:
    llm = await asyncio.to_thread(AsyncLLM.over, paced, config)
    try:
        yield Running(InProcess(llm), os.getpid(), lambda: num_running(llm))
    finally:
        llm.shutdown()


@contextlib.asynccontextmanager
async def over_http(config: dict) -> AsyncGenerator[Running]:
    async with server_in_process(serve_http, config) as (port, pid, pipe):

        async def still_running() -> float:
            pipe.send("how many run?")
            return await asyncio.to_thread(pipe.recv)

        yield Running(Http(port), pid, still_running)


def over_grpc(config: dict) -> contextlib.AbstractAsyncContextManager[Running]:
    from benchmarks import frontend_grpc  # needs the extra [grpc]

    return frontend_grpc.over_grpc(paced, config)


FRONT_ENDS = {"http": over_http, "grpc": over_grpc}  # by name: made of the core's config

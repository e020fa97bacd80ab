"""Starts the server for tests, and looks into its engine."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
from echo_core import echo

from jaxserve import AsyncLLM
from jaxserve.server.options import ServerOptions
from jaxserve.server.run import HttpServer

LIMIT_S = 30.0


class Running:
    """A server in a thread that has loaded its engine."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop, options: ServerOptions):
        self.server, self.options, self._loop = server, options, loop
        self.port = server.port
        self.engine = server.service.loaded()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **({"api_key": "none"} | options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **({"api_key": "none"} | options))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers of one request. A body that is no bytes goes as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            text = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            found = {name.lower(): value for name, value in response.headers.items()}
            return response.status, json.loads(text) if is_json else text.decode(), found

    def metrics(self) -> dict[str, float]:
        return asyncio.run_coroutine_threadsafe(self.engine.get_metrics(), self._loop).result(LIMIT_S)

    def settled(self, **expected: float) -> dict[str, float]:
        """Waits until the engine's counters are as expected."""

        def holds() -> dict[str, float] | None:
            found = self.metrics()
            return found if all(found[name] == value for name, value in expected.items()) else None

        return eventually(holds)

    def in_loop(self, call: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(call)


def eventually[T](condition: Callable[[], T]) -> T:
    """The first true value of `condition`."""
    end = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end, f"{condition} did not come true"
        time.sleep(0.005)
    return value


def load_echo() -> AsyncLLM:
    return AsyncLLM.over(echo, {"step_s": 0.001})


@contextlib.contextmanager
def running(options: ServerOptions, load: Callable[[], AsyncLLM] = load_echo) -> Iterator[Running]:
    """Ends with a stop; an error of the server is raised here."""
    server = HttpServer(options)
    ready, loops, errors = threading.Event(), [], []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.run(load, on_ready=ready.set)

    def work() -> None:
        try:
            asyncio.run(main(), loop_factory=server.loop_factory)
        except Exception as error:
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(LIMIT_S)
        if not errors:
            yield Running(server, loops[0], options)
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended already
            loops[0].call_soon_threadsafe(server.stop)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def raw_request(port: int, path: str, body: Any, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    """Sends a request over a bare socket and leaves the answer unread."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(LIMIT_S)
    connection.connect(("127.0.0.1", port))
    connection.sendall(b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
    return connection

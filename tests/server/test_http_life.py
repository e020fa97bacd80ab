"""Clients that leave or stall, and the server's own life: loading, draining, a dead engine."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import sys
import threading

import openai
import pytest
from http_server import eventually, load_echo, raw_request, running

from jaxserve import AsyncLLM, EngineDeadError
from jaxserve.server.options import ServerOptions
from jaxserve.server.run import HttpServer

COMPLETIONS = "/v1/completions"
OPTIONS = ServerOptions(served_model_name="echo", port=0, drain_timeout_s=20.0)
LONG = {"prompt": "abc", "max_tokens": 4000}


def read_until(connection: socket.socket, words: bytes) -> bytes:
    data = b""
    while words not in data:
        part = connection.recv(1 << 16)
        assert part, f"the connection ended before {words}"
        data += part
    return data


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_client_that_leaves_aborts_its_request(server, stream, num_prompts):
    aborted = server.metrics()["aborted"]
    body = LONG | {"prompt": ["abc"] * num_prompts, "stream": stream}
    with raw_request(server.port, COMPLETIONS, body) as connection:
        server.settled(running=num_prompts)
        if stream:
            read_until(connection, b"data: ")
    server.settled(running=0, aborted=aborted + num_prompts)
    assert server.server.service.num_running == 0


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server):
    rng = random.Random(0)
    for _ in range(60):
        body = LONG | {"stream": rng.random() < 0.7, "n": rng.choice([1, 2]), "temperature": 1}
        with raw_request(server.port, COMPLETIONS, body) as connection:
            connection.settimeout(rng.choice([0.0001, 0.001, 0.01]))
            with contextlib.suppress(TimeoutError):
                connection.recv(rng.choice([1, 100, 10_000]))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:  # leaves in the middle of a body
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{")
    server.settled(running=0)
    assert server.ask("POST", COMPLETIONS, {"prompt": "ab", "max_tokens": 3})[1]["choices"][0]["text"] == "aba"


def stalled_reader(port: int, body: dict) -> socket.socket:
    """Asks for a stream with room for few bytes, and reads none."""
    return raw_request(port, COMPLETIONS, body, receive_buffer_bytes=1024)


def test_a_slow_reader_holds_up_neither_its_own_generation_nor_others(server):
    finished = server.metrics()["finished"]
    with stalled_reader(server.port, LONG | {"stream": True, "n": 3}) as connection:
        server.settled(running=0, finished=finished + 3)  # though nobody has read a byte
        assert server.ask("POST", COMPLETIONS, {"prompt": "ab", "max_tokens": 3})[0] == 200
        assert server.server.service.num_running == 1  # its text waits, merged
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        data = read_until(connection, b"[DONE]")
    texts = {0: "", 1: "", 2: ""}
    for event in sse(data):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {("abc" * 1334)[:4000]}
    assert data.count(b"data: ") < 12_000  # unread chunks became one


def sse(data: bytes) -> list[dict]:
    body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data.split(b"\r\n\r\n", 1)[1])
    return [json.loads(e) for e in re.findall(rb"data: (\{.*?\})\n\n", body)]


@pytest.fixture(scope="module")
def impatient():
    with running(ServerOptions(served_model_name="echo", port=0, stall_timeout_s=0.5)) as it:
        yield it


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot end a stalled connection")
def test_a_reader_that_stalls_too_long_is_cut_off(impatient):
    with stalled_reader(impatient.port, LONG | {"stream": True, "n": 3}) as connection:
        impatient.settled(running=3)
        eventually(lambda: impatient.server.service.num_running == 0)
        eventually(lambda: not impatient.server._server.server_state.connections)
        impatient.settled(running=0)
        with pytest.raises(ConnectionResetError):
            read_until(connection, b"[DONE]")


def test_a_body_that_does_not_come_is_408(impatient):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{")
        answer = read_until(connection, b"}")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"within 0.5 s" in answer


def test_while_the_model_loads_the_server_is_alive_but_not_ready():
    server = HttpServer(OPTIONS)
    go_on, ready = threading.Event(), threading.Event()

    def load() -> AsyncLLM:
        go_on.wait()
        return load_echo()

    async def main() -> None:
        task = asyncio.create_task(server.run(load, on_ready=ready.set))
        try:
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0
            ) as client:
                assert await asyncio.to_thread(status, server.port, "/health") == 200
                assert await asyncio.to_thread(status, server.port, "/ready") == 503
                for call in (client.completions.create(model="echo", prompt="a"), client.models.list()):
                    with pytest.raises(openai.InternalServerError, match="still loading"):
                        await call
                go_on.set()
                await asyncio.to_thread(ready.wait)
                assert await asyncio.to_thread(status, server.port, "/ready") == 200
                assert (await client.completions.create(model="echo", prompt="a")).choices
        finally:
            go_on.set()
            server.stop()
            await task

    asyncio.run(main())


def status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def test_a_stop_while_the_model_loads_does_not_wait_for_it():
    server, go_on = HttpServer(OPTIONS), threading.Event()
    made: list[AsyncLLM] = []

    def load() -> AsyncLLM:
        go_on.wait()
        made.append(load_echo())
        return made[0]

    async def main() -> None:
        task = asyncio.create_task(server.run(load))
        await asyncio.to_thread(status, server.port, "/health")
        server.stop()
        await task

    asyncio.run(main())
    go_on.set()
    eventually(lambda: made and made[0].errored)  # what came too late is ended, too


def test_an_engine_that_cannot_start_is_the_servers_error():
    with pytest.raises(EngineDeadError, match="no such weights"), running(OPTIONS, load=load_nothing):
        pass


def test_a_load_that_exits_ends_the_server():
    async def main() -> None:
        server = HttpServer(OPTIONS)
        await asyncio.wait_for(server.run(lambda: sys.exit("no weights here")), 30)

    with pytest.raises(SystemExit, match="no weights here"):
        asyncio.run(main())


def load_nothing() -> AsyncLLM:
    from echo_core import echo

    return AsyncLLM.over(echo, {"fail": True})


def test_a_stop_refuses_new_requests_and_lets_running_ones_end():
    with running(OPTIONS) as it, it.client(max_retries=0) as client:
        chunks = client.completions.create(model="echo", prompt="abc", max_tokens=600, stream=True)
        text = next(chunks).choices[0].text
        it.in_loop(it.server.stop)
        assert eventually(lambda: it.ask("GET", "/ready")[0] == 503)
        assert it.ask("GET", "/health")[0] == 200
        status, answer, headers = it.ask("POST", COMPLETIONS, {"prompt": "a"})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "stopping", "1")
        assert text + "".join(chunk.choices[0].text for chunk in chunks) == "abc" * 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", it.port)).close()


@pytest.mark.parametrize("ended_by", ["the limit", "a second stop", "a second stop at once"])
def test_what_runs_longer_than_the_limit_or_a_second_stop_is_cut_and_says_so(ended_by):
    drain_timeout_s = 0.05 if ended_by == "the limit" else 20.0
    options = ServerOptions(served_model_name="echo", port=0, drain_timeout_s=drain_timeout_s)
    with running(options) as it, it.client(max_retries=0) as client:
        chunks = client.completions.create(model="echo", prompt="abc", max_tokens=4000, stream=True)
        next(chunks)
        with raw_request(it.port, COMPLETIONS, LONG) as whole:
            it.settled(running=2)
            it.in_loop(it.server.stop)
            if ended_by == "a second stop":
                assert eventually(lambda: it.ask("GET", "/ready")[0] == 503)
            if ended_by != "the limit":
                it.in_loop(it.server.stop)
            with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
                list(chunks)
            answer = read_until(whole, b"}}")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"stopping"' in answer


def kill_the_engine() -> None:
    with running(OPTIONS) as it, it.client(max_retries=0) as client:
        chunks = client.completions.create(model="echo", prompt="abc", max_tokens=4000, stream=True)
        next(chunks)
        os.kill(it.engine._process.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine has ended"):
            list(chunks)
        assert it.ask("GET", "/health")[0] == 503
        assert it.ask("GET", "/ready")[0] == 503
        status, answer, _ = it.ask("POST", COMPLETIONS, {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        eventually(lambda: it.server._server.should_exit)


def test_a_dead_engine_is_503_and_ends_the_server(caplog):
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        kill_the_engine()
    assert "the engine died: the engine process was killed by SIGKILL" in caplog.text


def test_a_taken_port_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        HttpServer(ServerOptions(served_model_name="m", port=taken.getsockname()[1]))

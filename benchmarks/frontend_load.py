"""What does a front end cost: how much later does a token reach a client than a reader of AsyncLLM in the same process?

A core without a model (`PacedCore`) takes a step every --step-ms and gives each running sequence one token, whose id is
the number of the step. Before a step's tokens leave the core it writes the time into a file that all processes map, so
whoever reads a token later knows its age: time.monotonic() now less the time of its step. The age holds everything on
the way: pipe, detokenising, event loops, encoding, sockets, and the client's reading. The row is the 99th percentile of
ages behind the front end less the one in process; both with as many streams, for as long.

The clients, in one process, and the server, in another, share the machine; each stream asks for 32 to 256 tokens, and
then again. That step numbers follow each other shows that no token is lost, doubled or out of order. With --drop-share
some streams end by a disconnect at a random token; in the end nothing may run. The server's memory is compared between
a quarter of the time and its end.

    python -m benchmarks.frontend_load --streams 32 256 --seconds 20
    python -m benchmarks.frontend_load --streams 256 --seconds 120 --drop-share 0.2
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import mmap
import multiprocessing
import os
import random
import re
import tempfile
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models

from benchmarks._report import Row, report
from jaxserve import AsyncLLM, RequestOutputKind, SamplingParams
from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.engine_messages import Facts, TokenizerFacts
from jaxserve.tokenizer import Tokenizer

NUM_STAMPS = 1 << 16  # steps until their numbers begin again
TARGET_MS = {32: 5.0, 256: 40.0}
TARGET_GROWTH_MIB = 16.0
TOKENS = (32, 256)  # fewest and most of a request

# ------------------------------------------------------------------------------------------------------ the core


class PacedCore:
    """Config: `step_s`, and `stamps`, the path of the file for the times of steps."""

    def __init__(self, config: dict):
        self._step_s, self._step = config["step_s"], 0
        self._stamps = map_stamps(config["stamps"])
        self._left: dict[int, int] = {}  # tokens to go, by sequence
        self._next = time.monotonic()

    def add_request(self, request: CoreRequest) -> None:
        assert request.params.max_tokens is not None
        self._left[request.seq_id] = request.params.max_tokens

    def finish(self, seq_ids: list[int], reason: str, stop_reason: str | None = None) -> list[CoreOutput]:
        for seq_id in seq_ids:
            self._left.pop(seq_id, None)
        return []

    def step(self) -> list[CoreOutput]:
        self._next = max(self._next + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._step = (self._step + 1) % NUM_STAMPS
        outputs = []
        for seq_id, left in list(self._left.items()):
            last = left == 1
            outputs.append(
                CoreOutput(seq_id=seq_id, new_token_ids=[self._step], finish_reason="length" if last else None)
            )
            if last:
                del self._left[seq_id]
            else:
                self._left[seq_id] = left - 1
        self._stamps[self._step] = time.monotonic()
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def get_metrics(self) -> dict[str, float]:
        return {"running": len(self._left)}

    def close(self) -> None:
        pass


def paced(config: dict) -> tuple[PacedCore, Facts]:
    """The `CoreFactory`. A token's text is the number of its step in four hexadecimal digits."""
    vocab = {f"{i:04x}": i for i in range(NUM_STAMPS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    facts = Facts(
        tokenizer=TokenizerFacts.of(Tokenizer(backend)),
        vocab_size=NUM_STAMPS,
        max_model_len=4096,
        max_logprobs=0,
        generation_config={},
        seed=0,
    )
    return PacedCore(config), facts


def map_stamps(path: str) -> np.ndarray:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 8 * NUM_STAMPS), np.float64)


# ------------------------------------------------------------------------------------------------- the front ends

type OnText = Callable[[str], bool]  # False: the client leaves


class FrontEnd(Protocol):
    """A way to the engine, seen by a client."""

    async def generate(self, num_tokens: int, on_text: OnText) -> None:
        """Runs one request to its end; text goes to `on_text` as it comes."""
        ...


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
    """The server's process: tells its port, serves until it is told to stop, tells how many sequences still run."""
    from jaxserve.server.options import ServerOptions
    from jaxserve.server.run import HttpServer

    server = HttpServer(ServerOptions(served_model_name="paced", port=0))
    running = asyncio.create_task(
        server.run(lambda: AsyncLLM.over(paced, config), on_ready=lambda: pipe.send(server.port))
    )
    await asyncio.to_thread(pipe.recv)
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


def server_process(config: dict, pipe: Connection) -> None:
    asyncio.run(serve_http(config, pipe))


# -------------------------------------------------------------------------------------------------- the measuring


@dataclasses.dataclass(kw_only=True)
class Load:
    """What the clients saw."""

    ages: array  # seconds, one a token
    num_requests: int = 0
    num_dropped: int = 0
    num_wrong: int = 0  # requests with a token lost, doubled or out of order
    growth_mib: float = 0.0
    still_running: float = 0.0

    def percentile_ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(np.frombuffer(self.ages), percent))


async def drive(front_end: FrontEnd, options: argparse.Namespace, streams: int, stamps: np.ndarray, pid: int) -> Load:
    """Keeps `streams` streams busy for the time given; ages count from a tenth of it on."""
    load = Load(ages=array("d"))
    rng = random.Random(streams)
    begin = time.monotonic()
    warm, end = begin + options.seconds / 10, begin + options.seconds

    async def stream() -> None:
        await asyncio.sleep(rng.random() * options.seconds / 20)  # do not all start and end together
        while time.monotonic() < end:
            num_tokens = rng.randint(*TOKENS)
            drop_at = rng.randint(1, num_tokens) if rng.random() < options.drop_share else None
            await one_request(front_end, num_tokens, drop_at, load, stamps, warm)

    async def memory() -> None:
        await asyncio.sleep(options.seconds / 4)
        before = resident_mib(pid)
        await asyncio.sleep(options.seconds * 3 / 4)
        load.growth_mib = resident_mib(pid) - before

    await asyncio.gather(memory(), *(stream() for _ in range(streams)))
    return load


async def one_request(
    front_end: FrontEnd, num_tokens: int, drop_at: int | None, load: Load, stamps: np.ndarray, warm: float
) -> None:
    steps: list[int] = []

    def on_text(text: str) -> bool:
        now = time.monotonic()
        for at in range(0, len(text), 4):
            step = int(text[at : at + 4], 16)
            steps.append(step)
            if now > warm:
                load.ages.append(now - stamps[step])
        return drop_at is None or len(steps) < drop_at

    await front_end.generate(num_tokens, on_text)
    expected = [(steps[0] + i) % NUM_STAMPS for i in range(num_tokens)] if steps else []
    load.num_requests += 1
    load.num_dropped += drop_at is not None
    load.num_wrong += steps != (expected if drop_at is None else expected[: len(steps)]) or not steps


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.asynccontextmanager
async def in_process(config: dict) -> AsyncGenerator[tuple[FrontEnd, int, Callable]]:
    llm = await asyncio.to_thread(AsyncLLM.over, paced, config)
    try:
        yield InProcess(llm), os.getpid(), lambda: num_running(llm)
    finally:
        llm.shutdown()


@contextlib.asynccontextmanager
async def over_http(config: dict) -> AsyncGenerator[tuple[FrontEnd, int, Callable]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server_process, args=(config, theirs))  # no daemon: it has a child of its own
    process.start()
    port = await asyncio.to_thread(ours.recv)
    assert process.pid is not None

    async def ended() -> float:
        ours.send("stop")
        return await asyncio.to_thread(ours.recv)

    yield Http(port), process.pid, ended
    await asyncio.to_thread(process.join)


async def measure(kind: Callable, options: argparse.Namespace, streams: int) -> Load:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(8 * NUM_STAMPS)
        async with kind({"step_s": options.step_ms / 1e3, "stamps": file.name}) as (front_end, pid, ended):
            load = await drive(front_end, options, streams, map_stamps(file.name), pid)
            load.still_running = await ended()
    return load


FRONT_ENDS = {"http": over_http}


def rows_of(name: str, load: Load, base: Load, streams: int) -> list[Row]:
    added_ms = load.percentile_ms(99) - base.percentile_ms(99)
    bounds = [
        ("added_p99", added_ms, "ms", TARGET_MS.get(streams, 40.0)),
        ("wrong_requests", float(load.num_wrong + base.num_wrong), "requests", 0.0),
        ("running_at_the_end", load.still_running, "sequences", 0.0),
        ("memory_growth", load.growth_mib, "MiB", TARGET_GROWTH_MIB),
    ]
    return [
        Row(name=f"online_{name}_{what}_{streams}", value=value, unit=unit, target=target, lower_is_better=True)
        for what, value, unit, target in bounds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front-end", choices=sorted(FRONT_ENDS), default="http")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time between two tokens of a stream")
    parser.add_argument("--drop-share", type=float, default=0.0, help="share of requests that the client leaves")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the server does: a full collection takes 0.1 s with jax in memory
    rows = []
    for streams in options.streams:
        base = asyncio.run(measure(in_process, options, streams))
        load = asyncio.run(measure(FRONT_ENDS[options.front_end], options, streams))
        for name, one in (("in process", base), (options.front_end, load)):
            print(
                f"{streams} streams, {name}: p50 {one.percentile_ms(50):.2f} ms, p99 {one.percentile_ms(99):.2f} ms of "
                f"{len(one.ages)} tokens, {one.num_requests} requests, {one.num_dropped} of them left"
            )
        rows += rows_of(options.front_end, load, base, streams)
    report(rows)


if __name__ == "__main__":
    main()

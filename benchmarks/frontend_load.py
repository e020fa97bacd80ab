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
import dataclasses
import gc
import os
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks._front_ends import FRONT_ENDS, FrontEnd, in_process
from benchmarks._paced_core import NUM_STAMPS, map_stamps
from benchmarks._report import Row, report

TARGET_MS = {32: 5.0, 256: 40.0}
TARGET_GROWTH_MIB = 16.0
TOKENS = (32, 256)  # fewest and most of a request


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


async def measure(kind: Callable, options: argparse.Namespace, streams: int) -> Load:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(8 * NUM_STAMPS)
        async with kind({"step_s": options.step_ms / 1e3, "stamps": file.name}) as running:
            load = await drive(running.client, options, streams, map_stamps(file.name), running.pid)
            load.still_running = await running.end()
    return load


def rows_of(name: str, load: Load, base: Load, streams: int) -> list[Row]:
    added_ms = load.percentile_ms(99) - base.percentile_ms(99)
    bounds = [
        ("added_p99", added_ms, "ms", TARGET_MS[streams]),
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
    parser.add_argument("--streams", type=int, nargs="+", choices=TARGET_MS, default=[32, 256])
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

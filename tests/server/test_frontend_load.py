"""The benchmark of front ends sees lost and doubled tokens, and finds none over HTTP with clients that leave."""

import argparse
import asyncio
import multiprocessing
import time
from array import array

import numpy as np
import pytest

from benchmarks import frontend_load
from benchmarks._front_ends import over_http
from benchmarks._paced_core import NUM_STAMPS


class Scripted:
    """A front end that gives these texts."""

    def __init__(self, *texts: str):
        self._texts = texts

    async def generate(self, num_tokens, on_text) -> None:
        for text in self._texts:
            if not on_text(text):
                break


def load_of(front_end, num_tokens: int, drop_at: int | None = None) -> frontend_load.Load:
    load, stamps = frontend_load.Load(ages=array("d")), np.full(NUM_STAMPS, time.monotonic() - 1.0)
    asyncio.run(frontend_load.one_request(front_end, num_tokens, drop_at, load, stamps, warm=0.0))
    return load


@pytest.mark.parametrize(
    ("texts", "num_wrong"),
    [
        (("fffe", "ffff0000"), 0),
        (("fffe", "0000"), 1),  # lost
        (("0001", "0001", "0002"), 1),  # doubled
        (("0002", "0001", "0003"), 1),  # out of order
        (("0001", "0002"), 1),  # ended early
        ((), 1),
    ],
)
def test_a_wrong_stream_is_counted(texts, num_wrong):
    load = load_of(Scripted(*texts), 3)
    assert (load.num_requests, load.num_wrong) == (1, num_wrong)
    assert all(1.0 <= age < 2.0 for age in load.ages)


def test_a_client_that_leaves_has_right_tokens_until_then():
    assert load_of(Scripted("0001", "0002", "0003"), 9, drop_at=2).num_wrong == 0
    assert load_of(Scripted("0001", "0003", "0003"), 9, drop_at=2).num_wrong == 1


@pytest.mark.parametrize("broken", ["the server", "the run"])
def test_a_run_that_fails_ends_with_its_server(tmp_path, broken):
    stamps = tmp_path / "stamps"
    if broken == "the run":
        stamps.write_bytes(bytes(8 * NUM_STAMPS))

    before = multiprocessing.active_children()  # of other tests

    async def main() -> None:
        async with over_http({"step_s": 0.001, "stamps": str(stamps)}):
            raise ZeroDivisionError

    with pytest.raises(EOFError if broken == "the server" else ZeroDivisionError):
        asyncio.run(main())
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.full
def test_no_token_is_lost_over_http_and_nothing_runs_when_clients_have_left():
    options = argparse.Namespace(seconds=10.0, step_ms=5.0, drop_share=0.3)
    load = asyncio.run(frontend_load.measure(over_http, options, 32))
    assert load.num_dropped > 10
    assert load.num_requests > load.num_dropped
    assert (load.num_wrong, load.still_running) == (0, 0.0)
    assert load.growth_mib < frontend_load.TARGET_GROWTH_MIB

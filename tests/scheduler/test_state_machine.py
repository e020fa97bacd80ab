"""The scheduler under random load, over a runner that checks every read (see simulation.py)."""

import pytest
from machine import machine, run

SITUATIONS = [
    "abort None",
    "abort deadline",
    "ends in flight",
    "error None",
    "hits",
    "length None",
    "mixed",
    "overtakes",
    "preemptions in flight",
    "releases",
    "spans",
    "stop ###",
    "stop 1",
    "stop None",
    "waits for a fence",
]


def test_random_load_keeps_every_invariant_over_thousands_of_steps():
    tested = machine()
    run(tested, max_examples=200, derandomize=True, database=None)
    assert tested.seen["steps"] > 3000
    assert [name for name in SITUATIONS if not tested.seen[name]] == []


@pytest.mark.full
def test_random_load_keeps_every_invariant_over_many_more_steps():
    tested = machine()
    run(tested, max_examples=4000, print_blob=True)
    assert tested.seen["steps"] > 60_000

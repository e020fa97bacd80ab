"""Heads over ranks of `tp`: every head once, whatever the counts."""

import numpy as np
import pytest

from jaxserve.sharding.heads import NONE, head_layout, rows_of_heads

COUNTS = [(32, 8), (8, 1), (9, 3), (12, 3), (12, 6), (4, 4), (14, 2), (1, 1), (40, 10)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), COUNTS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kv", [1, 2, 4, 8])
def test_every_query_head_is_computed_once_beside_its_kv_head(num_heads, num_kv_heads, kv, tp):
    layout = head_layout(num_heads, num_kv_heads, kv, tp)
    group = num_heads // num_kv_heads
    found = layout.queries[layout.queries != NONE]
    assert sorted(found) == list(range(num_heads))
    for queries, kv_head in zip(layout.queries.reshape(-1, layout.queries.shape[-1]), layout.kvs.flat, strict=True):
        assert set(queries) - {NONE} <= set(range(kv_head * group, (kv_head + 1) * group) if kv_head != NONE else ())
    assert layout.num_heads_per_rank % kv == 0
    assert layout.num_heads_per_rank % layout.num_kv_heads_per_rank == 0


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "tp"), [(32, 8, 8), (32, 8, 2), (32, 8, 16), (8, 1, 4)])
def test_counts_that_divide_need_no_padding(num_heads, num_kv_heads, tp):
    layout = head_layout(num_heads, num_kv_heads, 1, tp)
    assert NONE not in layout.queries
    assert NONE not in layout.kvs
    assert layout.num_kv_heads_per_rank == max(1, num_kv_heads // tp)


def test_few_kv_heads_are_copied():
    layout = head_layout(8, 2, 1, 4)
    assert layout.kvs.tolist() == [[0], [0], [1], [1]]
    assert layout.queries.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


def test_rows_of_heads():
    assert rows_of_heads(np.array([[2, NONE]]), 2, first=10).tolist() == [[14, 15, NONE, NONE]]

"""The benchmark of sparse attention, on shapes that a CPU can do."""

import math

import pytest

from benchmarks import shapes, sparse
from benchmarks._report import Row

TINY = shapes.Decode(2, 4, 2, 512, fa3_us=1.0)


@pytest.mark.full
def test_rows_of_a_shape_and_one_that_fails_does_not_lose_the_others():
    def broken() -> Row:
        raise RuntimeError("no such card")

    makers = [*sparse.shape_rows(TINY, (4.0, 5.0), calls=4)]
    each = len(makers) // len(sparse.policies(1024))
    rows, failures = sparse.collect([makers[0], broken, makers[2 * each - 1], makers[2 * each]])
    names = ["sparse_quest_2x512", "sparse_quest_every_4_2x512_selection", "sparse_streaming_llm_2x512"]
    assert [row.name for row in rows] == names
    assert all(row.value > 0 and row.peer and row.target == 4.0 for row in (rows[0], rows[2]))
    assert (rows[1].target, rows[1].peer) == (0.1, None)
    assert failures == ["RuntimeError: no such card"]


def test_attention_to_all_pages_by_way_of_selection_is_dense_attention():
    assert sparse.error_row(TINY).met


def test_every_policy_has_its_rows():
    names = {"dense": 0, "selection": 0}
    for make in sparse.shape_rows(TINY, (4.0, 5.0), calls=4):
        names["selection" if getattr(make, "__name__", "") == "selection" else "dense"] += 1
    assert names["selection"] == len(sparse.policies(1024)) == 3
    assert names["dense"] >= 3


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.5, 2.0, 3.0], 1024 * math.sqrt(2)),
        ([1.1, 2.0, 3.0], 1024),
        ([2.0, 0.5, 0.9], math.inf),
        ([1.5, 0.5, 2.0], 2048 * math.sqrt(2)),
    ],
)
def test_a_policy_breaks_even_where_it_stays_ahead(ratios, expected):
    assert sparse.break_even((1024, 2048, 4096), ratios) == pytest.approx(expected)

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

    rows, failures = sparse.collect([broken, *sparse.shape_rows(TINY, (4.0, 5.0), calls=4)])
    by_name = {row.name: row for row in rows}
    for policy in ("quest", "quest_every_4", "streaming_llm"):
        row = by_name.pop(f"sparse_{policy}_2x512")
        assert row.value > 0
        assert row.peer
        assert row.target == 4.0
        assert by_name.pop(f"sparse_{policy}_2x512_selection").target == 0.1
    assert not by_name
    assert failures == ["RuntimeError: no such card"]


def test_attention_to_all_pages_by_way_of_selection_is_dense_attention():
    assert sparse.error_row(TINY).met


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

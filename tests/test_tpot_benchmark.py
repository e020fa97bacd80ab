"""What the benchmark of time per token judges rows against."""

import pytest

from benchmarks import tpot
from benchmarks._report import Row


@pytest.mark.parametrize(
    ("model", "kv", "tp", "peer_ms"),
    [
        ("llama-3.1-8b", 1, 1, 4.77),
        ("llama-3.1-8b", 2, 1, 3.50),
        ("llama-3.1-8b", 2, 2, None),
        ("qwen3-30b-a3b", 1, 1, 4.31),
        ("qwen3-30b-a3b", 1, 2, None),
    ],
)
def test_a_row_has_a_peer_only_where_one_was_measured_on_as_many_gpus(model, kv, tp, peer_ms):
    shape = tpot.on_mesh(tpot.SHAPES[model], kv, tp)
    goals = tpot.against(shape.cases[0].goals_ms, lower_is_better=True)
    row = Row(name="tpot", value=4.0, unit="ms", lower_is_better=True, **goals)
    assert row.peer == peer_ms
    assert (row.met is None) == (peer_ms is None)
    assert (shape.start is None) == (kv * tp > 1)

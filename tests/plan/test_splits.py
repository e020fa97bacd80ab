"""Which splits are listed, what fits, what would, and what is refused."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_roofline import MISTRAL

from jaxserve.exceptions import ParameterError, WeightsError
from jaxserve.layers.sampler import init_sampling, init_sequences
from jaxserve.plan import Plan, plan
from jaxserve.plan.planner import MAX_BATCH
from jaxserve.topologies import H200
from jaxserve.weights.dummy import SHAPES

SIZE = {"tensor_parallel_size", "kv_parallel_size"}


def sizes(found: Plan) -> list[tuple[int, int]]:
    return [(split.kv_parallel_size, split.tensor_parallel_size) for split in found.splits]


def only(model: str, topology: str, kv: int = 1, tp: int = 1, **options):
    found = plan(model, topology, kv_parallel_size=kv, tensor_parallel_size=tp, **options)
    (split,) = found.splits
    return split


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_all_splits_of_a_topology_and_of_fewer_devices_are_listed():
    found = plan("smollm2-135m", "h200x4", context=128, batch=1)
    assert sizes(found) == [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]
    assert all(split.fits for split in found.splits)
    assert found.best is min(found.splits, key=lambda split: split.tpot_ms)
    assert found.ways_out == []


def test_a_size_that_is_given_is_kept():
    found = plan("smollm2-135m", "h200x8", context=128, batch=1, tensor_parallel_size=3)
    assert sizes(found) == [(1, 3), (2, 3)]
    assert sizes(plan("smollm2-135m", "h200x8", context=128, batch=1, kv_parallel_size=8)) == [(8, 1)]


def test_a_split_is_within_one_host_or_over_all():
    """An engine of several processes uses the devices of all."""
    found = plan("smollm2-135m", "v5e-32", context=128, batch=1)
    assert {split.num_devices for split in found.splits} == {1, 2, 4, 32}
    assert sizes(plan("smollm2-135m", "v5e-16", context=128, batch=1, tensor_parallel_size=8)) == [(2, 8)]
    assert sizes(plan("smollm2-135m", "v5e-16", context=128, batch=1, tensor_parallel_size=3)) == [(1, 3)]
    message = r"no split with {'tensor_parallel_size': 6} suits v5e-16: an engine uses up to 4 devices .* or all 16"
    with pytest.raises(ValueError, match=message):
        plan("smollm2-135m", "v5e-16", context=128, batch=1, tensor_parallel_size=6)


def test_a_pool_fills_what_the_weights_and_the_reserve_leave():
    split = only("llama-3.1-8b", "h200", context=1000, batch=1)
    memory, page = int(H200.memory_bytes * 0.75), 64 * 2 * 32 * 8 * 128 * 2
    assert split.weights_bytes == 2 * 8_030_261_248
    assert split.reserve_bytes == memory - int(memory * 0.9)
    assert split.state_bytes == num_bytes(
        jax.eval_shape(lambda: (init_sequences(256, 2048), init_sampling(256, 128256)))
    )
    assert split.num_pages == (int(memory * 0.9) - split.weights_bytes - split.state_bytes) // page
    assert split.pool_bytes == split.num_pages * page
    assert split.num_tokens == (split.num_pages - 1) * 64


def test_the_state_of_many_sequences_takes_its_memory_from_the_pool():
    few, many = (only("llama-3.1-8b", "v5e-8", tp=8, context=128, batch=batch) for batch in (1, 4096))
    assert (few.max_num_seqs, many.max_num_seqs) == (256, 4096)
    page = 64 * 2 * 32 * 128 * 2  # one head
    assert (many.state_bytes - few.state_bytes) / (4096 - 256) == pytest.approx(
        128256 * (1 + 4) + 128256 // 8 + 4 * 2048, rel=0.01
    )
    assert (few.num_pages - many.num_pages) * page == pytest.approx(many.state_bytes - few.state_bytes, abs=page)


def test_what_fits_fits_to_the_last_page():
    few = {"device_memory_utilization": 0.2}
    split = only("llama-3.1-8b", "h200", context=1000, batch=1, **few)
    assert split.max_batch == (split.num_pages - 1) // 16
    assert only("llama-3.1-8b", "h200", context=1000, batch=split.max_batch, **few).fits
    assert not only("llama-3.1-8b", "h200", context=1000, batch=split.max_batch + 1, **few).fits
    most = only("llama-3.1-8b", "h200", context=1000, batch=3, **few).max_context
    assert only("llama-3.1-8b", "h200", context=most, batch=3, **few).fits
    assert not only("llama-3.1-8b", "h200", context=most + 1, batch=3, **few).fits


def test_kv_ranks_multiply_tokens_and_copies_of_heads_do_not():
    tokens = {(kv, tp): only("llama-3.1-8b", "h200x8", kv, tp, context=1, batch=1).num_tokens for kv, tp in
              ((1, 1), (1, 2), (8, 1))}  # fmt: skip
    assert tokens[1, 2] > 2 * tokens[1, 1]
    assert tokens[8, 1] > 8 * tokens[1, 1]
    wide = [only("qwen3-30b-a3b", f"v6e-{tp}", 1, tp, context=1, batch=1) for tp in (4, 8, 16)]  # 4 KV heads
    per_token = [split.pool_bytes / split.num_tokens for split in wide]
    assert per_token == pytest.approx([48 * 2 * 128 * 2] * 3, rel=0.01)  # one head each


def test_float8_pages_hold_twice_the_tokens():
    plain, small = (only("llama-3.1-8b", "h200", context=1, batch=1, kv_cache_dtype=d) for d in ("auto", "fp8"))
    assert small.num_pages in (2 * plain.num_pages, 2 * plain.num_pages + 1)
    assert small.weights_bytes == plain.weights_bytes


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_ranks_hold_all_weights_between_them(name):
    found = plan(name, "v5e-8", context=1, batch=1)
    (whole,) = [split.weights_bytes for split in found.splits if split.num_devices == 1]
    for split in found.splits:
        assert whole / split.num_devices <= split.weights_bytes <= whole


def test_weights_that_leave_no_room_make_no_prediction():
    split = only("llama-3.1-70b", "v5e-1", context=1, batch=1)
    assert (split.fits, split.num_pages, split.pool_bytes, split.tpot_ms, split.prefill_tokens_per_s) == (
        False, 0, 0, None, None
    )  # fmt: skip
    assert split.tpot_parts_ms == {}


# What would fit


def apply(way: str, asked: dict) -> dict:
    """The question with a way out taken."""
    if way.startswith("XLA_PYTHON_CLIENT_MEM_FRACTION="):
        return asked | {"memory_fraction": float(way.split("=")[1].split()[0])}
    if way.startswith("another split"):
        return {name: value for name, value in asked.items() if name not in SIZE}
    words = way.replace("with ", "").split()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        asked = asked | {flag[2:].replace("-", "_"): int(value) if value.isdigit() else value}
    return asked


CRAMPED = [
    {"model": "llama-3.1-8b", "topology": "h200", "context": 100_000, "batch": 8},
    {"model": "llama-3.1-8b", "topology": "h200", "context": 100_000, "batch": 80},
    {"model": "llama-3.1-8b", "topology": "v5e-8", "context": 128, "batch": 8192},
    {"model": "llama-3.1-8b", "topology": "h200", "context": 128, "batch": 8192, "device_memory_utilization": 0.2},
    {"model": "llama-3.1-70b", "topology": "h200", "context": 1000, "batch": 1},
    {"model": "llama-3.1-70b", "topology": "v5e-8", "context": 8192, "batch": 4},
    {
        "model": "llama-3.1-70b",
        "topology": "v5p-8",
        "context": 1000,
        "batch": 1,
        "kv_parallel_size": 1,
        "tensor_parallel_size": 1,
    },
    {"model": "qwen3-30b-a3b", "topology": "v6e-4", "context": 40_000, "batch": 40, "kv_parallel_size": 1},
]


@pytest.mark.parametrize("asked", CRAMPED, ids=lambda asked: f"{asked['model']}-{asked['topology']}-{asked['batch']}")
def test_every_way_out_leads_out(asked):
    found = plan(**asked)
    assert found.best is None
    assert found.ways_out
    for way in found.ways_out:
        assert plan(**apply(way, asked)).best, way


@pytest.mark.parametrize("asked", CRAMPED[2:4], ids=lambda asked: asked["topology"])
def test_the_largest_batch_counts_the_state_of_its_sequences(asked):
    """With the state of all 8192, of which one case holds no page beside it, more room is lost than fewer need."""
    batch = apply(plan(**asked).ways_out[0], asked)["batch"]
    most = plan(**(asked | {"batch": batch}))
    assert 256 < batch == most.best.max_num_seqs
    held = most.best.weights_bytes + most.best.state_bytes + most.best.pool_bytes + most.best.reserve_bytes
    assert held <= most.memory_bytes
    assert plan(**(asked | {"batch": batch + 1})).best is None


def test_ways_out_are_the_nearest():
    ways = plan(**CRAMPED[0]).ways_out
    assert "--kv-cache-dtype fp8" in ways
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment of both commands" in ways
    assert "--topology h200x2" in ways
    split = only("llama-3.1-8b", "h200", context=100_000, batch=8)
    assert ways[:2] == [
        f"--batch {split.max_batch} with --context 100000",
        f"--context {split.max_context} with --batch 8",
    ]


def test_notes_say_what_the_figures_do_not_know(tmp_path):
    def said(model: str, topology: str) -> str:
        return " ".join(plan(model, topology, context=1, batch=1).notes)

    assert said("llama-3.1-8b", "h200") == ""
    assert "upper bound" in said("llama-3.1-8b", "h200x2")
    assert "between two GPUs" not in said("llama-3.1-8b", "h200x2")
    assert "between two GPUs" in said("llama-3.1-8b", "h100x4")
    assert "pad head_dim" not in said("llama-3.1-8b", "v5e-8")
    assert "pad head_dim" not in said("smollm2-135m", "v5e-8")  # two heads of 64 share a row
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"] | {"head_dim": 96}), encoding="utf-8")
    assert "TPUs pad head_dim 96 to 128" in said(str(tmp_path), "v5e-8")
    assert "hosts" not in said("llama-3.1-8b", "v5e-8")
    assert "v5p-16 has 2 hosts of 4 devices; a split over all 8 takes one process on each" in said(
        "llama-3.1-8b", "v5p-16"
    )
    assert "0.58 of the time" in " ".join(plan("llama-3.1-8b", "h200", context=1, batch=1, kv_cache_dtype="fp8").notes)
    assert "sliding window" not in said("llama-3.1-8b", "h200x2")


def test_a_note_says_that_windows_save_nothing_over_kv(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    assert "sliding window" in " ".join(plan(str(tmp_path), "h200x2", context=1, batch=1).notes)
    assert "sliding window" not in " ".join(plan(str(tmp_path), "h200", context=1, batch=1).notes)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "v5e-7"}, r"topology must be one of h200, h200x2, .*, got 'v5e-7'"),
        ({"context": 0}, r"context must be an integer in \[1, 2147483647\], got 0"),
        ({"context": True}, "context must be an integer .*, got True"),
        ({"context": 200_000}, "context 200000 is beyond the model's max_position_embeddings 131072; lower it"),
        ({"batch": -1}, r"batch must be an integer in \[1, 8192\], got -1"),
        ({"batch": MAX_BATCH + 1}, "batch must be .*, got 8193"),
        ({"memory_fraction": float("nan")}, r"memory_fraction must be in \(0, 1\], got nan"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer >= 1, got 0"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size 16 needs 16 devices, h200x2 has 2; lower one of them"),
        ({"device_memory_utilization": 1.5}, r"device_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"model": "llama-9"}, "'llama-9' does not exist; expected a file, a folder, .* llama-3.1-8b"),
    ],
    ids=str,
)
def test_mistakes_are_refused_with_the_way_out(changes, message):
    with pytest.raises((ParameterError, ValueError), match=message):
        plan(**({"model": "llama-3.1-8b", "topology": "h200x2", "context": 128, "batch": 1} | changes))


@pytest.mark.parametrize("options", [{"wrong": 1}, {"quantization": "int8"}], ids=str)
def test_an_option_that_is_not_planned_is_refused(options):
    with pytest.raises(TypeError, match=r"unknown options of a plan \['\w+'\]; known: \['kv_cache_dtype', "):
        plan("llama-3.1-8b", "h200", context=1, batch=1, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Unknown"]}, "architectures .* are not supported"),
        ({"vocab_size": 2**30}, "vocab_size must be at most 1048576 to be planned, got 1073741824"),
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2**13},
            "head_dim must be at most 4096 to be",
        ),
        ({"intermediate_size": 2**29}, "intermediate_size must be at most"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be an integer in \[1, 4096\]"),
        ({"hidden_size": "large"}, "hidden_size must be an integer"),
    ],
    ids=str,
)
def test_a_hostile_folder_is_refused_before_it_costs_anything(tmp_path, changes, message):
    config = SHAPES["llama-3.1-8b"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, WeightsError), match=message):
        plan(str(tmp_path), "v5e-256", context=128, batch=1)


def test_a_folder_is_planned_by_its_configuration_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    assert plan(str(tmp_path), "h200", context=128, batch=1).splits == plan(
        "llama-3.1-8b", "h200", context=128, batch=1
    ).splits  # fmt: skip


# Never the wrong way round


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["smollm2-135m", "llama-3.1-8b"]),
    st.sampled_from(["h200x4", "v5e-4", "v5p-8"]),
    st.integers(1, 8000),
    st.integers(1, 250),
    st.integers(0, 500),
)
def test_asking_for_more_never_makes_it_fit_or_faster(model, topology, context, batch, more):
    asked = plan(model, topology, context=context, batch=batch)
    for harder_context, harder_batch in ((min(8192, context + more), batch), (context, batch + more)):
        harder = plan(model, topology, context=harder_context, batch=harder_batch)
        for easy, hard in zip(asked.splits, harder.splits, strict=True):
            assert easy.fits or not hard.fits
            assert hard.num_pages == easy.num_pages or harder_batch > 256
            if easy.tpot_ms is not None and hard.tpot_ms is not None:
                assert hard.tpot_ms >= easy.tpot_ms * (1 - 1e-9)
        if asked.best and harder.best:
            assert harder.best.tpot_ms >= asked.best.tpot_ms * (1 - 1e-9)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.floats(0.05, 1.0))
def test_more_memory_never_holds_less(utilization, more, fraction):
    larger = min(1.0, utilization + more)
    held = [
        only("llama-3.1-8b", "h200", context=1, batch=1, memory_fraction=fraction, device_memory_utilization=u)
        for u in (utilization, larger)
    ]
    assert held[0].num_tokens <= held[1].num_tokens
    for split in held:
        total = split.weights_bytes + split.state_bytes + split.pool_bytes + split.reserve_bytes
        assert split.num_pages == 0 or total <= H200.memory_bytes * fraction
        assert np.isfinite(split.tpot_ms or 0.0)

"""Every implementation against the definition.

Where there is no GPU, the Mosaic kernels run in Pallas' interpreter, a few cases of them in the fast check; on a GPU,
`pytest --noconftest tests/pallas_kernels` runs the same tests compiled.
"""

import dataclasses
import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, LAYER, Case, error, inputs

import jaxserve.pallas_kernels.paged_attention as package
from jaxserve.pallas_kernels import fallback
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu, paged_attention, prepare, reference
from jaxserve.pallas_kernels.paged_attention.types import FP8

ON_GPU = jax.devices()[0].platform == "gpu"
by_name = {case.name: case for case in CASES}

# Of the cases and the wrong answers that are interpreted, those in the fast check
FAST_CASES = (
    "empty_sequence_between",
    "decode_window",
    "decode_soft_cap",
    "several_query_tokens",
    "decode_page_8",
    "decode_page_64",
    "decode_head_dim_256",
    "decode_tiles_of_five_and_two_parts",
    "prefill_chunks",
    "prefill_rows_in_place_padded",
)
FAST_FP8_CASES = ("decode_page_64", "decode_tiles_of_five_and_two_parts", "prefill_chunks")
FAST_WRONG = (("ragged_last_page", "sees_one_less"), ("prefill_padded", "neighbours_page"))

need_interpreter = pytest.mark.skipif(
    not ON_GPU and jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter loses wgmma accumulators"
)


def mosaic(*values, fast: bool, name: str):
    """Parameters of a test that runs a Mosaic kernel."""
    marks = [need_interpreter] if fast or ON_GPU else [need_interpreter, pytest.mark.full]
    return pytest.param(*values, marks=marks, id=name)


@pytest.fixture(autouse=True)
def whole_float32():
    """A GPU multiplies float32 in fewer bits unless it is told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """Three interpreted multiprocessors: sequences are split over workers, and a worker has several tiles."""
    if not ON_GPU:
        monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 3)


def run(q, kv, batch, options, implementation):
    if implementation == "mosaic_gpu" and not ON_GPU:
        out, lse = mosaic_gpu.paged_attention(q, kv, LAYER, batch, **options, interpret=True)
    else:
        attention = functools.partial(paged_attention, **options, return_lse=True, implementation=implementation)
        out, lse = jax.jit(attention)(q, kv, jnp.int32(LAYER), batch)
    return np.asarray(out, np.float32), np.asarray(lse)


def all_cases():
    for case in CASES:
        yield pytest.param("xla", case, jnp.float32, None, id=f"xla-{case.name}-f32")
        yield pytest.param("xla", case, jnp.bfloat16, None, id=f"xla-{case.name}-bf16")
        fast = case.name in FAST_CASES
        marks = [] if fast else [pytest.mark.full]
        yield pytest.param("xla", case, jnp.bfloat16, FP8, id=f"xla-{case.name}-fp8", marks=marks)
        yield mosaic("mosaic_gpu", case, jnp.bfloat16, None, fast=fast, name=f"mosaic_gpu-{case.name}-bf16")
        fast = case.name in FAST_FP8_CASES
        yield mosaic("mosaic_gpu", case, jnp.bfloat16, FP8, fast=fast, name=f"mosaic_gpu-{case.name}-fp8")
    for name in ("ragged_last_page", "decode_32_8_128", "prefill_chunks", "prefill_soft_cap"):
        yield mosaic("mosaic_gpu", by_name[name], jnp.float16, None, fast=False, name=f"mosaic_gpu-{name}-f16")


@pytest.mark.parametrize(("implementation", "case", "dtype", "kv_dtype"), [*all_cases()])
def test_agrees_with_the_definition_and_reads_no_unused_slot(implementation, case, dtype, kv_dtype):
    q, kv, batch = inputs(case, dtype, kv_dtype)
    expected, expected_lse = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    out, lse = run(q, kv, batch, case.options, implementation)
    assert error(out, expected, batch, dtype) < 1
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    assert (out[~seen] == 0).all()
    tolerance = 4 * float(jnp.finfo(dtype).eps)  # scores are sums of head_dim products of size 1
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=tolerance, atol=4 * tolerance)


WRONG = {
    "zeros": lambda case, batch: None,
    "no_scale": lambda case, batch: (batch, case.options | {"scale": 1.0}),
    "sees_one_less": lambda case, batch: (shifted(batch, -1), case.options),
    "sees_one_more": lambda case, batch: (shifted(batch, 1), case.options),
    "neighbours_page": lambda case, batch: (
        dataclasses.replace(batch, page_table=jnp.roll(batch.page_table, 1, axis=0)), case.options
    ),
    "window_one_wider": lambda case, batch: (
        batch, case.options | {"sliding_window": case.sliding_window and case.sliding_window + 1}
    ),
    "no_window": lambda case, batch: (batch, case.options | {"sliding_window": None}),
    "no_cap": lambda case, batch: (batch, case.options | {"soft_cap": None}),
}  # fmt: skip


def shifted(batch, by):
    return dataclasses.replace(batch, kv_lens=jnp.where(batch.kv_lens > 0, batch.kv_lens + by, 0))


def wrong_pairs():
    general = ("zeros", "no_scale", "sees_one_less", "sees_one_more", "neighbours_page")
    for name in ("ragged_last_page", "prefill_padded", "several_query_tokens"):
        yield from ((name, wrong) for wrong in general)
    yield from ((name, "window_one_wider") for name in ("decode_window", "prefill_window"))
    yield from ((name, "no_window") for name in ("decode_window", "prefill_window"))
    yield from ((name, "no_cap") for name in ("decode_soft_cap", "prefill_soft_cap"))


def wrong_answers():
    """Every pair as the definition answers it and as the kernels do."""
    for name, wrong in wrong_pairs():
        yield pytest.param("reference", name, wrong, jnp.float32, id=f"reference-{name}-{wrong}-f32")
        yield pytest.param("reference", name, wrong, jnp.bfloat16, id=f"reference-{name}-{wrong}-bf16")
        if wrong != "zeros":
            fast = (name, wrong) in FAST_WRONG
            yield mosaic("mosaic_gpu", name, wrong, jnp.bfloat16, fast=fast, name=f"mosaic_gpu-{name}-{wrong}-bf16")


@pytest.mark.parametrize(("implementation", "name", "wrong", "dtype"), [*wrong_answers()])
def test_a_plausible_wrong_answer_is_out_of_bounds(implementation, name, wrong, dtype):
    case = by_name[name]
    q, kv, batch = inputs(case, dtype, unused=1.0)
    batch = dataclasses.replace(batch, page_table=jnp.where(batch.page_table == 2**30, 0, batch.page_table))
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    changed = WRONG[wrong](case, batch)
    if changed is None:
        got = np.zeros_like(expected)
    elif implementation == "reference":
        got, _ = reference.paged_attention(q, kv, LAYER, changed[0], **changed[1])
    else:
        got, _ = run(q, kv, changed[0], changed[1], implementation)
    assert not error(got, expected, batch, dtype) < 1  # NaN is out of bounds too


WRONG_SCALES = {
    "none": lambda scale: None,
    "another_head's": lambda scale: jnp.roll(scale, 1, axis=1),
    "another_layer's": lambda scale: jnp.roll(scale, 1, axis=0),
    "its_inverse": lambda scale: 1 / scale,
}


@pytest.mark.parametrize("wrong", WRONG_SCALES)
@pytest.mark.parametrize("of", ["k_scale", "v_scale"])
@pytest.mark.parametrize("name", ["ragged_last_page", "prefill_padded"])
def test_a_wrong_scale_is_out_of_bounds(name, of, wrong):
    case = by_name[name]
    q, kv, batch = inputs(case, jnp.bfloat16, FP8)
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    changed = dataclasses.replace(kv, **{of: WRONG_SCALES[wrong](getattr(kv, of))})
    got, _ = reference.paged_attention(q, changed, LAYER, batch, **case.options)
    assert error(got, expected, batch, jnp.bfloat16) > 1


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("xla", jnp.float32, id="xla"),
        mosaic("mosaic_gpu", jnp.bfloat16, fast=False, name="mosaic_gpu"),
    ],
)
@pytest.mark.parametrize("q_lens", [None, (70, 1)], ids=["decode", "prefill"])
def test_blocks_outside_the_window_are_not_read(q_lens, implementation, dtype):
    case = Case(name="far_window", kv_lens=(1100, 700), q_lens=q_lens, rows=80, sliding_window=40, heads=(2, 1, 64))
    q, kv, batch = inputs(case, dtype)
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    far = jnp.asarray([[j < n // 16 - 40 for j in range(batch.page_table.shape[1])] for n in case.kv_lens])
    empty = dataclasses.replace(batch, page_table=jnp.where(far, 0, batch.page_table))  # page 0 holds NaN here
    out, _ = run(q, kv, empty, case.options, implementation)
    assert error(out, expected, batch, dtype) < 1


@pytest.mark.parametrize("q_lens", [None, (0, 0)], ids=["decode", "prefill"])
@pytest.mark.parametrize("implementation", ["xla", mosaic("mosaic_gpu", fast=False, name="mosaic_gpu")])
def test_padding_alone_comes_out_as_zeros(implementation, q_lens):
    case = Case(name="padding", kv_lens=(0, 0), q_lens=q_lens, rows=16, heads=(2, 1, 64))
    out, lse = run(*inputs(case, jnp.bfloat16), case.options, implementation)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.skipif(ON_GPU, reason="is about the memory of the CPU's implementation")
@pytest.mark.parametrize("name", ["lengths_far_apart", "prefill_chunks"])
def test_memory_does_not_depend_on_the_width_of_the_page_table(name):
    case = by_name[name]
    q, kv, batch = inputs(case, jnp.float32)

    def temp_bytes(width: int) -> int:
        table = jnp.zeros((len(case.kv_lens), width), jnp.int32)
        wide = dataclasses.replace(batch, page_table=table)
        attention = functools.partial(paged_attention, **case.options)
        memory = jax.jit(attention).lower(q, kv, LAYER, wide).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temp_bytes(4096) - temp_bytes(64) <= 4 * (4096 - 64) * len(case.kv_lens)  # the table itself, once


@pytest.mark.parametrize(
    "name",
    [
        mosaic("several_query_tokens", fast=True, name="decode"),
        mosaic("decode_window", fast=False, name="decode_window"),
        mosaic("prefill_padded", fast=False, name="prefill"),
    ],
)
def test_a_plan_made_once_a_step_gives_what_one_made_on_the_spot_gives(name):
    case = by_name[name]
    q, kv, batch = inputs(case, jnp.bfloat16)
    options = {"num_rows": q.shape[0], "num_heads": q.shape[1], "sliding_window": case.sliding_window}
    prepared = prepare(batch, kv, **options, implementation="mosaic_gpu")
    assert prepared.work is not None
    out, lse = run(q, kv, prepared, case.options, "mosaic_gpu")
    expected, expected_lse = run(q, kv, batch, case.options, "mosaic_gpu")
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.skipif(ON_GPU, reason="there None means the kernels, for which something is prepared")
def test_nothing_is_prepared_for_xla():
    case = by_name["one_token"]
    q, kv, batch = inputs(case, jnp.bfloat16)
    for implementation in ("xla", None):
        shape = {"num_rows": q.shape[0], "num_heads": q.shape[1]}
        same = prepare(batch, kv, **shape, sliding_window=None, implementation=implementation)
        assert same is batch


UNSUPPORTED = {
    "float32": (jnp.float32, {}, "bfloat16 or both float16, got float32"),
    "head_dim": (jnp.bfloat16, {"heads": (2, 1, 80)}, "head_dim must be 64, 128 or 256, got 80"),
    "page_size_12": (jnp.bfloat16, {"page_size": 12}, "page_size must be 8, 16, .* got 12"),
    "page_size_24": (jnp.bfloat16, {"page_size": 24}, "page_size must be 8, 16, .* got 24"),
    "page_size_96": (jnp.bfloat16, {"page_size": 96}, "page_size must be 8, 16, .* got 96"),
    "query_rows": (jnp.bfloat16, {"max_q_len": 9, "heads": (8, 1, 64)}, "at most 64 .* got 9 tokens of 8 heads"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_mosaic_gpu_says_what_it_cannot_do(name):
    dtype, fields, reason = UNSUPPORTED[name]
    case = Case(name=name, kv_lens=(20,), **fields)
    q, kv, batch = inputs(case, dtype)
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': .*{reason}"):
        paged_attention(q, kv, LAYER, batch, **case.options, implementation="mosaic_gpu")


@need_interpreter
@pytest.mark.parametrize("name", ["ragged_last_page", "prefill_chunks"])
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_what_is_not_a_number_in_one_sequence_stays_there(implementation, name):
    case = by_name[name]
    q, kv, batch = inputs(case, jnp.bfloat16)
    expected, expected_lse = run(q, kv, batch, case.options, implementation)
    first = int(batch.page_table[0, 0])
    kv = dataclasses.replace(kv, v=kv.v.at[LAYER, first, 0].set(jnp.inf))
    out, lse = run(q, kv, batch, case.options, implementation)
    sequences = np.array([s for s, _ in reference.query_positions(batch, len(out))])
    assert not np.isfinite(out[sequences == 0]).all()
    np.testing.assert_array_equal(out[sequences != 0], expected[sequences != 0])
    np.testing.assert_array_equal(lse[sequences != 0], expected_lse[sequences != 0])


def test_mosaic_gpu_wants_queries_and_cache_of_one_dtype():
    q, kv, batch = inputs(by_name["one_token"], jnp.bfloat16)
    assert mosaic_gpu.unsupported(q, kv, batch) is None
    assert "got float16 and bfloat16" in (mosaic_gpu.unsupported(q.astype(jnp.float16), kv, batch) or "")


def test_mosaic_gpu_takes_pages_in_float8_with_scales_beside_queries_of_16_bits():
    q, kv, batch = inputs(by_name["one_token"], jnp.bfloat16, FP8)
    assert mosaic_gpu.unsupported(q, kv, batch) is None
    assert mosaic_gpu.unsupported(q.astype(jnp.float16), kv, batch) is None
    assert "got float32 and float8_e4m3fn" in (mosaic_gpu.unsupported(q.astype(jnp.float32), kv, batch) or "")
    bare = dataclasses.replace(kv, k_scale=None, v_scale=None)
    assert "the cache may be float8_e4m3fn with scales" in (mosaic_gpu.unsupported(q, bare, batch) or "")


@need_interpreter
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_a_query_that_float16_cannot_hold_does_not_become_nan(implementation):
    case = by_name["ragged_last_page"]
    q, kv, batch = inputs(case, jnp.bfloat16, FP8)
    out, _ = run(q.at[0, 0, 0].set(1e30), kv, batch, case.options, implementation)
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, "xla"),
        ("tpu", None, "mosaic_tpu"),
        ("gpu", "8.0", "xla"),
        ("gpu", "9.0", "mosaic_gpu"),
        ("gpu", "10.0", "xla"),
    ],
)
def test_the_kernels_are_preferred_on_hopper_and_tpu_only(platform, capability, expected, monkeypatch):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(package, "target_device", lambda: device)
    assert package.preferred() == expected


def test_no_implementation_falls_back_with_one_line_and_lse_is_optional(monkeypatch, caplog):
    monkeypatch.setattr(package, "preferred", lambda: "mosaic_gpu")
    fallback.say_once.cache_clear()
    case = by_name["ragged_last_page"]
    q, kv, plain = inputs(case, jnp.float32)
    batch = prepare(plain, kv, num_rows=q.shape[0], num_heads=q.shape[1], sliding_window=None)
    with caplog.at_level(logging.WARNING, fallback.__name__):
        out = paged_attention(q, kv, LAYER, batch, **case.options)
        again, _ = paged_attention(q, kv, LAYER, batch, **case.options, return_lse=True)
    (line,) = [record.getMessage() for record in caplog.records if record.name == fallback.__name__]
    assert "falls back" in line
    assert "got float32" in line
    named = paged_attention(q, kv, LAYER, plain, **case.options, implementation="xla")
    np.testing.assert_array_equal(out, named)
    np.testing.assert_array_equal(again, named)

"""The TPU kernel of paged attention against the definition, in two interpreters.

Pallas' plain one is quick, but its copies arrive at once. The TPU's knows copies, semaphores and memory that nobody has
written: copies are made when they start, with a search for races, or as late as a wait allows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, LAYER, Case, error, inputs
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.paged_attention import (
    mosaic_tpu,
    mosaic_tpu_kernel,
    paged_attention,
    prepare,
    reference,
    tpu_work,
)
from jaxserve.pallas_kernels.paged_attention.types import FP8, KVCache

FAST_CASES = ("empty_sequence_between", "decode_head_dim_256", "prefill_chunks")
FAST_FP8_CASES = ("decode_page_64",)
INTERPRETERS = {
    mode: pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=mode)
    for mode in ("eager", "on_wait")
}


def fitted(case: Case, dtype) -> Case:
    """With as many more KV heads, and as long pages, as the kernel wants."""
    N, K, H = case.heads
    group = N // K
    whole = (1, 4, 8) if dtype == FP8 else (1, 2, 4, 8)
    K = next(n for n in range(K, 17) if n * H % 128 == 0 and n * H // 128 in whole)
    tile = 32 if dtype == FP8 else 16
    page_size = max(case.page_size, tile * 128 // (K * H))
    return dataclasses.replace(case, heads=(group * K, K, H), page_size=page_size)


def as_on_tpu(kv: KVCache) -> KVCache:
    K, H = kv.k.shape[3:]
    rows = K * H // 128 if H in (64, 128, 256) and K * H % 128 == 0 else None
    shape = kv.k.shape if rows is None else (*kv.k.shape[:3], rows, 128)
    return dataclasses.replace(kv, k=kv.k.reshape(shape), v=kv.v.reshape(shape))


def run(q, kv, batch, options, interpret=True):
    attention = functools.partial(mosaic_tpu.paged_attention, **options, interpret=interpret)
    out, lse = jax.jit(attention)(q, as_on_tpu(kv), jnp.int32(LAYER), batch)
    return np.asarray(out, np.float32), np.asarray(lse)


@pytest.fixture
def short_blocks(monkeypatch):
    """Several blocks a sequence, and several tiles a chunk, at lengths that are soon interpreted."""
    for name in ("MAX_BLOCK", "MAX_PROMPT_BLOCK"):
        monkeypatch.setattr(tpu_work, name, 32)
    monkeypatch.setattr(tpu_work, "TILE_ROWS", 64)


def all_cases():
    for case in CASES:
        for dtype, fast in ((jnp.bfloat16, FAST_CASES), (FP8, FAST_FP8_CASES)):
            marks = [] if case.name in fast else [pytest.mark.full]
            yield pytest.param(case, dtype, id=f"{case.name}-{jnp.dtype(dtype).name}", marks=marks)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(("case", "dtype"), [*all_cases()])
def test_agrees_with_the_definition_and_reads_no_unused_slot(case, dtype):
    check(fitted(case, dtype), dtype, True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lengths_far_apart", "prefill_chunks", "eight_query_tokens_window"])
def test_agrees_with_blocks_and_tiles_of_full_size(name):
    case = next(case for case in CASES if case.name == name)
    check(fitted(case, jnp.bfloat16), jnp.bfloat16, True)


SMALL = (
    Case(name="decode", kv_lens=(40, 0, 3), heads=(4, 2, 128)),
    Case(name="decode_window", kv_lens=(90, 5), heads=(4, 2, 128), sliding_window=20),
    Case(name="prefill", kv_lens=(50, 3, 17), q_lens=(20, 3, 1), rows=32, heads=(4, 2, 128)),
    Case(name="prefill_two_heads_a_row", kv_lens=(50, 3), q_lens=(20, 3), rows=24, heads=(8, 4, 64)),
)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("mode", INTERPRETERS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if i in (0, 2) else [pytest.mark.full]) for i, case in enumerate(SMALL)],
)
def test_copies_arrive_before_they_are_read_and_overwrite_nothing_in_use(case, mode):
    check(case, jnp.bfloat16, INTERPRETERS[mode])


def check(case: Case, dtype, interpret) -> None:
    q, kv, batch = inputs(case, jnp.bfloat16, dtype)
    expected, expected_lse = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    out, lse = run(q, kv, batch, case.options, interpret)
    assert error(out, expected, batch, jnp.bfloat16) < 1
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    assert (out[~seen] == 0).all()
    tolerance = 4 * float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=tolerance, atol=4 * tolerance)


@pytest.mark.usefixtures("short_blocks")
def test_a_missing_wait_is_found_by_either_interpreter(monkeypatch):
    monkeypatch.setattr(mosaic_tpu_kernel, "wait", lambda copy: None)
    if jax.__version_info__ >= (0, 12):  # before, a race is printed only
        with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
            check(SMALL[0], jnp.bfloat16, INTERPRETERS["eager"])
    pltpu.reset_tpu_interpret_mode_state()
    with pytest.raises(AssertionError):
        check(SMALL[0], jnp.bfloat16, INTERPRETERS["on_wait"])
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(name, wrong, marks=[] if (name, wrong) == ("decode", "page") else [pytest.mark.full])
        for name in ("decode", "prefill")
        for wrong in ("page", "length", "scale")
    ],
)
def test_a_plausible_wrong_answer_is_out_of_bounds(name, wrong):
    case = next(case for case in SMALL if case.name == name)
    q, kv, batch = inputs(case, jnp.bfloat16, unused=1.0)
    batch = dataclasses.replace(batch, page_table=jnp.where(batch.page_table == 2**30, 0, batch.page_table))
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    changed, options = batch, case.options
    if wrong == "page":
        changed = dataclasses.replace(batch, page_table=jnp.roll(batch.page_table, 1, axis=0))
    elif wrong == "length":
        changed = dataclasses.replace(batch, kv_lens=jnp.maximum(batch.kv_lens - 1, 0))
    else:
        options = options | {"scale": 1.0}
    out, _ = run(q, kv, changed, options)
    assert not error(out, expected, batch, jnp.bfloat16) < 1


@pytest.mark.full
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("q_lens", [None, (0, 0)], ids=["decode", "prefill"])
def test_padding_alone_comes_out_as_zeros(q_lens):
    case = Case(name="padding", kv_lens=(0, 0), q_lens=q_lens, rows=16, heads=(4, 2, 128))
    out, lse = run(*inputs(case, jnp.bfloat16), case.options)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.full
@pytest.mark.usefixtures("short_blocks")
def test_pages_before_the_window_are_not_read():
    case = Case(name="far_window", kv_lens=(300, 200), sliding_window=40, heads=(4, 2, 128))
    q, kv, batch = inputs(case, jnp.bfloat16)
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    far = jnp.asarray([[j < (n - 40) // 16 for j in range(batch.page_table.shape[1])] for n in case.kv_lens])
    empty = dataclasses.replace(batch, page_table=jnp.where(far, 0, batch.page_table))  # page 0 holds NaN here
    out, _ = run(q, kv, empty, case.options)
    assert error(out, expected, batch, jnp.bfloat16) < 1


@pytest.mark.full
@pytest.mark.usefixtures("short_blocks")
def test_what_is_not_a_number_in_one_sequence_stays_there():
    case = SMALL[2]
    q, kv, batch = inputs(case, jnp.bfloat16)
    expected, _ = run(q, kv, batch, case.options)
    kv = dataclasses.replace(kv, v=kv.v.at[LAYER, int(batch.page_table[0, 0]), 0].set(jnp.inf))
    out, _ = run(q, kv, batch, case.options)
    sequences = np.array([s for s, _ in reference.query_positions(batch, len(out))])
    assert batch.cu_q_lens is not None
    real = np.arange(len(out)) < int(batch.cu_q_lens[-1])
    assert not np.isfinite(out[(sequences == 0) & real]).all()
    np.testing.assert_array_equal(out[sequences != 0], expected[sequences != 0])


@pytest.mark.full
def test_a_plan_made_once_a_step_is_the_one_made_on_the_spot():
    for case in (SMALL[0], SMALL[3]):
        q, kv, batch = inputs(case, jnp.bfloat16)
        N, _, H = case.heads
        prepared = prepare(
            batch,
            as_on_tpu(kv),
            num_rows=q.shape[0],
            num_heads=N,
            head_dim=H,
            sliding_window=case.sliding_window,
            implementation="mosaic_tpu",
        )
        assert isinstance(prepared.work, tpu_work.Work)
        out, lse = run(q, kv, prepared, case.options)
        expected, expected_lse = run(q, kv, batch, case.options)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("heads", [(8, 4, 64), (4, 2, 256)], ids=str)
def test_xla_reads_caches_with_two_heads_a_row_or_half_of_one_too(heads):
    case = dataclasses.replace(SMALL[3], heads=heads)
    q, kv, batch = inputs(case, jnp.bfloat16)
    expected = paged_attention(q, kv, LAYER, batch, **case.options, implementation="xla")
    out = paged_attention(q, as_on_tpu(kv), LAYER, batch, **case.options, implementation="xla")
    np.testing.assert_array_equal(out, expected)


UNSUPPORTED = {
    "float32": (jnp.float32, {}, "queries must be bfloat16, got float32"),
    "head_dim": (jnp.bfloat16, {"heads": (2, 1, 80)}, "head_dim must be 64, 128 or 256, got 80"),
    "layout": (jnp.bfloat16, {"heads": (3, 3, 64)}, "rows of 128 numbers.* got 64"),
    "kv_heads": (jnp.bfloat16, {"heads": (6, 3, 128)}, "fill 1, 2, 4 or a multiple of 8 rows of 128, got 3"),
    "page_size": (jnp.bfloat16, {"heads": (1, 1, 128), "page_size": 8}, "a multiple of 16 rows .* got 8"),
    "pages": (jnp.bfloat16, {"heads": (1, 1, 128)}, "a sequence may have 32768 pages, got 32769"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_says_what_it_cannot_do(name):
    dtype, fields, reason = UNSUPPORTED[name]
    case = Case(**({"name": name, "kv_lens": (20,), "heads": (4, 4, 128)} | fields))
    q, kv, batch = inputs(case, dtype)
    if name == "pages":
        batch = dataclasses.replace(batch, page_table=jnp.zeros((1, 2**15 + 1), jnp.int32))
    with pytest.raises(NotImplementedError, match=f"'mosaic_tpu': .*{reason}"):
        paged_attention(q, as_on_tpu(kv), LAYER, batch, **case.options, implementation="mosaic_tpu")


def test_float8_wants_other_numbers_of_heads():
    case = Case(name="fp8", kv_lens=(20,), heads=(2, 2, 128))
    q, kv, batch = inputs(case, jnp.bfloat16, FP8)
    assert "fill 1, 4 or a multiple of 8 rows" in (mosaic_tpu.unsupported(q, kv, batch) or "")


@pytest.mark.parametrize("kv_lens", [(40, 0, 3, 70, 33, 1), (0, 20)], ids=str)
def test_two_cores_share_the_tiles(kv_lens, monkeypatch):
    """As on a v5p: each walks over its own, and one may have none."""
    two = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 2)
    monkeypatch.setattr(tpu, "chip", lambda: two)
    case = Case(name="two_cores", kv_lens=kv_lens, heads=(4, 2, 128))
    cores = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, vector_clock_size=64)
    check(case, jnp.bfloat16, cores)

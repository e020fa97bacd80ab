import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, LAYER, Case, inputs

from jaxserve.pallas_kernels.paged_attention import paged_attention, reference

IMPLEMENTATIONS = ("xla",)
by_name = {case.name: case for case in CASES}


def run(case: Case, q, kv, batch, implementation):
    attention = functools.partial(paged_attention, **case.options, return_lse=True, implementation=implementation)
    out, lse = jax.jit(attention)(q, kv, jnp.int32(LAYER), batch)
    return np.asarray(out, np.float32), np.asarray(lse)


def error(got, expected, batch, dtype) -> float:
    """The largest error of any row in units of its bound: epsilon x sqrt(length of its sums) x the output's scale.

    A row's sums run over head_dim in the scores and over the positions it sees in the output.
    """
    positions = np.array([p for _, p in reference.query_positions(batch, len(got))])
    bound = float(jnp.finfo(dtype).eps) * np.sqrt(positions + 1 + got.shape[-1]) * np.abs(expected).max()
    return float((np.abs(got - expected).max(axis=(1, 2)) / bound).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_agrees_with_the_definition_and_reads_no_unused_slot(implementation, case, dtype):
    q, kv, batch = inputs(case, dtype)
    expected, expected_lse = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    out, lse = run(case, q, kv, batch, implementation)
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("name", "wrong"), [*wrong_pairs()])
def test_a_plausible_wrong_answer_is_out_of_bounds(name, wrong, dtype):
    case = by_name[name]
    q, kv, batch = inputs(case, dtype, unused=1.0)
    batch = dataclasses.replace(batch, page_table=jnp.where(batch.page_table == 2**30, 0, batch.page_table))
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    changed = WRONG[wrong](case, batch)
    got = np.zeros_like(expected)
    if changed is not None:
        got, _ = reference.paged_attention(q, kv, LAYER, changed[0], **changed[1])
    assert error(got, expected, batch, dtype) > 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_outside_the_window_are_not_read(implementation):
    case = Case(name="far_window", kv_lens=(1100, 700), sliding_window=40)
    q, kv, batch = inputs(case, jnp.float32)
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    far = jnp.asarray([[j < n // 16 - 40 for j in range(batch.page_table.shape[1])] for n in case.kv_lens])
    empty = dataclasses.replace(batch, page_table=jnp.where(far, 0, batch.page_table))  # page 0 holds NaN here
    out, _ = run(case, q, kv, empty, implementation)
    assert error(out, expected, batch, jnp.float32) < 1


@pytest.mark.parametrize("name", ["lengths_far_apart", "prefill_chunks"])
def test_memory_does_not_depend_on_the_width_of_the_page_table(name):
    case = by_name[name]
    q, kv, batch = inputs(case, jnp.float32)

    def temp_bytes(width: int) -> int:
        table = jnp.zeros((len(case.kv_lens), width), jnp.int32)
        wide = dataclasses.replace(batch, page_table=table)
        attention = functools.partial(paged_attention, **case.options)
        return jax.jit(attention).lower(q, kv, LAYER, wide).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(4096) - temp_bytes(64) <= 4 * (4096 - 64) * len(case.kv_lens)  # the table itself, once


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_tpu"])
def test_an_implementation_that_cannot_says_why(name):
    case = by_name["one_token"]
    with pytest.raises(NotImplementedError, match=f"{name}.*not written"):
        paged_attention(
            *inputs(case, jnp.float32)[:2], LAYER, inputs(case, jnp.float32)[2], scale=1.0, implementation=name
        )


def test_no_implementation_falls_back_and_lse_is_optional():
    case = by_name["ragged_last_page"]
    q, kv, batch = inputs(case, jnp.float32)
    out = paged_attention(q, kv, LAYER, batch, **case.options)
    named = paged_attention(q, kv, LAYER, batch, **case.options, implementation="xla")
    np.testing.assert_array_equal(out, named)

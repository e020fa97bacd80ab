"""Attention that skips pages, as BLASST says, against its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, LAYER, error, inputs

from jaxserve.pallas_kernels.paged_attention import SKIPS, paged_attention, reference

FAST = ("ragged_last_page", "decode_window", "several_query_tokens", "prefill_chunks", "prefill_soft_cap")


def thresholds(num_rows: int) -> np.ndarray:
    """One that skips nothing among others that skip much."""
    return np.random.default_rng(num_rows).choice([-np.inf, -3.0, -1.0, -0.25, 0.0], num_rows).astype(np.float32)


def run(q, kv, batch, below, options):
    def attention(q, kv, below):
        return paged_attention(q, kv, jnp.int32(LAYER), batch, **options, skip_below=below, return_lse=True)

    return jax.jit(attention)(q, kv, jnp.asarray(below))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.name in FAST else pytest.mark.full, id=c.name) for c in CASES]
)
def test_pages_far_below_the_best_so_far_are_skipped(case):
    q, kv, batch = inputs(case, jnp.float32)
    below = thresholds(len(q))
    expected, expected_lse = reference.paged_attention(q, kv, LAYER, batch, **case.options, skip_below=below)
    out, lse = run(q, kv, batch, below, case.options)
    assert error(out, expected, batch, jnp.float32) < 1
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    if case.name == "prefill_chunks":
        dense, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
        assert error(dense, expected, batch, jnp.float32) > 1
        np.testing.assert_allclose(dense[np.isneginf(below)], expected[np.isneginf(below)], rtol=1e-3, atol=1e-5)


def test_the_best_so_far_is_not_the_best_of_all():
    """Scores of a head go up from page to page: none is skipped, where a comparison with the last page skips most."""
    (case,) = (c for c in CASES if c.name == "decode_page_64")
    q, kv, batch = inputs(case, jnp.float32, unused=0.0)
    n, size = int(batch.kv_lens.max()), kv.page_size
    s = int(jnp.argmax(batch.kv_lens))
    k = np.asarray(kv.k).copy()
    for p in range(n):
        k[LAYER, batch.page_table[s, p // size], p % size] = 4.0 * (p // size)
    kv, q = dataclasses.replace(kv, k=jnp.asarray(k)), jnp.ones_like(q)
    for below in (-0.5, -jnp.inf):
        out, lse = run(q, kv, batch, np.full(len(q), below, np.float32), case.options)
        if below == -0.5:
            kept = out[s], lse[s]
    np.testing.assert_array_equal(kept[0], out[s])
    np.testing.assert_array_equal(kept[1], lse[s])


def test_only_xla_skips():
    q, kv, batch = inputs(CASES[0], jnp.float32)
    options = CASES[0].options | {"skip_below": jnp.zeros(len(q))}
    with pytest.raises(NotImplementedError, match=SKIPS):
        paged_attention(q, kv, LAYER, batch, **options, implementation="mosaic_gpu")

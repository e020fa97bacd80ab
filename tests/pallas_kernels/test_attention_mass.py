"""What tokens draw, and tables that pass dropped ones over, beside their definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.paged_attention import AttentionBatch, KVCache, paged_attention, reference
from jaxserve.pallas_kernels.paged_attention.mass import add_mass

PAGE_SIZE, MAX_PAGES, LAYERS, LAYER = 4, 9, 2, 1
N, K, H = 6, 2, 8
S = 4
NUM_PAGES = S * MAX_PAGES + 1
OPTIONS = {"scale": 0.4, "soft_cap": 3.0}
DECODE = AttentionBatch(page_table=jnp.zeros(0), kv_lens=jnp.asarray([33, 0, 1, 18]))
PREFILL = dataclasses.replace(
    DECODE, kv_lens=jnp.asarray([33, 0, 7, 18]), cu_q_lens=jnp.asarray([0, 20, 20, 27, 30])
)  # two rows more are padding


def made(region, seed, dtype=jnp.float32):
    """Queries, a cache with masses, and the region with its pages; what nobody wrote is NaN."""
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(NUM_PAGES - 1).reshape(S, MAX_PAGES)
    k, v = rng.normal(size=(2, LAYERS, NUM_PAGES, PAGE_SIZE, K, H)).astype(np.float32)
    mass = rng.random((LAYERS, NUM_PAGES, K, PAGE_SIZE)).astype(np.float32)
    for s, n in enumerate(np.asarray(region.kv_lens)):
        for p in range(n, MAX_PAGES * PAGE_SIZE):
            at = (slice(None), table[s, p // PAGE_SIZE])
            k[*at, p % PAGE_SIZE] = v[*at, p % PAGE_SIZE] = mass[*at, :, p % PAGE_SIZE] = np.nan
        table[s, -(-n // PAGE_SIZE) :] = 2**30
    scales = None if dtype == jnp.float32 else jnp.asarray(rng.uniform(0.5, 2, (LAYERS, K)), jnp.float32)
    pages = {"k": jnp.asarray(k, dtype), "v": jnp.asarray(v, dtype)}
    kv = KVCache(**pages, k_scale=scales, v_scale=scales, mass=jnp.asarray(mass))
    num_rows = S if region.cu_q_lens is None else 32
    q = jnp.asarray(rng.normal(size=(num_rows, N, H)), jnp.float32)
    return q, kv, dataclasses.replace(region, page_table=jnp.asarray(table, jnp.int32))


def drawn(q, kv, batch, counts):
    """`kv.mass` with the softmax's weights of each row that counts."""
    mass = np.asarray(kv.mass).copy()
    k = np.asarray(kv.k, np.float32)[LAYER]
    if kv.k_scale is not None:
        k = k * np.asarray(kv.k_scale)[LAYER][:, None]
    table = np.asarray(batch.page_table)
    for row, (s, position) in enumerate(reference.query_positions(batch, len(q))):
        if not counts[row] or position < 0:
            continue
        places = [(table[s, p // PAGE_SIZE], p % PAGE_SIZE) for p in range(position + 1)]
        keys = np.stack([k[place] for place in places])
        scores = OPTIONS["scale"] * np.einsum("kgh,pkh->kgp", np.asarray(q[row]).reshape(K, -1, H), keys)
        weights = np.exp(OPTIONS["soft_cap"] * np.tanh(scores / OPTIONS["soft_cap"]))
        weights /= weights.sum(axis=-1, keepdims=True)
        for p, (page, offset) in enumerate(places):
            mass[LAYER, page, :, offset] += weights[:, :, p].sum(axis=1)
    return mass


@jax.jit
def add(q, kv, batch, counts):
    _, lse = paged_attention(q, kv, jnp.int32(LAYER), batch, **OPTIONS, return_lse=True)
    return add_mass(q, lse, counts, kv, jnp.int32(LAYER), batch, **OPTIONS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn], ids=["float32", "fp8"])
@pytest.mark.parametrize("region", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_tokens_draw_the_softmax_weights_of_rows_that_count(region, dtype):
    q, kv, batch = made(region, 1, dtype)
    counts = np.random.default_rng(2).random(len(q)) < 0.6
    counts[-1] = False  # padding
    if region.cu_q_lens is None:
        counts = np.asarray([True, False, False, True])
    found, truth = np.asarray(add(q, kv, batch, jnp.asarray(counts))), drawn(q, kv, batch, counts)
    bound = {"rtol": 2e-5, "atol": 2e-5}
    np.testing.assert_allclose(found, truth, **bound)
    for wrong in (np.asarray(kv.mass), drawn(q, kv, batch, ~counts)):
        assert not np.allclose(found, wrong, equal_nan=True, rtol=1e-3, atol=1e-3)


def test_tables_for_each_kv_head_pass_dropped_tokens_over():
    q, kv, batch = made(DECODE, 3)
    rng = np.random.default_rng(4)
    is_dropped = rng.random(kv.mass.shape) < 0.6
    for s, n in enumerate(np.asarray(batch.kv_lens)):  # a row's own token stays
        if n:
            is_dropped[LAYER, batch.page_table[s, (n - 1) // PAGE_SIZE], :, (n - 1) % PAGE_SIZE] = False
    kv = dataclasses.replace(kv, mass=jnp.where(is_dropped, -jnp.inf, kv.mass))
    by_head = AttentionBatch(
        page_table=jnp.broadcast_to(batch.page_table[:, None], (S, K, MAX_PAGES)),
        kv_lens=jnp.broadcast_to(batch.kv_lens[:, None], (S, K)),
    )
    out, lse = paged_attention(q, kv, LAYER, by_head, **OPTIONS, return_lse=True)
    truth, truth_lse = reference.paged_attention(q, kv, LAYER, by_head, **OPTIONS)
    np.testing.assert_allclose(out, truth, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, truth_lse, rtol=2e-5, atol=2e-5)
    dense, _ = reference.paged_attention(q, dataclasses.replace(kv, mass=None), LAYER, by_head, **OPTIONS)
    assert not np.allclose(out, dense, rtol=1e-2, atol=1e-2)
    shared, _ = paged_attention(q, kv, LAYER, batch, **OPTIONS, return_lse=True)  # layers that drop nothing
    np.testing.assert_allclose(shared, dense, rtol=2e-5, atol=2e-5)
    added = np.asarray(add_mass(q, lse, jnp.asarray([True, False, True, True]), kv, LAYER, by_head, **OPTIONS))
    assert (added[is_dropped & ~np.isnan(kv.k[..., 0]).swapaxes(2, 3)] == -np.inf).all()
    is_kept = np.isfinite(added)
    grown = np.sum(added[is_kept] - np.asarray(kv.mass)[is_kept])
    np.testing.assert_allclose(grown, 3 * N, rtol=1e-4)  # each head of a row gives 1


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_tpu"])
def test_kernels_say_that_they_do_not_serve_dropped_tokens(implementation):
    q, kv, batch = made(DECODE, 5)
    by_head = dataclasses.replace(
        batch,
        page_table=jnp.broadcast_to(batch.page_table[:, None], (S, K, MAX_PAGES)),
        kv_lens=jnp.broadcast_to(batch.kv_lens[:, None], (S, K)),
    )
    with pytest.raises(NotImplementedError, match="page tables with dropped tokens are served by xla only"):
        paged_attention(q, kv, LAYER, by_head, **OPTIONS, implementation=implementation)

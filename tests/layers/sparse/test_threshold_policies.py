"""What policies with a threshold select is what a slow reading of their papers says."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from sparse_cases import LAYER, MAX_PAGES, PAGE_SIZE, K, expected_tables, lengths, tables_of, written

from jaxserve.layers.sparse import (
    Blasst,
    CompactAttention,
    FlashPrefill,
    LayerPolicies,
    attend as attend_module,
    page_meta,
    selection,
)
from jaxserve.layers.sparse.page_meta import fold
from jaxserve.layers.sparse.selection import select_pages
from jaxserve.pallas_kernels.paged_attention import AttentionBatch, paged_attention, reference
from jaxserve.sharding import mesh as meshes
from jaxserve.sharding.rules import kv_specs

SEEDS = range(8)


@functools.partial(jax.jit, static_argnums=0)
def select(policy, q, kv, batch):
    numbers = select_pages(policy, q, kv, jnp.int32(LAYER), batch.page_table, batch.kv_lens)
    return selection.tables_of(numbers, batch.page_table, batch.kv_lens, PAGE_SIZE, kv.k.shape[1])


def flash_prefill_pages(case, policy, s, k, n, queries=None):
    """Blocks of one query and of the keys of a page."""
    last = (n - 1) // PAGE_SIZE
    kept = {page for page in range(last + 1) if page * PAGE_SIZE < policy.sinks}
    kept |= {page for page in range(last + 1) if (last - page) * PAGE_SIZE < policy.window} | {last}
    for q in np.asarray(case.q[s] if queries is None else queries, np.float64).reshape(K, -1, cases.H)[k]:
        pages = case.keys[s, : last * PAGE_SIZE, k].reshape(last, PAGE_SIZE, cases.H)
        scores = [np.exp(q @ keys.mean(axis=0) / np.sqrt(cases.H)) for keys in pages]
        kept |= {page for page, score in enumerate(scores) if score >= policy.alpha * max(scores)}
    return sorted(kept)


@pytest.mark.parametrize(
    ("alpha", "sinks", "window"), [(0.18, 4, 8), (0.9, 0, 0), (0.97, 5, 9), (0.002, 0, 4), (0, 0, 0)]
)
def test_flash_prefill_selects_what_the_paper_says(alpha, sinks, window):
    policy = FlashPrefill(alpha=alpha, sinks=sinks, window=window)
    skips = 0
    for seed in SEEDS:
        case = written(policy.page_meta, lengths(seed), seed)
        expected, lens = expected_tables(case, lambda *at, case=case: flash_prefill_pages(case, policy, *at))
        found, found_lens = tables_of(select(policy, case.q, case.kv, case.batch))
        assert found == expected
        np.testing.assert_array_equal(found_lens, lens)
        skips += np.sum(found_lens < np.asarray(case.batch.kv_lens)[:, None])
    assert (skips == 0) == (alpha == 0)


@functools.partial(jax.jit, static_argnums=0)
def select_rows(policy, q, kv, region):
    (_, rows), *_ = attend_module.rows_by_policy(LayerPolicies(None, policy), q, region)
    return attend_module.select_rows(policy, rows, kv, jnp.int32(LAYER))[0]


@functools.partial(jax.jit, static_argnums=0)
def attend_prefill(policy, q, kv, region):
    policies = LayerPolicies(policy, policy)

    def attention(q, tables):
        assert tables is not region, "no row is dense"
        return attend(q, kv, tables)

    return attend_module.attend_prefill(policies, q, kv, jnp.int32(LAYER), region, region, attention)[0]


@pytest.mark.parametrize("cuts", [(0, 33), (0, 8, 12, 33), (16, 33)], ids=str)
def test_compact_attention_unites_the_rows_of_a_page_whatever_the_steps(cuts):
    """Each step also has rows of another sequence, before and after, and padding."""
    policy = CompactAttention(alpha=0.9, sinks=0, window=0)
    case = written(policy.page_meta, (33, 18, 0), 8)
    q = np.random.default_rng(9).integers(-4, 5, (2, 33, cases.N, cases.H)).astype(np.float32)
    differs = 0
    for start, end in itertools.pairwise(cuts):
        for order in ([0, 1], [1, 0]):
            spans = {0: (start, end), 1: (12, 18)}
            rows = [(s, p) for s in order for p in range(*spans[s])]
            region = AttentionBatch(
                page_table=case.batch.page_table[jnp.asarray(order)],
                kv_lens=jnp.asarray([spans[s][1] for s in order]),
                cu_q_lens=jnp.asarray(np.cumsum([0, *(spans[s][1] - spans[s][0] for s in order)])),
            )
            queries = jnp.asarray([q[s, p] for s, p in rows] + [q[0, 0]] * 3)
            found = np.asarray(select_rows(policy, queries, case.kv, region))
            out, _ = attend_prefill(policy, queries, case.kv, region)
            own = [flash_prefill_pages(case, policy, s, 0, p + 1, q[s, p]) for s, p in rows]
            for i, (s, p) in enumerate(rows):
                page = p // PAGE_SIZE
                mates = range(page * PAGE_SIZE, min(spans[s][1], (page + 1) * PAGE_SIZE))
                for k in range(K):
                    of_mates = [flash_prefill_pages(case, policy, s, k, mate + 1, q[s, mate]) for mate in mates]
                    expected = sorted(set().union(*of_mates))
                    assert [n for n in found[i, k] if n != selection.NO_PAGE] == expected
                    differs += k == 0 and expected != own[i]
            lens = jnp.asarray([p + 1 for _, p in rows])
            table = case.batch.page_table[jnp.asarray([s for s, _ in rows])]
            selected = selection.tables_of(jnp.asarray(found[: len(rows)]), table, lens, PAGE_SIZE, cases.NUM_PAGES)
            expected, _ = reference.paged_attention(queries[: len(rows)], case.kv, LAYER, selected, scale=0.2)
            np.testing.assert_allclose(out[: len(rows)], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(out[len(rows) :], 0.0)
    assert differs


def attend(q, kv, batch, below=None):
    return paged_attention(q, kv, jnp.int32(LAYER), batch, scale=0.2, skip_below=below, return_lse=True)


def test_a_threshold_of_nothing_is_dense_to_the_bit():
    policy = FlashPrefill(alpha=0, sinks=0, window=0)
    case = written(policy.page_meta, (36, 1, 18), 2)
    selected = select(policy, case.q, case.kv, case.batch)
    for got, dense in zip(
        jax.jit(attend)(case.q, case.kv, selected), jax.jit(attend)(case.q, case.kv, case.batch), strict=True
    ):
        np.testing.assert_array_equal(got, dense)


@pytest.mark.parametrize("factor", [0, 8.0])
def test_blasst_reads_each_row_with_the_threshold_of_its_length(factor):
    policy = Blasst(threshold_scale_factor=factor)
    lens = (33, 0, 18)
    case = written(None, lens, 8)
    kv = dataclasses.replace(case.kv, k=0.3 * case.kv.k)

    def run(q, kv, batch):
        attention = lambda q, region, below=None: attend(q, kv, region, below)  # noqa: E731
        return attend_module.attend_decode(policy, q, kv, jnp.int32(LAYER), batch, attention)[0]

    with np.errstate(divide="ignore"):
        below = np.minimum(np.log(factor / np.maximum(lens, 1)), 0.0)
    expected, expected_lse = reference.paged_attention(case.q, kv, LAYER, case.batch, scale=0.2, skip_below=below)
    out, lse = jax.jit(run)(case.q, kv, case.batch)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    dense, _ = reference.paged_attention(case.q, kv, LAYER, case.batch, scale=0.2)
    assert np.allclose(out, dense, rtol=1e-5, atol=1e-5) == (factor == 0)


@pytest.mark.parametrize("stale", [np.nan, np.inf, 1e9])
def test_metadata_of_whole_pages_are_those_of_their_present_owner(stale):
    """Pages that are not complete keep what they had, and nobody looks at it."""
    case = written(FlashPrefill().page_meta, (33, 7, 18), 3, stale)
    for s, n in enumerate((33, 7, 18)):
        for page in range(n // PAGE_SIZE):
            expected = case.keys[s, page * PAGE_SIZE : (page + 1) * PAGE_SIZE].mean(axis=0)
            np.testing.assert_array_equal(case.kv.meta[LAYER, case.batch.page_table[s, page]], expected)
    other = case.kv.meta[1 - LAYER]
    np.testing.assert_array_equal(other, np.full(other.shape, stale, np.float32))


def test_metadata_of_whole_pages_do_not_depend_on_how_their_keys_came():
    """Of keys whose sum depends on its order: in one piece, and one by one."""
    meta, k = FlashPrefill().page_meta, jnp.asarray([1e8, 1.0, -1e8, 3.0])[:, None, None] * jnp.ones((4, 1, 2))
    found = []
    for cuts in ([0, 4], [0, 1, 2, 3, 4], [0, 3, 4]):
        kv = cases.KVCache.zeros(1, 2, 4, (1, 2), jnp.float32, num_kv_heads=1)
        kv = dataclasses.replace(kv, meta=jnp.full((1, 2, 1, 2), jnp.nan))
        for start, end in itertools.pairwise(cuts):
            at = (jnp.ones(end - start, jnp.int32), jnp.arange(start, end))
            kv = fold(cases.write_kv(kv, 0, k[start:end], k[start:end], *at), 0, meta, 2, *at)
        found.append(np.asarray(kv.meta[0, 1]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert np.isfinite(found[0]).all()


def test_metadata_of_whole_pages_in_float8_are_those_of_what_they_hold():
    meta, k = FlashPrefill().page_meta, jnp.asarray([[1.06, -300.0], [0.1, 7.3]])[:, None]  # two tokens, K = 1, H = 2
    kv = dataclasses.replace(
        cases.KVCache.zeros(1, 2, 2, (1, 2), jnp.float8_e4m3fn, num_kv_heads=1),
        k_scale=jnp.full((1, 1), 2.0),
        meta=jnp.zeros((1, 2, 1, 2), page_meta.meta_dtype(jnp.float8_e4m3fn)),
    )
    at = (jnp.ones(2, jnp.int32), jnp.arange(2))
    kv = fold(cases.write_kv(kv, 0, k, k, *at), 0, meta, 2, *at)
    held = 2.0 * np.asarray(kv.k, np.float32)[0, 1, :2, 0]
    np.testing.assert_array_equal(kv.meta[0, 1, 0], jnp.asarray(held.mean(axis=0), jnp.bfloat16))


def test_the_ranks_of_kv_select_together_what_one_device_selects():
    policy, kv_size = FlashPrefill(alpha=0.5, sinks=4, window=4), 4
    mesh = meshes.make_mesh(kv_size, 1)
    case = written(policy.page_meta, (35, 3, 18), 6)
    pad = -cases.NUM_PAGES % kv_size
    kv = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)), case.kv)

    def run(q, kv, batch):
        return select_pages(policy, q, kv, jnp.int32(LAYER), batch.page_table, batch.kv_lens)[None]

    found = jax.jit(meshes.on_ranks(mesh, run, lambda: ((jax.P(), kv_specs(kv), jax.P()), jax.P("kv"))))(
        case.q, kv, case.batch
    )
    batch = case.batch
    whole = jax.jit(lambda q, kv: select_pages(policy, q, kv, LAYER, batch.page_table, batch.kv_lens))(case.q, case.kv)
    assert MAX_PAGES in whole.shape
    for rank in range(kv_size):
        np.testing.assert_array_equal(found[rank], whole)

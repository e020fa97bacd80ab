"""What each policy selects is what a slow reading of its paper says; and what attention then reads is that."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from sparse_cases import LAYER, MAX_PAGES, PAGE_SIZE, K, expected_tables, lengths, tables_of, written

from jaxserve.layers.sparse import LServe, Quest, StreamingLLM, attend as attend_module, page_meta, selection
from jaxserve.layers.sparse.page_meta import fold
from jaxserve.layers.sparse.selection import select_pages
from jaxserve.pallas_kernels.paged_attention import AttentionBatch, paged_attention, reference
from jaxserve.sharding import kv_parallel, mesh as meshes
from jaxserve.sharding.rules import kv_specs

SEEDS = range(12)


def bound(queries, keys):
    """The most that the scores of these keys may be, summed over the queries."""
    low, high = keys.min(axis=0), keys.max(axis=0)
    return sum(max(q[d] * low[d], q[d] * high[d]) for q in queries for d in range(cases.H))


def quest_pages(case, budget, s, k, n, q=None):
    """Pages with the largest `sum_d max(q_d min_d, q_d max_d)` over the heads of the group, and the last."""
    last = (n - 1) // PAGE_SIZE
    queries = np.asarray(case.q[s] if q is None else q).reshape(K, -1, cases.H)[k]
    bounds = [bound(queries, case.keys[s, page * PAGE_SIZE : (page + 1) * PAGE_SIZE, k]) for page in range(last)]
    best = sorted(range(last), key=lambda page: (-bounds[page], page))[: budget // PAGE_SIZE - 1]
    return [*sorted(best), last]


def streaming_pages(policy, n):
    """Pages with one of the first positions or of the last."""
    kept = [p for p in range(n) if p < policy.sinks or p >= n - policy.window]
    return sorted({p // PAGE_SIZE for p in kept})


@functools.partial(jax.jit, static_argnums=0)
def select(policy, q, kv, batch):
    numbers = select_pages(policy, q, kv, jnp.int32(LAYER), batch.page_table, batch.kv_lens)
    return selection.tables_of(numbers, batch.page_table, batch.kv_lens, PAGE_SIZE, kv.k.shape[1])


@pytest.mark.parametrize("budget", [12, 20, 23, 4 * PAGE_SIZE * MAX_PAGES])
def test_quest_selects_what_the_paper_says(budget):
    policy = Quest(budget=budget)
    for seed in SEEDS:
        case = written(policy.page_meta, lengths(seed), seed)
        expected, lens = expected_tables(case, lambda *at, case=case: quest_pages(case, budget, *at))
        found, found_lens = tables_of(select(policy, case.q, case.kv, case.batch))
        assert found == expected
        np.testing.assert_array_equal(found_lens, lens)


def lserve_pages(case, policy, s, k, n):
    """As Quest's, by the best bound of a part of the page; and for streaming heads as StreamingLLM's."""
    if (LAYER, k) in policy.streaming_heads:
        return streaming_pages(StreamingLLM(sinks=policy.sinks, window=policy.local), n)
    last, size = (n - 1) // PAGE_SIZE, PAGE_SIZE // policy.parts
    queries = np.asarray(case.q[s]).reshape(K, -1, cases.H)[k]
    bounds = []
    for page in range(last):
        parts = case.keys[s, page * PAGE_SIZE : (page + 1) * PAGE_SIZE, k].reshape(policy.parts, size, cases.H)
        bounds.append(max(bound(queries, part) for part in parts))
    best = sorted(range(last), key=lambda page: (-bounds[page], page))[: policy.budget // PAGE_SIZE - 1]
    return [*sorted(best), last]


@pytest.mark.parametrize("heads", [(), ((LAYER, 0), (0, 1)), ((0, 0),)], ids=str)
@pytest.mark.parametrize(("budget", "parts", "local"), [(12, 2, 5), (16, 4, 100), (1000, 1, 3)])
def test_lserve_selects_what_the_paper_says(budget, parts, local, heads):
    policy = LServe(budget=budget, parts=parts, sinks=4, local=local, streaming_heads=heads)
    for seed in SEEDS:
        case = written(policy.page_meta, lengths(seed), seed)
        expected, lens = expected_tables(case, lambda *at, case=case: lserve_pages(case, policy, *at))
        found, found_lens = tables_of(select(policy, case.q, case.kv, case.batch))
        assert found == expected
        np.testing.assert_array_equal(found_lens, lens)


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (1, 4), (4, 5), (5, 11), (7, 100)])
def test_streaming_llm_selects_what_the_paper_says(sinks, window):
    policy = StreamingLLM(sinks=sinks, window=window)
    for seed in SEEDS:
        case = written(None, lengths(seed), seed)
        expected, lens = expected_tables(case, lambda s, k, n: streaming_pages(policy, n))
        found, found_lens = tables_of(select(policy, case.q, case.kv, case.batch))
        assert found == expected
        np.testing.assert_array_equal(found_lens, lens)


def attend(q, kv, batch):
    return paged_attention(q, kv, jnp.int32(LAYER), batch, scale=0.2, return_lse=True)


def test_attention_reads_what_is_selected_and_nothing_else():
    policy = Quest(budget=12)
    case = written(policy.page_meta, (33, 0, 18), 1)
    selected = select(policy, case.q, case.kv, case.batch)
    expected, expected_lse = reference.paged_attention(case.q, case.kv, LAYER, selected, scale=0.2)
    tables, lens = tables_of(selected)
    read = {page for table in tables for page in table}
    others = np.setdiff1d(np.arange(cases.NUM_PAGES), list(read))
    pages = {name: getattr(case.kv, name).at[:, others].set(jnp.nan) for name in ("k", "v")}
    out, lse = jax.jit(attend)(case.q, dataclasses.replace(case.kv, **pages), selected)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert (lens[1] == 0).all()
    wrong = dataclasses.replace(selected, page_table=jnp.roll(selected.page_table, 1, axis=1))  # of the other KV head
    assert not np.allclose(jax.jit(attend)(case.q, case.kv, wrong)[0], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("policy", [Quest(budget=PAGE_SIZE * MAX_PAGES), StreamingLLM(window=PAGE_SIZE * MAX_PAGES)])
def test_a_full_budget_is_dense_to_the_bit(policy):
    case = written(policy.page_meta, (36, 1, 18), 2)
    selected = select(policy, case.q, case.kv, case.batch)
    for got, dense in zip(
        jax.jit(attend)(case.q, case.kv, selected), jax.jit(attend)(case.q, case.kv, case.batch), strict=True
    ):
        np.testing.assert_array_equal(got, dense)


@pytest.mark.parametrize("stale", [np.nan, np.inf, 1e9])
def test_metadata_of_a_page_are_those_of_its_present_owner(stale):
    meta = Quest().page_meta
    case = written(meta, (33, 7, 18), 3, stale)
    for s, n in enumerate((33, 7, 18)):
        for page in range(-(-n // PAGE_SIZE)):
            keys = case.keys[s, page * PAGE_SIZE : min(n, (page + 1) * PAGE_SIZE)]
            expected = np.concatenate([-keys.min(axis=0), keys.max(axis=0)], axis=-1)
            np.testing.assert_array_equal(case.kv.meta[LAYER, case.batch.page_table[s, page]], expected)
    other = case.kv.meta[1 - LAYER]
    np.testing.assert_array_equal(other, np.full(other.shape, stale, np.float32))  # another layer's are not touched


def test_stale_metadata_is_noticed():
    """Had a page's first key not begun anew, the oracle would see it."""
    policy = Quest(budget=12)
    case = written(policy.page_meta, (33, 30, 36), 4)
    stale = dataclasses.replace(
        case.kv, meta=jnp.maximum(case.kv.meta, written(policy.page_meta, (36,) * 3, 5).kv.meta)
    )
    expected, _ = expected_tables(case, lambda *at: quest_pages(case, 12, *at))
    assert tables_of(select(policy, case.q, case.kv, case.batch))[0] == expected
    assert tables_of(select(policy, case.q, stale, case.batch))[0] != expected


def test_metadata_of_a_cache_in_float8_are_those_of_what_it_holds():
    meta, k = Quest().page_meta, jnp.asarray([[1.06, -300.0], [0.1, 7.3]])[:, None]  # two tokens, K = 1, H = 2
    kv = dataclasses.replace(
        cases.KVCache.zeros(1, 2, 4, (1, 2), jnp.float8_e4m3fn, num_kv_heads=1),
        k_scale=jnp.full((1, 1), 2.0),
        meta=jnp.zeros((1, 2, 1, 4), page_meta.meta_dtype(jnp.float8_e4m3fn)),
    )
    at = (jnp.ones(2, jnp.int32), jnp.arange(2))
    kv = fold(cases.write_kv(kv, 0, k, k, *at), 0, meta, 2, *at)
    held = 2.0 * np.asarray(kv.k, np.float32)[0, 1, :2, 0]
    expected = np.concatenate([-held.min(axis=0), held.max(axis=0)])
    np.testing.assert_array_equal(np.asarray(kv.meta, np.float32)[0, 1, 0], expected)


@functools.partial(jax.jit, static_argnums=0)
def select_rows(policy, q, kv, region):
    """What `attend` gives its rows, and the cache with what it carries on."""
    sequence, seen = jnp.zeros(q.shape[0], jnp.int32), region.kv_lens
    if region.cu_q_lens is not None:
        seen = region.kv_lens - region.cu_q_lens[1] + jnp.arange(q.shape[0]) + 1
        seen = jnp.where(seen > region.prompt_lens, seen, 0)
    return attend_module.select_rows(policy, attend_module.Rows(q, region, sequence, seen), kv, jnp.int32(LAYER))


@pytest.mark.parametrize("cuts", [(7, 21, 36), (10, 11, 12, 19, 36), (10, *range(11, 37))], ids=str)
@pytest.mark.parametrize("reselect", [2, 5, 40])
def test_rows_between_two_selections_read_the_last_one_and_the_pages_begun_since(cuts, reselect):
    """However the answer is cut into steps; steps of one row are decode rows. It begins at position 10."""
    policy, length = Quest(budget=12, reselect=reselect), 36
    case = written(policy.page_meta, (length, 0, 0), 8)
    q = np.random.default_rng(9).integers(-4, 5, (length, cases.N, cases.H)).astype(np.float32)
    kv = dataclasses.replace(case.kv, carry=jnp.full((cases.LAYERS, 4, K, 3), 7))
    found = {}
    for start, end in itertools.pairwise(cuts):
        region = AttentionBatch(
            page_table=case.batch.page_table[:1],
            kv_lens=jnp.asarray([end]),
            cu_q_lens=jnp.asarray([0, end - start]) if start < 10 or end - start > 1 else None,
            slots=jnp.asarray([2]),
            prompt_lens=jnp.asarray([10]),
        )
        numbers, kv = select_rows(policy, jnp.asarray(q[start:end]), kv, region)
        found |= {start + i: row for i, row in enumerate(np.asarray(numbers))}
    for p in range(10, length):
        at = max(p - p % reselect, 10)
        begun = range(at // PAGE_SIZE + 1, p // PAGE_SIZE + 1)
        for k in range(K):
            expected = [*quest_pages(case, 12, 0, k, at + 1, q[at]), *begun]
            assert [number for number in found[p][k] if number != selection.NO_PAGE] == expected
    assert (np.asarray(kv.carry)[:, [0, 1, 3]] == 7).all()  # other slots keep theirs


def test_on_a_gpu_decode_rows_select_all_at_once_what_they_select_some_at_a_time_elsewhere(monkeypatch):
    policy = Quest(budget=12, reselect=4)
    case = written(policy.page_meta, (33, 0, 19), 10)
    kv = dataclasses.replace(case.kv, carry=jnp.zeros((cases.LAYERS, 4, K, 3), jnp.int32))
    three = jnp.arange(3)
    region = dataclasses.replace(case.batch, slots=three, prompt_lens=jnp.zeros(3, jnp.int32))
    rows = attend_module.Rows(case.q, region, three, region.kv_lens)
    expected, expected_kv = attend_module.select_rows(policy, rows, kv, LAYER)
    monkeypatch.setattr(attend_module, "target_device", lambda: types.SimpleNamespace(platform="gpu"))
    found, found_kv = attend_module.select_rows(policy, rows, kv, LAYER)
    assert (np.asarray(expected[0]) >= 0).any()  # the first sequence selects now, the third did before
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_kv.carry, expected_kv.carry)


@pytest.mark.parametrize("policy", [Quest(budget=12), StreamingLLM(sinks=1, window=9)], ids=str)
def test_the_ranks_of_kv_select_together_what_one_device_selects(policy):
    """Each rank gets its part of one selection."""
    kv_size = 4
    mesh = meshes.make_mesh(kv_size, 1)
    case = written(policy.page_meta, (35, 3, 18), 6)
    pad = -cases.NUM_PAGES % kv_size  # as many pages on each rank, of which none is a null page here
    kv = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)), case.kv)

    def run(q, kv, batch):
        selected = select(policy, q, kv, batch)
        out, lse = attend(q, kv, selected)
        merged = kv_parallel.merge_over_kv(jnp.pad(out, ((0, 0), (0, 2), (0, 0))), jnp.pad(lse, ((0, 0), (0, 2))))
        return merged, jax.tree.map(lambda x: x[None], selected)

    specs = lambda: ((jax.P(), kv_specs(kv), jax.P()), (jax.P(None, ("kv",)), jax.P("kv")))  # noqa: E731
    out, parts = jax.jit(meshes.on_ranks(mesh, run, specs))(case.q, kv, case.batch)
    whole = select(policy, case.q, case.kv, case.batch)
    np.testing.assert_allclose(out[:, : cases.N], attend(case.q, case.kv, whole)[0], rtol=1e-5, atol=1e-5)
    per_rank = kv.k.shape[1] // kv_size
    found = [set() for _ in range(cases.NUM_SEQS * K)]
    for rank in range(kv_size):
        part = jax.tree.map(lambda x: x[rank], parts)  # noqa: B023
        for pages, table in zip(found, tables_of(part)[0], strict=True):
            pages.update(page + rank * per_rank for page in table)
    assert found == [set(table) for table in tables_of(whole)[0]]
    np.testing.assert_array_equal(jnp.sum(parts.kv_lens, axis=0), whole.kv_lens)

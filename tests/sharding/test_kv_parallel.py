"""Attention over pages on several ranks against the same on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jaxserve.layers.attention import own_pages
from jaxserve.pallas_kernels.paged_attention import AttentionBatch, KVCache, paged_attention
from jaxserve.sharding.kv_parallel import merge_over_kv, own_page
from jaxserve.sharding.mesh import FLAT, make_mesh, on_ranks
from jaxserve.sharding.rules import kv_specs

PAGE_SIZE, PAGES_PER_RANK, MAX_PAGES, N, K, H = 4, 40, 8, 8, 4, 8
LENGTHS = st.integers(0, MAX_PAGES * PAGE_SIZE)
Q_LENS = {"decode": 1, "drafts": 3, "prefill": None}


def make_case(kv_lens, ranks, num_ranks, kind, seed):
    """Queries, a cache and a batch; page i of sequence s is on rank `ranks[s][i]`. Pages in no table hold NaN."""
    rng = np.random.default_rng(seed)
    kv_lens = np.array(kv_lens)
    next_page = np.arange(num_ranks) * PAGES_PER_RANK + 1
    table = np.zeros((len(kv_lens), MAX_PAGES), np.int32)
    cache = np.full((2, 1, num_ranks * PAGES_PER_RANK, PAGE_SIZE, K, H), np.nan, np.float32)
    for s, length in enumerate(kv_lens):
        for i in range(-(-length // PAGE_SIZE)):
            rank = ranks[s % len(ranks)][i] % num_ranks
            page, next_page[rank] = next_page[rank], next_page[rank] + 1
            table[s, i] = page
            filled = min(PAGE_SIZE, length - i * PAGE_SIZE)
            cache[:, 0, page, :filled] = rng.normal(size=(2, filled, K, H))
    q_lens = np.minimum(kv_lens, 5)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32) if kind == "prefill" else None
    q_len = Q_LENS[kind] or 1
    rows = 5 * len(kv_lens) if kind == "prefill" else q_len * len(kv_lens)
    if kind == "drafts":
        kv_lens = np.where(kv_lens < q_len, 0, kv_lens)
    batch = AttentionBatch(
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=None if cu_q_lens is None else jnp.asarray(cu_q_lens),
        max_q_len=q_len,
    )
    kv = KVCache(k=jnp.asarray(cache[0]), v=jnp.asarray(cache[1]))
    return jnp.asarray(rng.normal(size=(rows, N, H)), jnp.float32), kv, batch


@functools.partial(jax.jit, static_argnames=("mesh", "window"))
def attend(q, kv, batch, *, mesh=None, window=None):
    def run(q, kv, batch):
        own = own_pages(batch, kv, window)
        how = {"scale": H**-0.5, "sliding_window": window, "implementation": "xla"}
        return merge_over_kv(*paged_attention(q, kv, 0, own, return_lse=True, **how))

    heads = jax.P(None, "tp", None)
    return on_ranks(mesh, run, lambda: ((heads, kv_specs(kv), jax.P()), jax.P(None, FLAT, None)))(q, kv, batch)


@pytest.mark.parametrize("kind", Q_LENS)
@settings(max_examples=15, deadline=None)
@given(
    kv_lens=st.lists(LENGTHS, min_size=4, max_size=4),
    ranks=st.lists(st.lists(st.integers(0, 3), min_size=MAX_PAGES, max_size=MAX_PAGES), min_size=1, max_size=4),
    how=st.sampled_from([((4, 1), None), ((2, 2), 6)]),
)
@example(kv_lens=[1, 4, 5, 32], ranks=[[0, 1, 2, 3, 0, 1, 2, 3]], how=((4, 1), None))  # single tokens
@example(kv_lens=[3, 17, 0, 31], ranks=[[2] * MAX_PAGES], how=((4, 1), None))  # all ranks but one are empty
def test_result_is_that_of_one_device(kind, kv_lens, ranks, how):
    sizes, window = how
    q, kv, batch = make_case(kv_lens, ranks, sizes[0], kind, seed=sum(kv_lens))
    got = attend(q, kv, batch, mesh=make_mesh(*sizes), window=window)
    want = attend(q, kv, batch, window=window)
    assert not np.isnan(want).any()
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_swapped_pages_and_a_lost_rank_are_noticed():
    q, kv, batch = make_case([32, 20, 9, 32], [[0, 1] * 4], 2, "decode", seed=0)
    want = attend(q, kv, batch)
    swapped = jax.tree.map(lambda pages: jnp.roll(pages, PAGES_PER_RANK, axis=1), kv)
    shorter = dataclasses.replace(batch, kv_lens=batch.kv_lens - PAGE_SIZE)
    for wrong in (
        attend(q, swapped, batch, mesh=make_mesh(2, 1)),
        attend(q, kv, shorter, mesh=make_mesh(2, 1)),
    ):
        assert not np.allclose(wrong, want, atol=0.01)


def test_half_precision_carries_exact_weights():
    """The log-sum-exp travels as the bits of a float32 in two elements of the output's dtype."""
    q, kv, batch = make_case([32, 20, 9, 1], [[0, 1, 1, 0] * 2], 2, "decode", seed=3)
    q, kv = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, kv))
    got, want = attend(q, kv, batch, mesh=make_mesh(2, 1)), attend(q, kv, batch)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.02)


def test_other_ranks_pages_are_written_to_the_null_page():
    run = on_ranks(make_mesh(4, 1), lambda pages: own_page(pages, 10)[None], lambda: (jax.P(), jax.P("kv")))
    assert run(jnp.array([0, 3, 10, 12, 39])).tolist() == [
        [0, 3, 0, 0, 0], [0, 0, 0, 2, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 9],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("q_len", "window", "first"), [(1, None, 0), (1, 11, 4), (1, 10, 5), (1, 7, 5), (1, 6, 6), (3, 6, 5)]
)
def test_a_rank_reads_no_page_below_the_window(q_len, window, first):
    """Of 30 tokens in 8 pages, ranks taking turns: positions from `30 - q_len + 1 - window` on are seen."""
    _, kv, batch = make_case([30], [[0, 1] * 4], 2, "decode", seed=0)
    batch = dataclasses.replace(batch, max_q_len=q_len)

    def run(kv, batch):
        own = own_pages(batch, kv, window)
        return own.page_numbers, own.own_lens

    specs = lambda: ((kv_specs(kv), jax.P()), jax.P("kv"))  # noqa: E731
    numbers, lens = on_ranks(make_mesh(2, 1), run, specs)(kv, batch)
    for rank in (0, 1):
        pages = [n for n in range(8) if n % 2 == rank and n >= first]
        assert numbers[rank, : len(pages)].tolist() == pages
        assert lens[rank] == sum(min(PAGE_SIZE, 30 - n * PAGE_SIZE) for n in pages)

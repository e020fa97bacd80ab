"""Double Sparsity selects the pages with the best tokens, by the channels that it was given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from sparse_cases import LAYER, LAYERS, MAX_PAGES, PAGE_SIZE, H, K, expected_tables, lengths, tables_of, written

from jaxserve.layers.sparse import DoubleSparsity, selection
from jaxserve.layers.sparse.selection import select_pages
from jaxserve.pallas_kernels.paged_attention import paged_attention
from jaxserve.sharding import mesh as meshes
from jaxserve.sharding.rules import kv_specs

rng = np.random.default_rng(1)
CHANNELS = tuple(tuple(tuple(rng.permutation(H)[:3].tolist()) for _ in range(K)) for _ in range(LAYERS))


@functools.partial(jax.jit, static_argnums=0)
def select(policy, q, kv, batch):
    numbers = select_pages(policy, q, kv, jnp.int32(LAYER), batch.page_table, batch.kv_lens)
    return selection.tables_of(numbers, batch.page_table, batch.kv_lens, PAGE_SIZE, kv.k.shape[1])


def best_pages(case, policy, s, k, n):
    last = (n - 1) // PAGE_SIZE
    own = policy.channels[LAYER][k]
    queries = np.asarray(case.q[s]).reshape(K, -1, H)[k]
    tokens = [sum(q[c] * case.keys[s, p, k, c] for q in queries for c in own) for p in range(last * PAGE_SIZE)]
    scores = [max(tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]) for page in range(last)]
    best = sorted(range(last), key=lambda page: (-scores[page], page))[: policy.budget // PAGE_SIZE - 1]
    return [*sorted(best), last]


@pytest.mark.parametrize("stale", [np.nan, 1e9])
@pytest.mark.parametrize("budget", [4, 12, 23])
def test_double_sparsity_selects_what_the_paper_says(budget, stale):
    policy = DoubleSparsity(budget=budget, channels=CHANNELS)
    others = DoubleSparsity(budget=budget, channels=CHANNELS[::-1])
    differs = 0
    for seed in range(6):
        case = written(policy.page_meta, lengths(seed), seed, stale)
        expected, lens = expected_tables(case, lambda *at, case=case: best_pages(case, policy, *at))
        found, found_lens = tables_of(select(policy, case.q, case.kv, case.batch))
        assert found == expected
        np.testing.assert_array_equal(found_lens, lens)
        differs += expected_tables(case, lambda *at, case=case: best_pages(case, others, *at))[0] != expected
    assert (differs > 0) == (budget > 4)  # a budget of one page has the own one alone


def test_a_full_budget_is_dense_to_the_bit():
    policy = DoubleSparsity(budget=PAGE_SIZE * MAX_PAGES, channels=CHANNELS)
    case = written(policy.page_meta, (36, 1, 18), 2)
    attend = jax.jit(lambda q, kv, batch: paged_attention(q, kv, LAYER, batch, scale=0.2, return_lse=True))
    selected = select(policy, case.q, case.kv, case.batch)
    for got, dense in zip(attend(case.q, case.kv, selected), attend(case.q, case.kv, case.batch), strict=True):
        np.testing.assert_array_equal(got, dense)


def test_the_ranks_of_kv_select_together_what_one_device_selects():
    policy, kv_size = DoubleSparsity(budget=12, channels=CHANNELS), 4
    case = written(policy.page_meta, (35, 3, 18), 6)
    pad = -cases.NUM_PAGES % kv_size
    kv = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)), case.kv)

    def run(q, kv, batch):
        return select_pages(policy, q, kv, jnp.int32(LAYER), batch.page_table, batch.kv_lens)[None]

    specs = lambda: ((jax.P(), kv_specs(kv), jax.P()), jax.P("kv"))  # noqa: E731
    found = jax.jit(meshes.on_ranks(meshes.make_mesh(kv_size, 1), run, specs))(case.q, kv, case.batch)
    whole = jax.jit(run)(case.q, case.kv, case.batch)
    for rank in range(kv_size):
        np.testing.assert_array_equal(found[rank], whole[0])

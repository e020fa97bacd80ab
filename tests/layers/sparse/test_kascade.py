"""Kascade's anchors choose the pages with most of the softmax's mass, and other layers read what they chose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from sparse_cases import LAYER, MAX_PAGES, NUM_SEQS, PAGE_SIZE, H, K, lengths, written

from jaxserve.layers.sparse import Kascade, attend as attend_module, selection
from jaxserve.layers.sparse.hooks import SparseAttention
from jaxserve.layers.sparse.state import begin_step
from jaxserve.pallas_kernels.paged_attention import paged_attention, reference
from jaxserve.sharding import mesh as meshes
from jaxserve.sharding.rules import kv_specs

SCALE, CAP = 0.2, 3.0
HEADS = ((0, 1), (1, 0), (1, 1))


def kascade(percent, least):
    return Kascade(percent=percent, least=least, anchors=(0, 1), heads=HEADS)


def masses(case, s, k, n):
    """Of the softmax over all positions of each page, summed over the heads of the group."""
    found = np.zeros(-(-n // PAGE_SIZE))
    for q in np.asarray(case.q[s], np.float64).reshape(K, -1, H)[k]:
        scores = CAP * np.tanh(SCALE * (case.keys[s, :n, k] @ q) / CAP)
        p = np.exp(scores - scores.max())
        for page in range(len(found)):
            found[page] += p[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].sum() / p.sum()
    return found


def largest(case, policy, s, k, n):
    tokens = max(n * policy.percent // 100, policy.least)
    count, last = max(-(-tokens // PAGE_SIZE), 1), (n - 1) // PAGE_SIZE
    mass = masses(case, s, k, n)
    best = sorted(range(last), key=lambda page: (-mass[page], page))[: count - 1]
    return [*sorted(best), last]


def attention(kv, q, region, below=None):
    options = {"scale": SCALE, "soft_cap": CAP, "skip_below": below, "return_lse": True}
    return paged_attention(q, kv, jnp.int32(LAYER), region, **options)


@functools.partial(jax.jit, static_argnums=0)
def run(policy, q, kv, batch, layer):
    """What the parts of the policy give decode rows: in the first layer, an anchor, and layer `layer` after it."""
    first, anchor, after = (part.policy for part in policy.by_layers())
    kv = begin_step(
        SparseAttention(decode=policy), kv, H, num_decode=NUM_SEQS, num_prefill=0, max_pages=batch.page_table.shape[1]
    )
    attend = functools.partial(attention, kv)
    (dense, _), _ = attend_module.attend_decode(first, q, kv, jnp.int32(LAYER), batch, attend)
    (out, _), kv = attend_module.attend_decode(anchor, q, kv, jnp.int32(LAYER), batch, attend)
    rows = attend_module.Rows(q, batch, jnp.arange(q.shape[0]), batch.kv_lens)
    followed, _ = attend_module.select_rows(after, rows, kv, layer, attend)
    return dense, out, kv.chosen[0], followed


@pytest.mark.parametrize(("percent", "least"), [(10, 8), (50, 4), (30, 0), (0, 0), (100, 0)])
def test_anchors_choose_the_largest_mass_and_others_follow_their_heads(percent, least):
    policy = kascade(percent, least)
    for seed in range(4):
        case = written(None, lengths(seed), seed)
        dense, out, chosen, followed = run(policy, case.q, case.kv, case.batch, jnp.int32(2))
        expected = np.full(chosen.shape, selection.NO_PAGE)
        for s, n in enumerate(np.asarray(case.batch.kv_lens)):
            for k in range(K):
                pages = largest(case, policy, s, k, int(n)) if n else []
                expected[s, k, : len(pages)] = pages
        np.testing.assert_array_equal(chosen, expected)
        np.testing.assert_array_equal(followed, expected[:, list(HEADS[2])])
        table = selection.tables_of(
            jnp.asarray(expected), case.batch.page_table, case.batch.kv_lens, PAGE_SIZE, cases.NUM_PAGES
        )
        for found, region in ((dense, case.batch), (out, table)):
            truth, _ = reference.paged_attention(case.q, case.kv, LAYER, region, scale=SCALE, soft_cap=CAP)
            np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5)
        assert (percent == 100) == np.allclose(out, dense, rtol=1e-5, atol=1e-5)


def test_what_is_kept_of_a_step_is_as_wide_as_the_longest_selection():
    case = written(None, (36, 1, 18), 2)
    for percent, width in ((10, 2), (50, 5), (100, MAX_PAGES)):
        assert run(kascade(percent, 8), case.q, case.kv, case.batch, 2)[2].shape == (NUM_SEQS, K, width)


def test_the_ranks_of_kv_choose_together_what_one_device_chooses():
    policy, kv_size = kascade(30, 8), 4
    case = written(None, (35, 3, 18), 6)
    pad = -cases.NUM_PAGES % kv_size
    kv = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)), case.kv)

    def on_rank(q, kv, batch):
        return run(policy, q, kv, batch, jnp.int32(2))[2][None]

    specs = lambda: ((jax.P(), kv_specs(kv), jax.P()), jax.P("kv"))  # noqa: E731
    found = jax.jit(meshes.on_ranks(meshes.make_mesh(kv_size, 1), on_rank, specs))(case.q, kv, case.batch)
    for rank in range(kv_size):
        np.testing.assert_array_equal(found[rank], run(policy, case.q, case.kv, case.batch, jnp.int32(2))[2])


def test_parts_cover_all_layers():
    policy = Kascade(anchors=(0, 1, 4), heads=((0,),) * 6)
    parts = [(part.first, part.last, part.policy.chooses, part.policy.reads_all) for part in policy.by_layers()]
    assert parts == [
        (0, 1, True, True),
        (1, 2, True, False),
        (2, 4, False, False),
        (4, 5, True, False),
        (5, None, False, False),
    ]
    segments = list(SparseAttention(prefill=policy).segments(0, 6))
    assert [(first, last) for first, last, _ in segments] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    assert all(held.prefill.whole == policy and held.decode is None for _, _, held in segments)

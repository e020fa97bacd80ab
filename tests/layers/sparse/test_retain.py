"""What KV heads keep and what rows then attend to, beside the papers' rules written out for one sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.attention import AttentionSpec, attend, prepare_batch
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch
from jaxserve.layers.sparse import H2O, LayerPolicies, SnapKV, SparseAttention
from jaxserve.layers.sparse.state import init_state

PAGE_SIZE, MAX_PAGES, LAYERS, LAYER = 4, 9, 2, 1
N, K, H = 6, 2, 8
NUM_SEQS, ROWS = 3, 24
NUM_PAGES = NUM_SEQS * MAX_PAGES + 1
LENGTHS = ((23, 36), (7, 20), (30, 33))  # of prompts, and with their answers
SPEC = AttentionSpec(num_heads=N, num_kv_heads=K, scale=0.5, frequencies=np.zeros(H // 2, np.float32))  # no rotation
FAST = (H2O(heavy=3, recent=4), SnapKV(budget=9, window=4, kernel_size=3))  # their steps are compiled once
SLOW = (
    H2O(heavy=1, recent=1),
    H2O(heavy=12, recent=5),
    SnapKV(budget=12, window=7, kernel_size=5, pooling="maxpool"),
    SnapKV(budget=7, window=1, kernel_size=1),
)
POLICIES = [*FAST, *(pytest.param(policy, marks=pytest.mark.full) for policy in SLOW)]


def weights(q, keys, kept):
    """Softmax of one row's heads over the tokens that their KV head keeps: [N, S]."""
    scores = SPEC.scale * np.einsum("ngh,snh->ngs", q.reshape(K, N // K, H), keys[: kept.shape[1]])
    scores = np.where(kept[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)).reshape(N, -1)


def best(values, count):
    return sorted(range(len(values)), key=lambda j: (-values[j], j))[:count]


def h2o(policy, kept, mass, row, prompt_len):
    """After each row from the prompt's last on: the heaviest of those before the recent ones, and these."""
    if row < prompt_len - 1:
        return
    older = max(row + 1 - policy.recent, 0)
    for k in range(K):
        candidates = [j for j in range(older) if kept[k, j]]
        stay = best([mass[k, j] for j in candidates], policy.heavy)
        kept[k, :older] = False
        kept[k, [candidates[i] for i in stay]] = True


def snapkv(policy, kept, votes, row, prompt_len):
    """At the prompt's end."""
    if row != prompt_len - 1 or prompt_len <= policy.budget:
        return
    older, half = prompt_len - policy.window, policy.kernel_size // 2
    for k in range(K):
        padded = np.pad(votes[k, :older], half)
        windows = [padded[j : j + policy.kernel_size] for j in range(older)]
        pooled = [w.mean() if policy.pooling == "avgpool" else w.max() for w in windows]
        kept[k, :older] = False
        kept[k, best(pooled, policy.budget - policy.window)] = True


def expected(policy, q, keys, values, prompt_len):
    """Outputs of all rows of one sequence [S, N, H], and what is kept after the last one [K, S]."""
    S = len(q)
    out, kept, mass = np.zeros((S, N, H)), np.ones((K, S), bool), np.zeros((K, S))
    for row in range(S):
        p = weights(q[row], keys, kept[:, : row + 1])
        out[row] = np.einsum("ngs,snh->ngh", p.reshape(K, N // K, -1), values[: row + 1]).reshape(N, H)
        counts = prompt_len - policy.window <= row < prompt_len if isinstance(policy, SnapKV) else True
        mass[:, : row + 1] += counts * p.reshape(K, N // K, -1).sum(axis=1)
        (snapkv if isinstance(policy, SnapKV) else h2o)(policy, kept, mass, row, prompt_len)
    return out, kept


@functools.partial(jax.jit, static_argnums=0)
def step(policy, kv, heads, batch):
    policies = None if policy is None else LayerPolicies(policy, None)
    return attend(heads, kv, jnp.int32(LAYER), prepare_batch(batch, kv, SPEC, policies=policies), SPEC)


def empty(policy):
    """Of numbers that are none until they are written."""
    kv = KVCache.zeros(LAYERS, NUM_PAGES, PAGE_SIZE, (K, H), jnp.float32, num_kv_heads=K)
    kv = init_state(SparseAttention(decode=policy), kv, H, num_slots=NUM_SEQS, max_pages=MAX_PAGES)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv)


def sequences(rng):
    return [rng.normal(size=(n, N + 2 * K, H)).astype(np.float32) for _, n in LENGTHS]


def parts(heads):
    return heads[:, :N], heads[:, N : N + K], heads[:, N + K :]


def computed(policy, kv, heads, seed, lengths=LENGTHS):
    """Outputs of all rows and what is kept after them, when steps cut the sequences at random; and the cache."""
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(NUM_PAGES - 1).reshape(NUM_SEQS, MAX_PAGES)
    outs, done, totals = [np.zeros((len(x), N, H)) for x in heads], [0] * NUM_SEQS, [n for _, n in lengths]
    while done != totals:
        decodes = [s for s in range(NUM_SEQS) if lengths[s][0] <= done[s] < totals[s]]
        is_decode = bool(decodes) and rng.random() < 0.5  # else answers' rows are in chunks, as when computed again
        counts = [0] * NUM_SEQS
        for s in decodes if is_decode else rng.permutation(NUM_SEQS).tolist():
            left = min(totals[s] - done[s], ROWS - sum(counts))
            counts[s] = 1 if is_decode else int(rng.integers(0, left + 1))
        places = [(s, done[s] + i) for s in range(NUM_SEQS) for i in range(counts[s])]
        rows = [(s, done[s]) for s in range(NUM_SEQS)] if is_decode else places
        size = NUM_SEQS if is_decode else ROWS
        x = np.zeros((size, N + 2 * K, H), np.float32)
        positions, pages = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for i, (s, p) in enumerate(rows):
            if counts[s]:
                x[i], positions[i], pages[i] = heads[s][p], p, table[s, p // PAGE_SIZE]
        region = AttentionBatch(
            page_table=jnp.asarray(table, jnp.int32),
            kv_lens=jnp.asarray([(done[s] + counts[s]) * (counts[s] > 0) for s in range(NUM_SEQS)], jnp.int32),
            cu_q_lens=None if is_decode else jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
            slots=jnp.arange(NUM_SEQS),
            prompt_lens=jnp.asarray([n for n, _ in lengths], jnp.int32),
        )
        batch = StepBatch(
            token_ids=jnp.zeros(size, jnp.int32),
            positions=jnp.asarray(positions),
            page_ids=jnp.asarray(pages),
            page_offsets=jnp.asarray(positions % PAGE_SIZE),
            decode=region if is_decode else None,
            prefill=None if is_decode else region,
        )
        out, kv = step(policy, kv, jnp.asarray(x), batch)
        for i, (s, p) in enumerate(rows):
            if counts[s]:
                outs[s][p] = out[i]
        done = [n + count for n, count in zip(done, counts, strict=True)]
    mass = np.asarray(kv.mass)[LAYER] if kv.mass is not None else np.zeros((NUM_PAGES, K, PAGE_SIZE))
    kept = [mass[table[s]].transpose(1, 0, 2).reshape(K, -1) > -np.inf for s in range(NUM_SEQS)]
    return outs, [x[:, :n] for x, n in zip(kept, totals, strict=True)], kv


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_heads_keep_what_the_paper_says_however_the_work_is_cut(policy):
    """A second time over pages that others had."""
    rng, kv = np.random.default_rng(1), empty(policy)
    for seed in range(3):
        heads = sequences(rng)
        outs, kept, kv = computed(policy, kv, heads, seed)
        for s, (prompt_len, _) in enumerate(LENGTHS):
            out, stay = expected(policy, *parts(heads[s]), prompt_len)
            np.testing.assert_array_equal(kept[s], stay)
            np.testing.assert_allclose(outs[s], out, rtol=2e-5, atol=2e-5)
    assert np.isnan(np.asarray(kv.mass)[1 - LAYER]).all()  # another layer's is not touched


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        (FAST[0], H2O(heavy=4, recent=3)),
        (FAST[1], SnapKV(budget=9, window=4, kernel_size=1)),
        (FAST[1], SnapKV(budget=9, window=4, kernel_size=3, pooling="maxpool")),
    ],
    ids=str,
)
def test_another_rule_would_be_noticed(policy, other):
    heads = sequences(np.random.default_rng(2))
    outs, kept, _ = computed(policy, empty(policy), heads, 0)
    wrong, stay = expected(other, *parts(heads[0]), LENGTHS[0][0])
    assert not np.array_equal(kept[0], stay)
    assert not np.allclose(outs[0], wrong, rtol=1e-2, atol=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("policy", [H2O(heavy=20, recent=16), SnapKV(budget=30, window=5)], ids=str)
def test_a_full_budget_is_dense(policy):
    heads = sequences(np.random.default_rng(3))
    outs, kept, _ = computed(policy, empty(policy), heads, 1)
    dense, _, _ = computed(None, dataclasses.replace(empty(policy), mass=None), heads, 1)
    assert all(stay.all() for stay in kept)
    for out, truth in zip(outs, dense, strict=True):
        np.testing.assert_allclose(out, truth, rtol=2e-5, atol=2e-5)


def test_of_equal_tokens_the_first_stay():
    heads = sequences(np.random.default_rng(4))
    for x in heads:
        x[:, N : N + K] = 0  # then each row gives all that it sees the same
    _, kept, _ = computed(FAST[1], empty(FAST[1]), heads, 2, tuple((n, n) for n, _ in LENGTHS))
    assert kept[0].shape[1] == 23
    for stay in kept[0]:  # pooling lowers the first token's votes and that of the last before the window
        np.testing.assert_array_equal(np.flatnonzero(stay), [1, 2, 3, 4, 5, 19, 20, 21, 22])
    _, kept, _ = computed(FAST[0], empty(FAST[0]), heads, 2)  # each token has drawn more than those after it
    np.testing.assert_array_equal(np.flatnonzero(kept[0][0]), [0, 1, 2, 32, 33, 34, 35])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(heavy=0), "heavy of H2O must be at least 1, got 0"),
        (lambda: SnapKV(budget=32), "window of SnapKV must be at least 1 and below its budget of 32, got 32"),
        (lambda: SnapKV(kernel_size=4), "kernel_size of SnapKV must be odd, got 4"),
        (lambda: SnapKV(pooling="sum"), "pooling of SnapKV must be 'avgpool' or 'maxpool', got 'sum'"),
        (lambda: SparseAttention(prefill=H2O()), "H2O drops tokens once a prompt is read as a whole, so prefill must"),
        (lambda: SparseAttention(decode=SnapKV(reselect=2)), "SnapKV selects nothing anew: its reselect must be 1"),
    ],
)
def test_fields_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

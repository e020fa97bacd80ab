"""The sampler against a slow numpy reading of the same rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.layers.limits import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_IDS
from jaxserve.layers.sampler import (
    SamplingFeatures,
    _keep_top_k,
    _keep_top_p,
    init_sampling,
    init_sequences,
    sample,
    score,
)
from jaxserve.sharding.mesh import FLAT, make_mesh, on_ranks
from jaxserve.step_programs import update_masks

V = 50
ALL = SamplingFeatures(random=True, edits=True, num_logprobs=5)
GREEDY = SamplingFeatures()


def states(num_slots=4, **fields):
    """Slot states in which slot 1 asks for `fields`; EditState fields are found by name."""
    sequences = init_sequences(num_slots, 2)
    sampling = init_sampling(num_slots, V)
    sampling = dataclasses.replace(sampling, edited=sampling.edited.at[1].set(True))
    sequences = dataclasses.replace(sequences, stopped=sequences.stopped.at[1].set(False))
    for name, value in fields.items():
        owner = sequences if hasattr(sequences, name) else sampling if hasattr(sampling, name) else sampling.edits
        row = getattr(owner, name).at[1].set(jnp.asarray(value, getattr(owner, name).dtype))
        if owner is sequences:
            sequences = dataclasses.replace(sequences, **{name: row})
        elif owner is sampling:
            sampling = dataclasses.replace(sampling, **{name: row})
        else:
            sampling = dataclasses.replace(sampling, edits=dataclasses.replace(sampling.edits, **{name: row}))
    return sequences, sampling


def draw(logits, features=ALL, **fields):
    """The token that slot 1 samples, and the states after it."""
    sequences, sampling = states(**fields)
    sampled, sequences, sampling = sample(
        jnp.asarray(logits, jnp.float32)[None], jnp.array([1]), sequences, sampling, features
    )
    return int(sampled.token_ids[0]), sequences, sampling, sampled


def random_logits(seed=0):
    return np.random.default_rng(seed).normal(size=V).astype(np.float32) * 3


def test_greedy_takes_the_largest_logit():
    logits = random_logits()
    assert draw(logits, GREEDY)[0] == draw(logits, ALL)[0] == int(np.argmax(logits))


@pytest.mark.parametrize(
    ("nan", "features"),
    [
        pytest.param(
            nan, features, id=f"{kind}-{name}", marks=[pytest.mark.full] * (name != "all" and kind == "random")
        )
        for kind, features in (("greedy", GREEDY), ("random", SamplingFeatures(random=True)))
        for name, nan in (("all", slice(None)), ("first", slice(0, 1)), ("last", slice(V - 1, V)))
    ],
)
def test_nan_logits_give_the_last_token_on_any_mesh(nan, features):
    """Each of 4 ranks has 13 of 52 columns, of which the vocabulary lacks the last two."""
    logits = np.pad(random_logits(), (0, -V % 4))
    logits[nan] = np.nan
    mesh = make_mesh(2, 2)
    specs = lambda: ((jax.P(None, FLAT), jax.P(), jax.P(), jax.P()), jax.P())  # noqa: E731
    run = on_ranks(mesh, lambda *arguments: sample(*arguments, features)[0].token_ids, specs)
    token_ids = run(jnp.asarray(logits)[None], jnp.array([1]), *states())
    assert token_ids.tolist() == [draw(logits[:V], features)[0]] == [V - 1]


@given(st.integers(0, 10_000), st.integers(1, V + 5))
@settings(max_examples=40, deadline=None)
def test_top_k_keeps_exactly_the_k_largest(seed, k):
    logits = random_logits(seed)
    kept = np.isfinite(np.asarray(_keep_top_k(jnp.asarray(logits)[None], jnp.array([k]))[0]))
    expected = np.zeros(V, bool)
    expected[np.argsort(-logits)[:k]] = True
    np.testing.assert_array_equal(kept, expected)


@given(st.integers(0, 10_000), st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(seed, p):
    logits = random_logits(seed)
    kept = np.isfinite(np.asarray(_keep_top_p(jnp.asarray(logits)[None], jnp.array([p], jnp.float32))[0]))
    order = np.argsort(-logits)
    probs = np.exp(np.float64(logits) - logits.max())
    mass = np.cumsum(probs[order] / probs.sum())
    count = int(np.argmax(mass >= p)) + 1
    if np.abs(mass - p).min() < 1e-5:  # rounding decides; both are right
        return
    expected = np.zeros(V, bool)
    expected[order[:count]] = True
    np.testing.assert_array_equal(kept, expected)


def test_top_p_of_one_and_top_k_of_zero_keep_everything():
    logits = jnp.asarray(random_logits())[None]
    np.testing.assert_array_equal(_keep_top_p(logits, jnp.array([1.0], jnp.float32)), logits)
    np.testing.assert_array_equal(_keep_top_k(logits, jnp.array([0])), logits)


def frequencies(logits, num_draws=4000, **fields):
    sequences, sampling = states(temperature=1.0, **fields)
    rows = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (num_draws, 1))
    seeds = sampling.seed[jnp.full(num_draws, 1)]
    many = dataclasses.replace(
        jax.tree.map(lambda x: jnp.repeat(x[1:2], num_draws + 1, axis=0), sampling),
        seed=jnp.pad(seeds.at[:, 1].set(jnp.arange(num_draws, dtype=jnp.uint32)), ((0, 1), (0, 0))),
    )
    wide = dataclasses.replace(sequences, **{
        f.name: jnp.repeat(getattr(sequences, f.name)[1:2], num_draws + 1, axis=0)
        for f in dataclasses.fields(sequences)
    })  # fmt: skip
    sampled, _, _ = sample(rows, jnp.arange(num_draws), wide, many, SamplingFeatures(random=True))
    return np.bincount(np.asarray(sampled.token_ids), minlength=V) / num_draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    logits = random_logits(3) * 0.5
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    observed = frequencies(logits / temperature)
    bound = 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3
    assert np.all(np.abs(observed - expected) < bound)
    wrong = np.exp(logits / (temperature * 1.5)) / np.exp(logits / (temperature * 1.5)).sum()
    assert not np.all(np.abs(observed - wrong) < bound)


def test_min_p_drops_what_is_unlikely_beside_the_best():
    logits = np.full(V, -20.0, np.float32)
    logits[:3] = np.log([0.6, 0.31, 0.05])
    observed = frequencies(logits, min_p=0.5)
    assert observed[2] == 0
    assert observed[1] > 0.2
    assert frequencies(logits, min_p=0.01)[2] > 0


def test_temperature_of_the_slot_is_used():
    logits = random_logits(5)
    hot = {draw(logits, temperature=2.0, seed=[0, s])[0] for s in range(30)}
    cold = {draw(logits, temperature=0.01, seed=[0, s])[0] for s in range(30)}
    assert cold == {int(np.argmax(logits))}
    assert len(hot) > 3


def test_noise_depends_on_seed_and_position_only():
    logits = np.zeros(V, np.float32)
    alone = draw(logits, temperature=1.0, seed=[7, 9], positions=12)[0]
    sequences, sampling = states(temperature=1.0, seed=[7, 9], positions=12)
    moved = jax.tree.map(lambda x: x.at[3].set(x[1]), (sequences, sampling))
    sampled, _, _ = sample(jnp.zeros((3, V)), jnp.array([2, 3, 0]), *moved, SamplingFeatures(random=True))
    assert int(sampled.token_ids[1]) == alone
    others = {draw(logits, temperature=1.0, seed=[7, 9], positions=p)[0] for p in range(13, 30)}
    assert len(others) > 5
    assert len({draw(logits, temperature=1.0, seed=[s, 9], positions=12)[0] for s in range(17)}) > 5


def penalised(logits, counts, mask):
    """Repetition 1.7, frequency 0.9 and presence 0.4, from their formulas."""
    logits = np.where((counts > 0) | mask, np.where(logits > 0, logits / 1.7, logits * 1.7), logits)
    return logits - 0.9 * counts - 0.4 * (counts > 0)


def test_penalties_follow_their_formulas_after_the_bias():
    rng = np.random.default_rng(0)
    penalties = {"repetition_penalty": 1.7, "frequency_penalty": 0.9, "presence_penalty": 0.4}
    tokens, expected, without, other_order = [], [], [], []
    for seed in range(40):
        logits, mask = random_logits(seed).astype(np.float64) * 0.3, rng.random(V) < 0.3
        counts = rng.integers(0, 4, V) * (rng.random(V) < 0.5)
        bias = np.where(rng.random(V) < 0.2, rng.normal(size=V), 0.0)
        padding = np.zeros(512 - V)
        row = {"bias_ids": np.r_[np.arange(V), padding + V], "bias": np.r_[bias, padding]}
        tokens.append(draw(logits, counts=counts, prompt_mask=mask, **penalties, **row)[0])
        expected.append(int(np.argmax(penalised(logits + bias, counts, mask))))
        without.append(int(np.argmax(logits + bias)))
        other_order.append(int(np.argmax(penalised(logits, counts, mask) + bias)))
    assert tokens == expected
    assert expected != without
    assert expected != other_order


def test_edits_of_a_slot_that_did_not_ask_for_any_are_ignored():
    logits = random_logits(3)
    row = np.r_[7, np.full(511, V)], np.r_[100.0, np.zeros(511)]
    assert draw(logits, bias_ids=row[0], bias=row[1])[0] == 7
    assert draw(logits, bias_ids=row[0], bias=row[1], edited=False)[0] == int(np.argmax(logits))


def test_counts_and_history_record_the_sampled_token():
    token, _, sampling, _ = draw(random_logits(2))
    assert int(sampling.edits.counts[1, token]) == 1
    assert int(sampling.edits.counts.sum()) == 1
    assert int(sampling.edits.history[1, -1]) == token


def test_only_allowed_tokens_are_sampled():
    allowed = np.zeros(64, bool)
    allowed[[7, 33]] = True
    words = np.packbits(allowed, bitorder="little").view(np.uint32)
    logits = random_logits(4)
    assert draw(logits, allowed=words)[0] == max((7, 33), key=lambda t: logits[t])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_is_forbidden_there_is_none_and_the_row_stops(temperature):
    words = np.zeros(2, np.uint32)
    token, sequences, _, _ = draw(random_logits(4), allowed=words, temperature=temperature)
    assert token == -1
    assert bool(sequences.stopped[1])
    words[1] = 1 << (40 - 32)
    token, sequences, _, _ = draw(random_logits(4), allowed=words, temperature=temperature)
    assert token == 40
    assert not bool(sequences.stopped[1])
    early = {"stop_ids": np.pad([40], (0, MAX_STOP_IDS - 1), constant_values=-1), "min_position": 9}
    assert draw(random_logits(4), allowed=words, temperature=temperature, **early)[0] == -1


def test_new_masks_replace_those_of_their_slots_only():
    _, sampling = states(allowed=np.array([1, 2], np.uint32))
    masks = np.array([[3, 4], [5, 6]], np.uint32)
    updated = update_masks(sampling, np.array([2, 4], np.int32), masks)
    ones = [0xFFFFFFFF] * 2
    np.testing.assert_array_equal(updated.edits.allowed, [ones, [1, 2], [3, 4], ones, [5, 6]])


def bad_words(*words):
    rows = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, np.int32)
    for i, word in enumerate(words):
        rows[i, -len(word) :] = word
    return rows


def test_a_bad_word_is_blocked_only_where_it_would_be_completed():
    logits = random_logits(6)
    best = int(np.argmax(logits))
    history = np.full(MAX_BAD_WORD_LEN - 1, -1)
    assert draw(logits, bad_words=bad_words([best]))[0] != best
    after = np.r_[history[1:], 11]
    assert draw(logits, bad_words=bad_words([11, best]), history=after)[0] != best
    assert draw(logits, bad_words=bad_words([12, best]), history=after)[0] == best
    assert draw(logits, bad_words=bad_words([9, 11, best]), history=after)[0] == best


def test_stop_ids_wait_for_min_tokens():
    logits = random_logits(8)
    best = int(np.argmax(logits))
    stop = np.r_[best, np.full(63, -1)]
    token, sequences, *_ = draw(logits, stop_ids=stop, min_position=10, positions=9)
    assert token != best
    assert not bool(sequences.stopped[1])
    token, sequences, *_ = draw(logits, stop_ids=stop, min_position=10, positions=10)
    assert token == best
    assert bool(sequences.stopped[1])


def test_a_row_of_the_dummy_slot_stays_stopped():
    sequences, sampling = states()
    _, sequences, _ = sample(jnp.zeros((1, V)), jnp.array([4]), sequences, sampling, GREEDY)
    assert bool(sequences.stopped[4])


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(9)
    log_probs = np.log(np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum())
    token, _, _, sampled = draw(logits, temperature=1.5, seed=[1, 2], repetition_penalty=1.3)
    order = np.argsort(-logits)
    np.testing.assert_allclose(sampled.logprob[0], log_probs[token], atol=1e-5)
    assert int(sampled.rank[0]) == int(np.flatnonzero(order == token)[0]) + 1
    np.testing.assert_array_equal(sampled.top_ids[0], order[:5])
    np.testing.assert_allclose(sampled.top_logprobs[0], log_probs[order[:5]], atol=1e-5)


def test_score_gives_the_logprob_of_the_named_token():
    logits = np.stack([random_logits(10), random_logits(11)])
    scored = score(jnp.asarray(logits), jnp.array([3, 4]), 2, logits.shape[1])
    log_probs = logits - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    np.testing.assert_allclose(scored.logprob, log_probs[[0, 1], [3, 4]], atol=1e-5)


def test_a_program_with_more_features_gives_the_same_tokens():
    rng = np.random.default_rng(0)
    for i in range(20):
        logits = rng.normal(size=V).astype(np.float32) * 3
        fields = {"temperature": 0.0 if i % 2 else 0.8, "seed": [0, i], "top_k": 10, "top_p": 0.9}
        assert draw(logits, SamplingFeatures(random=True), **fields)[0] == draw(logits, ALL, **fields)[0]

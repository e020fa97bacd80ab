"""Next tokens from logits, on the device.

How this works: everything that a request asks of its sampling lives in `SamplingState`, one row a slot, written when
the request gets its slot. A step names the slots of its rows; `sample` reads their rows, edits the logits, draws, and
writes back what the next step needs. Noise is keyed by (seed, position), so batch mates, slots and pre-emption change
nothing. A row whose features a program lacks must not be in it; a program with more features than its rows need gives
the same tokens.

On a mesh each rank has the logits of a part of V. A program that can do nothing but take the largest compares the best
of each rank; in others each rank does all of this for its share of the rows, whose logits one all_to_all brings it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.layers.limits import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_BIAS, MAX_STOP_IDS
from jaxserve.sharding.collectives import best_of_ranks, first_of_rank, num_ranks, share_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFeatures:
    """Which parts of the sampler a program holds."""

    random: bool = False  # any row with temperature > 0
    edits: bool = False  # penalties, logit_bias, allowed_token_ids, bad_words, min_tokens, grammars
    num_logprobs: int | None = None  # top logprobs returned a row; None = none at all

    def covers(self, other: "SamplingFeatures") -> bool:
        logprobs = other.num_logprobs is None or self.num_logprobs == other.num_logprobs
        return self.random >= other.random and self.edits >= other.edits and logprobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceState:
    """Where each slot's sequence stands. The last row is a dummy that padding rows use. Z = max_num_seqs + 1."""

    page_table: Array  # i32 [Z, max_pages]
    token_ids: Array  # i32 [Z], the last sampled token
    positions: Array  # i32 [Z], tokens whose KV is written = position of the next query
    prompt_lens: Array  # i32 [Z]; before the sequence's first prefill row, those of the slot's last owner
    stopped: Array  # bool [Z], hit EOS or a stop id; later rows write the null page


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
    """What each slot's request asks of the sampler."""

    temperature: Array  # f32 [Z]
    top_p: Array  # f32 [Z]
    min_p: Array  # f32 [Z]
    presence_penalty: Array  # f32 [Z]
    frequency_penalty: Array  # f32 [Z]
    repetition_penalty: Array  # f32 [Z]
    top_k: Array  # i32 [Z], 0 = off
    seed: Array  # u32 [Z, 2]
    min_position: Array  # i32 [Z], before this position no stop id may be sampled (prompt + min_tokens)
    stop_ids: Array  # i32 [Z, MAX_STOP_IDS], -1 = empty
    edited: Array  # bool [Z], the slot's row of `edits` is its own, not that of an owner before it
    edits: "EditState"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EditState:
    """The rarer wishes, read only by programs with `edits`."""

    bias_ids: Array  # i32 [Z, MAX_BIAS], V = empty (dropped by the scatter)
    bias: Array  # f32 [Z, MAX_BIAS]
    allowed: Array  # u32 [Z, ceil(V / 32)], bit set = may be sampled; under a grammar written anew for each token
    bad_words: Array  # i32 [Z, MAX_BAD_WORDS, MAX_BAD_WORD_LEN], right-aligned, -1 = empty
    history: Array  # i32 [Z, MAX_BAD_WORD_LEN - 1], the last tokens, newest last
    prompt_mask: Array  # bool [Z, V], tokens in the prompt
    counts: Array  # i32 [Z, V], output tokens so far


class Sampled(NamedTuple):
    """One step's draw. The logprob fields are None in a program without them; they are of the raw logits."""

    token_ids: Array  # i32 [R], -1 = every token was forbidden
    logprob: Array | None  # f32 [R], of the sampled token
    rank: Array | None  # i32 [R], 1 = most likely
    top_ids: Array | None  # i32 [R, k]
    top_logprobs: Array | None  # f32 [R, k]


def init_sequences(num_slots: int, max_pages: int) -> SequenceState:
    rows = num_slots + 1
    return SequenceState(
        page_table=jnp.zeros((rows, max_pages), jnp.int32),
        token_ids=jnp.zeros(rows, jnp.int32),
        positions=jnp.zeros(rows, jnp.int32),
        prompt_lens=jnp.zeros(rows, jnp.int32),
        stopped=jnp.ones(rows, bool),
    )


def init_sampling(num_slots: int, vocab_size: int) -> SamplingState:
    rows = num_slots + 1

    def f32(value: float) -> Array:
        return jnp.full(rows, value, jnp.float32)

    return SamplingState(
        temperature=f32(0.0),
        top_p=f32(1.0),
        min_p=f32(0.0),
        presence_penalty=f32(0.0),
        frequency_penalty=f32(0.0),
        repetition_penalty=f32(1.0),
        top_k=jnp.zeros(rows, jnp.int32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        min_position=jnp.zeros(rows, jnp.int32),
        stop_ids=jnp.full((rows, MAX_STOP_IDS), -1, jnp.int32),
        edited=jnp.zeros(rows, bool),
        edits=EditState(
            bias_ids=jnp.full((rows, MAX_BIAS), vocab_size, jnp.int32),
            bias=jnp.zeros((rows, MAX_BIAS), jnp.float32),
            allowed=jnp.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, jnp.uint32),
            bad_words=jnp.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, jnp.int32),
            history=jnp.full((rows, MAX_BAD_WORD_LEN - 1), -1, jnp.int32),
            prompt_mask=jnp.zeros((rows, vocab_size), bool),
            counts=jnp.zeros((rows, vocab_size), jnp.int32),
        ),
    )


def sample(
    logits: Array, slots: Array, sequences: SequenceState, sampling: SamplingState, features: SamplingFeatures
) -> tuple[Sampled, SequenceState, SamplingState]:
    """Draws one token a row and records it in the rows' slots; returns the draw and both states.

    Args:
        logits: f32 [R, V], on a mesh this rank's part of V.
        slots: i32 [R]; rows that do not sample name the dummy slot.
    """
    positions = sequences.positions[slots]
    vocab_size = sampling.edits.counts.shape[1]
    if features == SamplingFeatures():
        sampled = Sampled(_greedy(logits, vocab_size), None, None, None, None)
    else:
        pick = functools.partial(_pick, sampling=sampling, features=features)
        sampled = share_rows(pick, logits, vocab_size, slots, positions)
    token_ids = sampled.token_ids
    is_stop = jnp.any(token_ids[:, None] == sampling.stop_ids[slots], axis=-1)
    is_stop &= positions >= sampling.min_position[slots]
    if features.edits:  # without them a row always has a token left
        is_stop |= token_ids < 0
    sequences = dataclasses.replace(
        sequences,
        token_ids=sequences.token_ids.at[slots].set(token_ids),
        stopped=sequences.stopped.at[slots].set(sequences.stopped[slots] | is_stop),
    )
    if features.edits:
        sampling = dataclasses.replace(sampling, edits=_record(sampling.edits, slots, token_ids))
    return sampled, sequences, sampling


def _greedy(logits: Array, vocab_size: int) -> Array:
    """The first largest entry of each row, the last one of V where a logit is NaN: i32 [R], over all ranks' parts."""
    first, size = first_of_rank(logits.shape[1]), logits.shape[1]
    if size * num_ranks() > vocab_size:
        ids = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
    return best_of_ranks(jnp.max(logits, axis=-1), _argmax(logits) + first, nan_id=vocab_size - 1)


def _pick(
    logits: Array, slots: Array, positions: Array, sampling: SamplingState, features: SamplingFeatures
) -> Sampled:
    """One token a row, -1 where all are forbidden: logits f32 [R, V]."""
    edited = logits
    if features.edits:
        edited = jnp.where(sampling.edited[slots][:, None], _edit(logits, slots, positions, sampling), logits)
    token_ids = _argmax(edited)
    if features.random:
        drawn = _draw(edited, slots, positions, sampling)
        token_ids = jnp.where(sampling.temperature[slots] > 0, drawn, token_ids)
    if features.edits:
        token_ids = jnp.where(jnp.max(edited, axis=-1) == -jnp.inf, -1, token_ids)
    return _with_logprobs(logits, token_ids, features.num_logprobs)


def _argmax(logits: Array) -> Array:
    """The first largest entry of each row, i32 [R]. Two plain reductions: XLA's argmax is 6 times slower on CPU."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    last = logits.shape[1] - 1
    return jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), ids, last), axis=-1)


def score(logits: Array, token_ids: Array, num_logprobs: int, vocab_size: int) -> Sampled:
    """Logprobs of given tokens: logits f32 [R, V], on a mesh this rank's part of V; token_ids i32 [R]."""
    return share_rows(functools.partial(_with_logprobs, k=num_logprobs), logits, vocab_size, token_ids)


def _with_logprobs(logits: Array, token_ids: Array, k: int | None) -> Sampled:
    if k is None:
        return Sampled(token_ids, None, None, None, None)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logits, k)
    return Sampled(token_ids, chosen[:, 0] - log_z, rank, top_ids.astype(jnp.int32), top - log_z[:, None])


def _edit(logits: Array, slots: Array, positions: Array, sampling: SamplingState) -> Array:
    """Bias, then penalties, as in vLLM, then everything that forbids tokens."""
    edits = sampling.edits
    rows = jnp.arange(slots.shape[0])[:, None]
    logits = logits.at[rows, edits.bias_ids[slots]].add(edits.bias[slots], mode="drop")
    counts = edits.counts[slots]
    seen = (counts > 0) | edits.prompt_mask[slots]
    repetition = sampling.repetition_penalty[slots][:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= sampling.frequency_penalty[slots][:, None] * counts.astype(jnp.float32)
    logits -= sampling.presence_penalty[slots][:, None] * (counts > 0).astype(jnp.float32)
    token = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    allowed = (edits.allowed[slots][:, token // 32] >> (token % 32)[None, :]) & 1
    logits = jnp.where(allowed == 1, logits, -jnp.inf)
    logits = logits.at[rows, _forbidden_words(edits, slots, logits.shape[1])].set(-jnp.inf, mode="drop")
    too_early = (positions < sampling.min_position[slots])[:, None]
    stop_ids = sampling.stop_ids[slots]
    return logits.at[rows, jnp.where(too_early & (stop_ids >= 0), stop_ids, logits.shape[1])].set(-jnp.inf, mode="drop")


def _forbidden_words(edits: EditState, slots: Array, nowhere: int) -> Array:
    """i32 [R, MAX_BAD_WORDS]: the last token of each bad word whose other tokens were just generated."""
    words = edits.bad_words[slots]
    history = edits.history[slots][:, None, :]
    head, last = words[..., :-1], words[..., -1]
    matches = jnp.all((head < 0) | (head == history), axis=-1)
    return jnp.where(matches & (last >= 0), last, nowhere)


def _record(edits: EditState, slots: Array, token_ids: Array) -> EditState:
    history = jnp.concatenate([edits.history[slots][:, 1:], token_ids[:, None]], axis=1)
    return dataclasses.replace(
        edits,
        history=edits.history.at[slots].set(history),
        counts=edits.counts.at[slots, token_ids].add(1),
    )


def _draw(logits: Array, slots: Array, positions: Array, sampling: SamplingState) -> Array:
    """One Gumbel-max draw a row, of the distribution that temperature, min-p, top-k and top-p leave."""
    temperature = sampling.temperature[slots][:, None]
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    top = jnp.max(logits, axis=-1, keepdims=True)
    floor = top + jnp.log(sampling.min_p[slots])[:, None]  # p >= min_p * p_max; log 0 = -inf is off
    logits = jnp.where(logits >= floor, logits, -jnp.inf)
    logits = _keep_top_k(logits, sampling.top_k[slots])
    logits = _keep_top_p(logits, sampling.top_p[slots])
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.wrap_key_data(seed), position))(
        sampling.seed[slots], positions
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return _argmax(logits + noise)


def _keep_top_k(logits: Array, top_k: Array) -> Array:
    """Drops what ranks below the k-th largest; ties with it stay. k = 0 keeps all."""
    k = jnp.where(top_k > 0, top_k, logits.shape[1])

    def enough(ordered: Array, threshold: Array) -> Array:
        return jnp.sum(ordered >= threshold, axis=-1) >= k

    return _keep_above_largest_threshold(logits, enough)


def _keep_top_p(logits: Array, top_p: Array) -> Array:
    """Keeps the most likely tokens up to the one at which their mass reaches p; ties with that one stay."""
    probs = jax.nn.softmax(logits, axis=-1)

    def enough(ordered: Array, threshold: Array) -> Array:
        return jnp.sum(jnp.where(ordered >= threshold, probs, 0.0), axis=-1) >= jnp.minimum(top_p, 1.0 - 1e-6)

    kept = _keep_above_largest_threshold(logits, enough)
    return jnp.where((top_p < 1.0)[:, None], kept, logits)


def _keep_above_largest_threshold(logits: Array, enough) -> Array:
    """Keeps logits >= t for the largest t for which `enough(ordered, t)` holds, found by bisection over float bits.

    `ordered` maps floats to unsigned integers in the same order, so 32 halvings find t exactly, without a sort.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def halve(i: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(ordered, candidate[:, None]), candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, halve, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(ordered >= threshold[:, None], logits, -jnp.inf)

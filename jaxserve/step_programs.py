"""The device's side of a step: pure functions from (params, state, flat host arrays) to (results, state).

All are jitted here, once for the process: engines of the same model and shapes share traces. On a mesh those that take
the model run on every rank, with its part of the parameters and of the cache; all else every rank has.

Shapes: B decode rows, T packed prefill tokens of at most S sequences, R rows that may sample (B decode rows, then the
last row of each prefill sequence, then padding). Padding rows name the dummy slot, the last row of every slot array.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.layers.decoder import forward
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch
from jaxserve.layers.sampler import EditState, Sampled, SamplingFeatures, SamplingState, SequenceState, sample, score
from jaxserve.models.base import Model
from jaxserve.sharding.collectives import all_reduce
from jaxserve.sharding.kv_parallel import own_page
from jaxserve.sharding.mesh import EVERYWHERE, on_ranks
from jaxserve.sharding.rules import kv_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """The key of a forward program."""

    decode_rows: int  # B
    prefill_tokens: int  # T
    prefill_seqs: int  # S
    span: tuple[int, int] | None = None  # layers that the prefill rows pass, [lo, hi); None = all
    completes: bool = True  # the last layer is among them: prefill rows may sample

    def covers(self, other: "StepShape") -> bool:
        if self.span != other.span or self.decode_rows < other.decode_rows:
            return False
        if self.span is not None:  # the frontier has so many rows, and keeps them
            return (self.prefill_tokens, self.prefill_seqs) == (other.prefill_tokens, other.prefill_seqs)
        return self.prefill_tokens >= other.prefill_tokens and self.prefill_seqs >= other.prefill_seqs

    @property
    def cost(self) -> int:
        return self.decode_rows + self.prefill_tokens

    @property
    def starts_above(self) -> bool:
        """Whether the prefill rows start above layer 0, from a frontier."""
        return self.span is not None and self.span[0] > 0

    @property
    def may_sample(self) -> bool:
        return self.decode_rows > 0 or self.completes

    @property
    def sample_rows(self) -> int:
        """R: a power of two, so that few sample programs serve all shapes."""
        rows = self.decode_rows + (self.prefill_seqs if self.completes else 0)
        return 1 << max(0, rows - 1).bit_length()

    @property
    def num_ints(self) -> int:
        return self.decode_rows + self.prefill_tokens + 4 * self.prefill_seqs + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleShape:
    """The key of a sample program."""

    rows: int
    features: SamplingFeatures

    def covers(self, other: "SampleShape") -> bool:
        return self.rows == other.rows and self.features.covers(other.features)

    @property
    def cost(self) -> int:
        features = self.features
        return features.random + 2 * features.edits + (features.num_logprobs is not None)


@functools.partial(jax.jit, static_argnums=0, static_argnames="shape", donate_argnums=(2, 3, 5))
def forward_step(
    model: Model,
    params: dict,
    kv: dict[str, KVCache],
    sequences: SequenceState,
    ints: Array,
    frontier: Array | None = None,
    *,
    shape: StepShape,
) -> tuple[Array, Array, Array | None, dict[str, KVCache], SequenceState]:
    """Runs one step's rows through the layers.

    Args:
        kv, sequences, frontier: donated.
        ints: i32 [shape.num_ints]: decode slots [B], prefill token ids [T], prefill slots [S], start positions [S],
            cu_q_lens [S+1], lengths of the prompts [S].
        frontier: where the prefill rows stand before a span that starts above layer 0, [T, D].

    Returns:
        hidden of the rows that may sample [R, D]; hidden of the prefill rows, or their frontier where their span ends
        below the last layer, [T, D]; how many experts all layers have read, i32 [], None for a dense model; kv;
        sequences.
    """

    def specs() -> tuple:
        caches = kv_specs(kv)
        ins = (model.param_specs(params), caches, EVERYWHERE, EVERYWHERE, EVERYWHERE)
        return ins, (EVERYWHERE, EVERYWHERE, EVERYWHERE, caches, EVERYWHERE)

    run = functools.partial(_forward_on_rank, model, shape)
    return on_ranks(model.mesh, run, specs)(params, kv, sequences, ints, frontier)


def _forward_on_rank(
    model: Model,
    shape: StepShape,
    params: dict,
    kv: dict[str, KVCache],
    sequences: SequenceState,
    ints: Array,
    frontier: Array | None,
) -> tuple[Array, Array, Array | None, dict[str, KVCache], SequenceState]:
    b, t, s = shape.decode_rows, shape.prefill_tokens, shape.prefill_seqs
    cuts = [b, b + t, b + t + s, b + t + 2 * s, b + t + 3 * s + 1]
    decode_slots, token_ids, slots, starts, cu_q_lens, prompt_lens = jnp.split(ints, cuts)
    ends = starts + cu_q_lens[1:] - cu_q_lens[:-1]
    live = ~sequences.stopped[decode_slots]
    regions = []
    if b:
        decode, rows = _decode_region(sequences, decode_slots, live)
        regions.append(rows)
    if t:
        prefill, rows = _prefill_region(sequences, slots, starts, cu_q_lens, ends, prompt_lens, token_ids)
        regions.append(rows)
    _, num_pages, page_size, *_ = next(iter(kv.values())).k.shape
    tables, positions, valid, tokens = (jnp.concatenate(parts) for parts in zip(*regions, strict=True))
    page = sequences.page_table[tables, jnp.minimum(positions // page_size, sequences.page_table.shape[1] - 1)]
    batch = StepBatch(
        token_ids=tokens,
        positions=positions,
        page_ids=own_page(jnp.where(valid, page, 0), num_pages),
        page_offsets=positions % page_size,
        decode=decode if b else None,
        prefill=prefill if t else None,
    )
    hidden, kv, experts_read = forward(model, params, kv, batch, span=shape.span, frontier=frontier)
    experts_read = None if experts_read is None else all_reduce(experts_read)  # each rank counts its own
    advanced = sequences.positions.at[decode_slots].add(live.astype(jnp.int32)).at[slots].set(ends)
    prompt_lens = sequences.prompt_lens.at[slots].set(prompt_lens)
    sequences = dataclasses.replace(sequences, positions=advanced, prompt_lens=prompt_lens)
    last_rows = jnp.arange(b)
    if shape.completes:
        last_rows = jnp.concatenate([last_rows, b + jnp.maximum(cu_q_lens[1:] - 1, 0)])
    last_rows = jnp.pad(last_rows, (0, shape.sample_rows - last_rows.shape[0]))
    return hidden[last_rows], hidden[b:], experts_read, kv, sequences


def _decode_region(sequences: SequenceState, slots: Array, live: Array) -> tuple[AttentionBatch, tuple]:
    positions = sequences.positions[slots]
    batch = AttentionBatch(
        page_table=sequences.page_table[slots],
        kv_lens=jnp.where(live, positions + 1, 0),
        slots=slots,
        prompt_lens=sequences.prompt_lens[slots],
    )
    return batch, (slots, positions, live, sequences.token_ids[slots])


def _prefill_region(
    sequences: SequenceState,
    slots: Array,
    starts: Array,
    cu_q_lens: Array,
    ends: Array,
    prompt_lens: Array,
    token_ids: Array,
) -> tuple[AttentionBatch, tuple]:
    row = jnp.arange(token_ids.shape[0])
    seq = jnp.minimum(jnp.searchsorted(cu_q_lens, row, side="right") - 1, slots.shape[0] - 1)
    valid = row < cu_q_lens[-1]
    positions = jnp.where(valid, starts[seq] + row - cu_q_lens[seq], 0)
    batch = AttentionBatch(
        page_table=sequences.page_table[slots],
        kv_lens=jnp.where(ends > starts, ends, 0),
        cu_q_lens=cu_q_lens,
        slots=slots,
        prompt_lens=prompt_lens,
    )
    return batch, (slots[seq], positions, valid, token_ids)


@functools.partial(jax.jit, static_argnums=0, static_argnames="features", donate_argnums=(4, 5))
def sample_step(
    model: Model,
    head: dict,
    hidden: Array,
    slots: Array,
    sequences: SequenceState,
    sampling: SamplingState,
    *,
    features: SamplingFeatures,
) -> tuple[Sampled, SequenceState, SamplingState]:
    """Logits of hidden [R, D] and one draw a row; slots i32 [R] (dummy = does not sample). Donates the two states."""

    def run(head: dict, hidden: Array, slots: Array, sequences: SequenceState, sampling: SamplingState) -> tuple:
        return sample(model.logits(head, hidden), slots, sequences, sampling, features)

    def specs() -> tuple:
        return (model.param_specs(head), *[EVERYWHERE] * 4), EVERYWHERE

    return on_ranks(model.mesh, run, specs)(head, hidden, slots, sequences, sampling)


@functools.partial(jax.jit, static_argnums=0, static_argnames="num_logprobs")
def score_step(model: Model, head: dict, hidden: Array, token_ids: Array, *, num_logprobs: int) -> Sampled:
    """Logprobs of the given next tokens i32 [T] after hidden [T, D], 64 rows at a time to bound the logits' memory."""
    rows = min(64, hidden.shape[0])
    vocab_size = model.config.vocab_size

    def run(head: dict, hidden: Array, token_ids: Array) -> Sampled:
        blocks = (hidden.reshape(-1, rows, hidden.shape[1]), token_ids.reshape(-1, rows))
        scored = jax.lax.map(lambda b: score(model.logits(head, b[0]), b[1], num_logprobs, vocab_size), blocks)
        return jax.tree.map(lambda x: x.reshape(hidden.shape[0], *x.shape[2:]), scored)

    def specs() -> tuple:
        return (model.param_specs(head), EVERYWHERE, EVERYWHERE), EVERYWHERE

    return on_ranks(model.mesh, run, specs)(head, hidden, token_ids)


@functools.partial(jax.jit, donate_argnums=0)
def update_tables(sequences: SequenceState, updates: Array) -> SequenceState:
    """`page_table[slot, index] = page` for updates i32 [U, 3] = (slot, index, page). Donates sequences."""
    slot, index, page = updates.T
    return dataclasses.replace(sequences, page_table=sequences.page_table.at[slot, index].set(page))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def start_slots(
    sequences: SequenceState, sampling: SamplingState, ints: Array, floats: Array
) -> tuple[SequenceState, SamplingState]:
    """Writes what new requests ask of the sampler. Donates both states.

    Args:
        ints: i32 [n, 5 + MAX_STOP_IDS]: slot, top_k, seed (two words), min_position, stop ids.
        floats: f32 [n, 6]: temperature, top_p, min_p, presence, frequency, repetition penalty.
    """
    slot = ints[:, 0]
    seed = jax.lax.bitcast_convert_type(ints[:, 2:4], jnp.uint32)
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    written = {name: getattr(sampling, name).at[slot].set(floats[:, i]) for i, name in enumerate(names)}
    sampling = dataclasses.replace(
        sampling,
        **written,
        top_k=sampling.top_k.at[slot].set(ints[:, 1]),
        seed=sampling.seed.at[slot].set(seed),
        min_position=sampling.min_position.at[slot].set(ints[:, 4]),
        stop_ids=sampling.stop_ids.at[slot].set(ints[:, 5:]),
        edited=sampling.edited.at[slot].set(False),
    )
    dummy = sequences.stopped.shape[0] - 1
    return dataclasses.replace(sequences, stopped=sequences.stopped.at[slot].set(slot == dummy)), sampling


@functools.partial(jax.jit, donate_argnums=0)
def start_edits(sampling: SamplingState, slot: Array, row: EditState) -> SamplingState:
    """Writes one slot's rarer wishes: `row` holds one row of each field. Donates sampling."""
    edits = jax.tree.map(lambda all_rows, new: all_rows.at[slot].set(new), sampling.edits, row)
    return dataclasses.replace(sampling, edits=edits, edited=sampling.edited.at[slot].set(True))


@functools.partial(jax.jit, donate_argnums=0)
def update_masks(sampling: SamplingState, slots: Array, masks: Array) -> SamplingState:
    """What grammars allow next: masks u32 [n, ceil(V / 32)] for slots i32 [n]. Donates sampling."""
    edits = dataclasses.replace(sampling.edits, allowed=sampling.edits.allowed.at[slots].set(masks))
    return dataclasses.replace(sampling, edits=edits)

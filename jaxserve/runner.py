"""Turns plans into device work and owns everything on the device: params, KV cache, slot state, programs.

How this works: `dispatch` packs a plan into one flat int32 array and runs a forward program whose shape covers it;
`sample` runs a sample program over its rows. Both return at once; the tokens are on their way to the host. They are
two, so that rows under a grammar may learn in between which tokens it allows. All state is donated from program to
program, so the device runs steps in the order of their dispatch and never copies the cache.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve import compile_process
from jaxserve.config import RunnerConfig, prefill_seqs
from jaxserve.core_types import CoreRequest
from jaxserve.executables import compiled
from jaxserve.layers.kv_cache import KVCache, init_kv_cache
from jaxserve.layers.limits import MAX_STOP_IDS
from jaxserve.layers.sampler import Sampled, SamplingFeatures, init_sampling, init_sequences
from jaxserve.models.base import Model
from jaxserve.programs import Compiler, Programs
from jaxserve.scheduler.plan import Cohort, StepPlan
from jaxserve.scheduler.request import Request
from jaxserve.sharding.mesh import on_ranks, replicated
from jaxserve.sharding.rules import kv_specs
from jaxserve.slots import EDITS, LOGPROBS, RANDOM, edit_row, feature_flags, fill_slot_row
from jaxserve.step_future import StepFuture
from jaxserve.step_programs import (
    SampleShape,
    StepShape,
    forward_step,
    sample_step,
    score_step,
    start_edits,
    start_slots,
    update_masks,
    update_tables,
)

logger = logging.getLogger(__name__)

# A program for CPU takes some 30 memory maps a layer, also for layers that only decode rows pass, and there are up to
# three programs of a span; Linux gives a process 65,530
MAX_LAYERS_OF_SPANS = 480
# JAX keeps what it compiled, and its memory maps, by function and for as long as the process lives
STEPS = (forward_step, sample_step, score_step, update_tables, start_slots, start_edits, update_masks)
SLOTS_A_CALL = 8
UPDATES_A_CALL = (16, 128, 1024)
MASKS_A_CALL = (8, 64)


class Runner:
    """The only owner of device state and the only caller of compiled programs."""

    def __init__(
        self, model: Model, params: dict, config: RunnerConfig, *, kv_dtype: jnp.dtype, num_compile_threads: int = 1
    ):
        self._model, self._params, self.config = model, params, config
        self._head = {name: leaf for name, leaf in params.items() if name != "layers"}
        self.kv = _empty_cache(model, config, kv_dtype)
        self._everywhere = replicated(model.mesh)
        self._sequences = jax.device_put(init_sequences(config.max_num_seqs, config.max_pages), self._everywhere)
        self._sampling = jax.device_put(init_sampling(config.max_num_seqs, model.config.vocab_size), self._everywhere)
        self._flags = np.zeros(config.max_num_seqs + 1, np.uint8)
        self._dummy = config.max_num_seqs
        self._spans: set[StepShape] = set()  # asked for
        self._max_spans = MAX_LAYERS_OF_SPANS // model.config.num_layers if jax.default_backend() == "cpu" else 4096
        self._frontiers: dict[Cohort, Array] = {}  # where the rows of each cohort in flight stand, [T, D]
        self.shapes = default_shapes(config)
        self._compiler = Compiler(num_compile_threads, compile_process.compiler)
        self._abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (self._params, self._head, self.kv, self._sequences, self._sampling),
        )
        programs = functools.partial(Programs, compiler=self._compiler, compiled=compiled)
        self._forward = programs("forward", self._build_forward)
        self._sample = programs("sample", self._build_sample)
        self._score = programs("score", self._build_score)
        self._update_tables = programs("update_tables", self._build_update_tables)
        self._start_slots = programs("start_slots", self._build_start_slots)
        self._start_edits = programs("start_edits", self._build_start_edits)
        self._update_masks = programs("update_masks", self._build_update_masks)
        self._warm_up_jobs: list[concurrent.futures.Future] = []

    # Steps

    def dispatch(self, plan: StepPlan) -> StepFuture:
        """Starts to compute one step and returns without waiting for the device. `sample` must follow."""
        for request in plan.new_slots:
            assert isinstance(request.sampling, CoreRequest)
        self._write_slots(plan.new_slots)
        self._write_tables(plan)
        shape, forward = self._forward.get(self.shape_of(plan))
        arguments = (self._params, self.kv, self._sequences, self._pack(plan, shape))
        cohort = plan.cohort
        if cohort is not None and shape.starts_above:
            arguments += (self._frontiers.pop(cohort),)
        hidden, prefill_hidden, experts_read, self.kv, self._sequences = forward(*arguments)
        if experts_read is not None:
            experts_read.copy_to_host_async()
        if self._frontiers:
            self._frontiers = {other: rows for other, rows in self._frontiers.items() if other.live()}
        if cohort is not None and not plan.completes:
            self._frontiers[cohort] = prefill_hidden
        scored = self._score_prompts(plan, prefill_hidden)
        return StepFuture(plan, shape, hidden, scored, experts_read)

    def sample(self, future: StepFuture, slots: Sequence[int] = (), masks: np.ndarray | None = None) -> None:
        """Starts to draw the tokens of the step dispatched last, and returns without waiting for the device.

        Args:
            masks: u32 [n, ceil(V / 32)], the tokens that may be drawn for each of `slots`, instead of those before.
        """
        if masks is not None:
            self._write_masks(slots, masks)
        hidden, future.hidden = future.hidden, None
        assert hidden is not None, "the step was sampled before"
        future.sampled = self._dispatch_sample(future, hidden)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The cheapest shape of the default set that holds the plan; with a span, the one that its cohort keeps to."""
        num_decodes = len(plan.decode)
        if plan.cohort is None:
            wanted = StepShape(decode_rows=num_decodes, prefill_tokens=0, prefill_seqs=0)
        else:
            num_seqs = len(plan.cohort.members)
            wanted = StepShape(decode_rows=num_decodes, prefill_tokens=plan.cohort.num_rows, prefill_seqs=num_seqs)
        if plan.span is None:
            return self._covering(wanted)
        rows = next(rows for rows in self.config.mixed_decode_rows if rows >= num_decodes)
        (shape,) = self._span_shapes(wanted.prefill_tokens, wanted.prefill_seqs, [plan.span])
        return dataclasses.replace(shape, decode_rows=rows)

    def _covering(self, wanted: StepShape) -> StepShape:
        return next(shape for shape in self.shapes if shape.covers(wanted))

    def span_rows(self, num_tokens: int, num_seqs: int, spans: Sequence[tuple[int, int]]) -> int | None:
        """The prefill rows of the programs that take so many prompt tokens through these spans.

        None, while they are not all ready for any number of decode rows: then they are on their way, unless there are
        too many. Without warm-up programs are never ready before a step needs them, and this waits for none.
        """
        keys = self._span_shapes(num_tokens, num_seqs, spans)
        if len(self._spans.union(keys)) > self._max_spans:
            return None
        self._spans.update(keys)
        if self._warm_up_jobs and not all(map(self._forward.is_ready, keys)):
            self._forward.request(keys)
            return None
        return keys[0].prefill_tokens

    def _span_shapes(self, num_tokens: int, num_seqs: int, spans: Sequence[tuple[int, int]]) -> list[StepShape]:
        """Those that serve beside any number of decode rows."""
        whole = self._covering(
            StepShape(decode_rows=self.config.max_num_seqs, prefill_tokens=num_tokens, prefill_seqs=num_seqs)
        )
        return [dataclasses.replace(whole, span=span, completes=span[1] == self.num_layers) for span in spans]

    def _pack(self, plan: StepPlan, shape: StepShape) -> np.ndarray:
        """The plan as `forward_step`'s flat array."""
        b, t, s = shape.decode_rows, shape.prefill_tokens, shape.prefill_seqs
        ints = np.zeros(shape.num_ints, np.int32)
        ints[: len(plan.decode)] = decode_slots(plan)
        ints[len(plan.decode) : b] = self._dummy
        seq_slots, starts, cu_q_lens = np.split(ints[b + t :], [s, 2 * s])
        seq_slots[:] = self._dummy
        if plan.cohort is not None:
            counts = [count for *_, count in plan.cohort.members]
            cu_q_lens[1 : len(counts) + 1] = np.cumsum(counts)
            cu_q_lens[len(counts) + 1 :] = plan.cohort.num_tokens
        for row, (place, begin) in zip(plan.prefill, plan.places(), strict=True):
            if not shape.starts_above:  # else the rows are in the frontier; and long prompts take long to copy
                ints[b + begin : b + begin + len(row.token_ids)] = row.token_ids
            seq_slots[place], starts[place] = row.slot, row.start
        return ints

    def _dispatch_sample(self, future: StepFuture, hidden: Array) -> Sampled | None:
        plan, shape = future.plan, future.shape
        if not plan.decode and not any(row.samples for row in plan.prefill):
            return None
        rows = np.full(shape.sample_rows, self._dummy, np.int32)
        rows[: len(plan.decode)] = decode_slots(plan)
        for row, (place, _) in zip(plan.prefill, plan.places(), strict=True):
            if row.samples:
                rows[shape.decode_rows + place] = row.slot
        flags = int(np.bitwise_or.reduce(self._flags[rows]))
        features = SamplingFeatures(
            random=bool(flags & RANDOM),
            edits=bool(flags & EDITS),
            num_logprobs=self.config.max_logprobs if flags & LOGPROBS else None,
        )
        _, program = self._sample.get(SampleShape(rows=shape.sample_rows, features=features))
        sampled, self._sequences, self._sampling = program(self._head, hidden, rows, self._sequences, self._sampling)
        for field in sampled:
            if field is not None:
                field.copy_to_host_async()
        return sampled

    def _score_prompts(self, plan: StepPlan, hidden: Array) -> Sampled | None:
        if not plan.completes or all(row.request.sampling.params.prompt_logprobs is None for row in plan.prefill):
            return None
        targets = np.zeros(hidden.shape[0], np.int32)
        for row, (_, offset) in zip(plan.prefill, plan.places(), strict=True):
            prompt = row.request.prompt_token_ids
            following = prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]
            targets[offset : offset + len(following)] = following
        key, program = self._score.get(Rows(next(t for t in self.config.prefill_tokens if t >= hidden.shape[0])))
        missing = key.count - hidden.shape[0]  # where only a larger program is ready
        return program(self._head, jnp.pad(hidden, ((0, missing), (0, 0))), np.pad(targets, (0, missing)))

    # Slot state

    def _write_slots(self, requests: list[Request]) -> None:
        for first in range(0, len(requests), SLOTS_A_CALL):
            some = requests[first : first + SLOTS_A_CALL]
            ints = np.full((SLOTS_A_CALL, 5 + MAX_STOP_IDS), -1, np.int32)
            ints[:, 0] = self._dummy
            floats = np.zeros((SLOTS_A_CALL, 6), np.float32)
            for i, request in enumerate(some):
                fill_slot_row(ints[i], floats[i], request)
                self._flags[request.slot] = feature_flags(request)
            _, program = self._start_slots.get(Rows(SLOTS_A_CALL))
            self._sequences, self._sampling = program(self._sequences, self._sampling, ints, floats)
            for request in some:
                if self._flags[request.slot] & EDITS:
                    row = edit_row(request, self._model.config.vocab_size)
                    _, program = self._start_edits.get(Rows(1))
                    self._sampling = program(self._sampling, np.int32(request.slot), row)

    def _write_tables(self, plan: StepPlan) -> None:
        updates = plan.page_updates
        while updates:
            size = next((n for n in UPDATES_A_CALL if n >= len(updates)), UPDATES_A_CALL[-1])
            key, program = self._update_tables.get(Rows(size))
            now, updates = updates[:size], updates[size:]
            rows = np.zeros((key.count, 3), np.int32)
            rows[:, 0] = self._dummy
            rows[: len(now)] = np.asarray(now)
            self._sequences = program(self._sequences, rows)

    def _write_masks(self, slots: Sequence[int], masks: np.ndarray) -> None:
        while len(slots):
            size = next((n for n in MASKS_A_CALL if n >= len(slots)), MASKS_A_CALL[-1])
            key, program = self._update_masks.get(Rows(size))
            rows, allowed = np.full(key.count, self._dummy, np.int32), np.zeros((key.count, masks.shape[1]), np.uint32)
            now = len(slots[:size])
            rows[:now], allowed[:now] = slots[:size], masks[:size]
            self._sampling = program(self._sampling, rows, allowed)
            slots, masks = slots[size:], masks[size:]

    # Programs

    def warm_up(self, *, block: bool) -> None:
        """Compiles the default programs, in the background unless `block`; later waits count as stalls.

        Greedy rows are served by programs that can also draw. Their own, which are faster, are compiled when the first
        such row comes; whoever blocks has them too.
        """
        rows = sorted({shape.sample_rows for shape in self.shapes})
        every = SamplingFeatures(random=True, edits=True, num_logprobs=self.config.max_logprobs)
        kinds = (SamplingFeatures(random=True), every, *((SamplingFeatures(),) if block else ()))
        samples = [SampleShape(rows=r, features=f) for f in kinds for r in rows]
        start = time.monotonic()
        self._warm_up_jobs = [
            *self._start_slots.request([Rows(SLOTS_A_CALL)]),
            *self._update_tables.request(map(Rows, UPDATES_A_CALL)),
            *self._forward.request(self.shapes),
            *self._sample.request(samples),
            *self._start_edits.request([Rows(1)]),
            *self._update_masks.request(map(Rows, MASKS_A_CALL)),
            *self._score.request([Rows(self.config.prefill_tokens[-1])]),  # stands in for the smaller ones
        ]

        def finished(_: object) -> None:
            if all(job.done() for job in self._warm_up_jobs) and not self._forward.warm:
                for table in self._tables:
                    table.warm = True
                logger.info("%d programs ready in %.1f s", len(self._warm_up_jobs), time.monotonic() - start)

        for job in self._warm_up_jobs:
            job.add_done_callback(finished)
        if block:
            concurrent.futures.wait(self._warm_up_jobs)
            for job in self._warm_up_jobs:
                job.result()

    def compile_spans(self, cohorts: Iterable[tuple[int, Sequence[tuple[int, int]]]], *, block: bool) -> None:
        """Compiles what cohorts of so many tokens need for these spans, in the background unless `block`."""
        for num_tokens, spans in cohorts:
            self.span_rows(num_tokens, 1, spans)
        if block:
            rows = self.config.mixed_decode_rows
            keys = [dataclasses.replace(shape, decode_rows=b) for shape in self._spans for b in rows]
            for job in self._forward.request(keys):
                job.result()
            for shape in keys:
                self._try(shape)  # the first run of a program takes longer

    def time_steps(self) -> list[tuple[StepShape, float]]:
        """Seconds of a step in each program of `shapes`, sampling included; before the first request."""
        return [(shape, min(self._try(shape) for _ in range(3))) for shape in self.shapes]

    def _try(self, shape: StepShape) -> float:
        """Seconds of a step in this program, sampling included; before the first request.

        Decode rows are padding, which reads no keys and values and picks no experts; prompts are made up and belong to
        the dummy slot.
        """
        ints = np.full(shape.num_ints, self._dummy, np.int32)
        b, t, s = shape.decode_rows, shape.prefill_tokens, shape.prefill_seqs
        ints[b : b + t] = np.random.default_rng(0).integers(0, self.vocab_size, t)
        ints[b + t + s :] = 0
        ints[b + t + 2 * s :] = np.arange(s + 1) * (t // max(s, 1))
        _, forward = self._forward.get(shape)
        _, draw = self._sample.get(SampleShape(rows=shape.sample_rows, features=SamplingFeatures(random=True)))
        rows = np.full(shape.sample_rows, self._dummy, np.int32)
        arguments = (self._params, self.kv, self._sequences, ints)
        if shape.starts_above:
            frontier = self._hidden(t)
            arguments += (jnp.zeros(frontier.shape, frontier.dtype),)
        start = time.perf_counter()
        hidden, _, _, self.kv, self._sequences = forward(*arguments)
        sampled, self._sequences, self._sampling = draw(self._head, hidden, rows, self._sequences, self._sampling)
        jax.block_until_ready(sampled.token_ids)
        return time.perf_counter() - start

    def wait_for_programs(self) -> None:
        """Returns when all programs that steps asked for are ready. Before that, larger ones may stand in for them."""
        concurrent.futures.wait([job for table in self._tables for job in table.requested])

    @property
    def num_stalls(self) -> int:
        """Steps that waited for a compile after warm-up."""
        return sum(table.num_stalls for table in self._tables)

    @property
    def compile_s(self) -> float:
        return sum(table.compile_s for table in self._tables)

    @property
    def _tables(self) -> tuple[Programs, ...]:
        return (
            self._forward, self._sample, self._score, self._update_tables, self._start_slots, self._start_edits,
            self._update_masks,
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def expert_bytes(self) -> int:
        """Of the weights of one expert of one layer; 0 for a dense model."""
        config = self._model.config
        if not config.num_experts:
            return 0
        layers = self._params["layers"]
        layers = layers.values() if isinstance(layers, dict) else layers
        experts = [(layer["gate_up"], layer["down"]) for layer in layers]
        num_experts = jax.tree.leaves(experts)[0].shape[-3]  # a multiple of the ranks
        return sum(leaf.nbytes for leaf in jax.tree.leaves(experts)) // (config.num_layers * num_experts)

    @property
    def num_layers(self) -> int:
        return self._model.config.num_layers

    def close(self) -> None:
        """Ends compiles and lets go of weights, cache and programs: another engine may need the memory."""
        self._compiler.close()
        self._params, self._head, self.kv, self._frontiers = {}, {}, {}, {}
        for state in jax.tree.leaves((self._sequences, self._sampling)):
            state.delete()
        for table in self._tables:
            table.clear()
        for step in STEPS:  # for other engines this means to trace again
            step.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    def _build_forward(self, shape: StepShape, compiled: Any) -> Callable:
        params, _, kv, sequences, _ = self._abstract
        arguments = (params, kv, sequences, int32(shape.num_ints))
        if shape.starts_above:
            arguments += (self._hidden(shape.prefill_tokens),)
        return compiled(forward_step, self._model, *arguments, shape=shape)

    def _build_sample(self, shape: SampleShape, compiled: Any) -> Callable:
        _, head, _, sequences, sampling = self._abstract
        arguments = (head, self._hidden(shape.rows), int32(shape.rows), sequences, sampling)
        return compiled(sample_step, self._model, *arguments, features=shape.features)

    def _build_score(self, rows: "Rows", compiled: Any) -> Callable:
        arguments = (self._abstract[1], self._hidden(rows.count), int32(rows.count))
        return compiled(score_step, self._model, *arguments, num_logprobs=self.config.max_logprobs)

    def _build_update_tables(self, rows: "Rows", compiled: Any) -> Callable:
        return compiled(update_tables, self._abstract[3], int32(rows.count, 3))

    def _build_start_slots(self, rows: "Rows", compiled: Any) -> Callable:
        *_, sequences, sampling = self._abstract
        floats = jax.ShapeDtypeStruct((rows.count, 6), jnp.float32)
        return compiled(start_slots, sequences, sampling, int32(rows.count, 5 + MAX_STOP_IDS), floats)

    def _build_start_edits(self, _: "Rows", compiled: Any) -> Callable:
        sampling = self._abstract[4]
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sampling.edits)
        return compiled(start_edits, sampling, int32(), row)

    def _build_update_masks(self, rows: "Rows", compiled: Any) -> Callable:
        sampling = self._abstract[4]
        masks = jax.ShapeDtypeStruct((rows.count, sampling.edits.allowed.shape[1]), jnp.uint32)
        return compiled(update_masks, sampling, int32(rows.count), masks)

    def _hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        shape, dtype = (rows, self._model.config.hidden_size), self._head["final_norm"].dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._everywhere)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The key of a program that only a number of rows tells apart."""

    count: int

    def covers(self, other: "Rows") -> bool:
        return self.count >= other.count

    @property
    def cost(self) -> int:
        return self.count


def _empty_cache(model: Model, config: RunnerConfig, dtype: jnp.dtype) -> dict[str, KVCache]:
    """Made where it stays: each rank has its share of the pages, and its heads of them."""
    num_pages = config.num_pages // config.kv_parallel_size

    def make() -> dict[str, KVCache]:
        return init_kv_cache(model.config, num_pages=num_pages, page_size=config.page_size, dtype=dtype)

    return on_ranks(model.mesh, make, lambda: ((), kv_specs(jax.eval_shape(make))))()


def default_shapes(config: RunnerConfig) -> list[StepShape]:
    """Decode-only and mixed shapes that cover whatever a plan may hold, cheapest first."""
    rows = [config.min_decode_rows]
    while rows[-1] < config.max_num_seqs:
        rows.append(2 * rows[-1])
    shapes = [(b, 0) for b in rows] + [(b, t) for t in config.prefill_tokens[:-1] for b in config.mixed_decode_rows]
    whole = config.prefill_tokens[-1]
    for b in sorted({*config.mixed_decode_rows, *config.padded_decode_rows}):
        shapes.append((b, whole - b if b in config.padded_decode_rows else whole))
    found = [StepShape(decode_rows=b, prefill_tokens=t, prefill_seqs=prefill_seqs(t) if t else 0) for b, t in shapes]
    return sorted(dict.fromkeys(found), key=lambda shape: shape.cost)


def decode_slots(plan: StepPlan) -> np.ndarray:
    return np.fromiter((row[2] for row in plan.decode), np.int32, len(plan.decode))


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)

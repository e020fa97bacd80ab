"""Turns plans into calls of programs: which program, and the arrays that it takes.

How this works: `dispatch` packs a plan into one flat int32 array and runs a forward program whose shape covers it;
`sample` runs a sample program over its rows. Both return at once; the tokens are on their way to the host. They are
two, so that rows under a grammar may learn in between which tokens it allows. What is on the device, and the programs
themselves, belong to `Device`.
"""

import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxserve.config import RunnerConfig
from jaxserve.core_types import CoreRequest
from jaxserve.device import Device
from jaxserve.layers.limits import MAX_STOP_IDS
from jaxserve.layers.sampler import Sampled, SamplingFeatures
from jaxserve.program_set import (
    MASKS_A_CALL,
    SLOTS_A_CALL,
    UPDATES_A_CALL,
    Span,
    beside_decodes,
    covering,
    default_programs,
    default_shapes,
    span_shapes,
)
from jaxserve.scheduler.plan import Cohort, StepPlan, StepResult
from jaxserve.scheduler.request import Request
from jaxserve.slots import EDITS, LOGPROBS, RANDOM, edit_row, feature_flags, fill_slot_row
from jaxserve.step_builder import Rows
from jaxserve.step_future import StepFuture
from jaxserve.step_programs import SampleShape, StepShape

logger = logging.getLogger(__name__)

# A program for CPU takes some 30 memory maps a layer, also for layers that only decode rows pass, and there are up to
# three programs of a span; Linux gives a process 65,530
MAX_LAYERS_OF_SPANS = 480


class Runner:
    """The host's side of steps, over one `Device`, which it closes."""

    def __init__(self, device: Device, config: RunnerConfig):
        self.device, self.config = device, config
        self._flags = np.zeros(config.max_num_seqs + 1, np.uint8)
        self._dummy = config.max_num_seqs
        self._spans: set[StepShape] = set()  # asked for
        self._max_spans = MAX_LAYERS_OF_SPANS // self.num_layers if jax.default_backend() == "cpu" else 4096
        self._frontiers: dict[Cohort, int] = {}  # the step in which the rows of each cohort in flight passed layers
        self.shapes = default_shapes(config)
        self._warm_up_jobs: list[concurrent.futures.Future] = []

    # Steps

    def dispatch(self, plan: StepPlan) -> StepFuture:
        """Starts to compute one step and returns without waiting for the device. `sample` must follow."""
        for request in plan.new_slots:
            assert isinstance(request.sampling, CoreRequest)
        self._write_slots(plan.new_slots)
        self._write_tables(plan)
        shape, _ = self.device.forward.get(self.shape_of(plan))
        cohort = plan.cohort
        below = self._frontiers.pop(cohort) if cohort is not None and shape.starts_above else None
        if self._frontiers:
            self._frontiers = {other: step for other, step in self._frontiers.items() if other.live()}
        if cohort is not None and not plan.completes:
            self._frontiers[cohort] = plan.step
        targets = self._score_targets(plan, shape)
        kept = tuple(self._frontiers.values())
        hidden, scored, experts_read = self.device.run_forward(
            shape, plan.step, self._pack(plan, shape), below, kept, targets
        )
        if experts_read is not None:
            experts_read.copy_to_host_async()
        return StepFuture(plan, shape, hidden, scored, experts_read)

    def sample(self, future: StepFuture, slots: Sequence[int] = (), masks: np.ndarray | None = None) -> None:
        """Starts to draw the tokens of the step dispatched last, and returns without waiting for the device.

        Args:
            masks: u32 [n, ceil(V / 32)], the tokens that may be drawn for each of `slots`, instead of those before.
        """
        if masks is not None:
            self._write_masks(slots, masks)
        assert future.hidden is not None, "the step was sampled before"
        future.hidden = None
        future.sampled = self._dispatch_sample(future)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The cheapest shape of the default set that holds the plan; with a span, the one that its cohort keeps to."""
        num_decodes = len(plan.decode)
        if plan.cohort is None:
            wanted = StepShape(decode_rows=num_decodes, prefill_tokens=0, prefill_seqs=0)
        else:
            num_seqs = len(plan.cohort.members)
            wanted = StepShape(decode_rows=num_decodes, prefill_tokens=plan.cohort.num_rows, prefill_seqs=num_seqs)
        if plan.span is None:
            return covering(self.shapes, wanted)
        rows = next(rows for rows in self.config.mixed_decode_rows if rows >= num_decodes)
        (shape,) = self._span_shapes(wanted.prefill_tokens, wanted.prefill_seqs, [plan.span])
        return dataclasses.replace(shape, decode_rows=rows)

    def span_rows(self, num_tokens: int, num_seqs: int, spans: Sequence[Span]) -> int | None:
        """The prefill rows of the programs that take so many prompt tokens through these spans.

        None, while they are not all ready for any number of decode rows: then they are on their way, unless there are
        too many. Without warm-up programs are never ready before a step needs them, and this waits for none.
        """
        keys = self._span_shapes(num_tokens, num_seqs, spans)
        if len(self._spans.union(keys)) > self._max_spans:
            return None
        self._spans.update(keys)
        if self._warm_up_jobs and not all(map(self.device.forward.is_ready, keys)):
            self.device.forward.request(keys)
            return None
        return keys[0].prefill_tokens

    def _span_shapes(self, num_tokens: int, num_seqs: int, spans: Sequence[Span]) -> list[StepShape]:
        return span_shapes(self.shapes, num_tokens, num_seqs, spans, num_layers=self.num_layers)

    def _pack(self, plan: StepPlan, shape: StepShape) -> np.ndarray:
        """The plan as `forward_step`'s flat array."""
        b, t, s = shape.decode_rows, shape.prefill_tokens, shape.prefill_seqs
        ints = np.zeros(shape.num_ints, np.int32)
        ints[: len(plan.decode)] = decode_slots(plan)
        ints[len(plan.decode) : b] = self._dummy
        seq_slots, starts, cu_q_lens, prompt_lens = np.split(ints[b + t :], [s, 2 * s, 3 * s + 1])
        seq_slots[:], prompt_lens[:] = self._dummy, np.iinfo(np.int32).max  # rows of nobody are no answers
        if plan.cohort is not None:
            counts = [count for *_, count in plan.cohort.members]
            cu_q_lens[1 : len(counts) + 1] = np.cumsum(counts)
            cu_q_lens[len(counts) + 1 :] = plan.cohort.num_tokens
        for row, (place, begin) in zip(plan.prefill, plan.places(), strict=True):
            if not shape.starts_above:  # else the rows are in the frontier; and long prompts take long to copy
                ints[b + begin : b + begin + len(row.token_ids)] = row.token_ids
            seq_slots[place], starts[place] = row.slot, row.start
            prompt_lens[place] = row.request.num_prompt_tokens
        return ints

    def _dispatch_sample(self, future: StepFuture) -> Sampled | None:
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
        key, _ = self.device.sample.get(SampleShape(rows=shape.sample_rows, features=features))
        sampled = self.device.run_sample(key, rows)
        for field in sampled:
            if field is not None:
                field.copy_to_host_async()
        return sampled

    def _score_targets(self, plan: StepPlan, shape: StepShape) -> np.ndarray | None:
        """The next token of each prefill row, where logprobs of prompts were asked for."""
        if not plan.completes or all(row.request.sampling.params.prompt_logprobs is None for row in plan.prefill):
            return None
        targets = np.zeros(shape.prefill_tokens, np.int32)
        for row, (_, offset) in zip(plan.prefill, plan.places(), strict=True):
            prompt = row.request.prompt_token_ids
            following = prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]
            targets[offset : offset + len(following)] = following
        key, _ = self.device.score.get(Rows(next(t for t in self.config.prefill_tokens if t >= len(targets))))
        return np.pad(targets, (0, key.count - len(targets)))  # where only a larger program is ready

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
            self.device.start_slots.get(Rows(SLOTS_A_CALL))
            self.device.run_start_slots(ints, floats)
            for request in some:
                if self._flags[request.slot] & EDITS:
                    self.device.start_edits.get(Rows(1))
                    row = edit_row(request, self.device.model.config.vocab_size)
                    self.device.run_start_edits(request.slot, jax.tree.leaves(row))

    def _write_tables(self, plan: StepPlan) -> None:
        updates = plan.page_updates
        while updates:
            size = next((n for n in UPDATES_A_CALL if n >= len(updates)), UPDATES_A_CALL[-1])
            key, _ = self.device.update_tables.get(Rows(size))
            now, updates = updates[:size], updates[size:]
            rows = np.zeros((key.count, 3), np.int32)
            rows[:, 0] = self._dummy
            rows[: len(now)] = np.asarray(now)
            self.device.run_update_tables(rows)

    def _write_masks(self, slots: Sequence[int], masks: np.ndarray) -> None:
        while len(slots):
            size = next((n for n in MASKS_A_CALL if n >= len(slots)), MASKS_A_CALL[-1])
            key, _ = self.device.update_masks.get(Rows(size))
            rows, allowed = np.full(key.count, self._dummy, np.int32), np.zeros((key.count, masks.shape[1]), np.uint32)
            now = len(slots[:size])
            rows[:now], allowed[:now] = slots[:size], masks[:size]
            self.device.run_update_masks(rows, allowed)
            slots, masks = slots[size:], masks[size:]

    def result(self, future: StepFuture) -> StepResult:
        """Of a step that was sampled; waits for the device."""
        arrays = [*(future.sampled or ()), *(future.scored or ()), future.experts_read]
        return self.device.read(arrays, future.result)

    # Programs

    def warm_up(self, *, block: bool) -> None:
        """Compiles the default programs, in the background unless `block`; later waits count as stalls.

        Greedy rows are served by programs that can also draw. Their own, which are faster, are compiled when the first
        such row comes; whoever blocks has them too.
        """
        start = time.monotonic()
        tables = {table.name: table for table in self.device.tables}
        wanted = default_programs(self.config, every=block)
        self._warm_up_jobs = [job for name, keys in wanted.items() for job in tables[name].request(keys)]

        def finished(_: object) -> None:
            if all(job.done() for job in self._warm_up_jobs) and not self.device.forward.warm:
                for table in self.device.tables:
                    table.warm = True
                logger.info("%d programs ready in %.1f s", len(self._warm_up_jobs), time.monotonic() - start)

        for job in self._warm_up_jobs:
            job.add_done_callback(finished)
        if block:
            concurrent.futures.wait(self._warm_up_jobs)
            for job in self._warm_up_jobs:
                job.result()

    def compile_spans(self, cohorts: Iterable[tuple[int, Sequence[Span]]], *, block: bool) -> None:
        """Compiles what cohorts of so many tokens need for these spans, in the background unless `block`."""
        for num_tokens, spans in cohorts:
            self.span_rows(num_tokens, 1, spans)
        if block:
            keys = beside_decodes(self._spans, self.config)
            for job in self.device.forward.request(keys):
                job.result()
            for shape in keys:
                self._try(shape)  # the first run of a program takes longer

    def time_steps(self) -> list[tuple[StepShape, float]]:
        """Seconds of a step in each program of `shapes`, sampling included; before the first request."""
        return [(shape, min(self._try(shape) for _ in range(3))) for shape in self.shapes]

    def _try(self, shape: StepShape) -> float:
        """Seconds of a step in this program, with sampling where it may sample; before the first request.

        Decode rows are padding, which reads no keys and values and picks no experts; prompts are made up and belong to
        the dummy slot.
        """
        ints = np.full(shape.num_ints, self._dummy, np.int32)
        b, t, s = shape.decode_rows, shape.prefill_tokens, shape.prefill_seqs
        ints[b : b + t] = np.random.default_rng(0).integers(0, self.vocab_size, t)
        ints[b + t + s :] = 0
        ints[b + t + 2 * s : b + t + 3 * s + 1] = np.arange(s + 1) * (t // max(s, 1))
        ints[b + t + 3 * s + 1 :] = t  # they are prompts to the end
        self.device.forward.get(shape)
        key = SampleShape(rows=shape.sample_rows, features=SamplingFeatures(random=True))
        if shape.may_sample:
            key, _ = self.device.sample.get(key)
        start = time.perf_counter()
        result, _, _ = self.device.run_forward(shape, -1, ints, None, (), None)
        if shape.may_sample:
            result = self.device.run_sample(key, np.full(shape.sample_rows, self._dummy, np.int32)).token_ids
        self.device.read([result], lambda: jax.block_until_ready(result))
        return time.perf_counter() - start

    def wait_for_programs(self) -> None:
        """Returns when all programs that steps asked for are ready. Before that, larger ones may stand in for them."""
        concurrent.futures.wait([job for table in self.device.tables for job in table.requested])

    @property
    def num_stalls(self) -> int:
        """Steps that waited for a compile after warm-up."""
        return sum(table.num_stalls for table in self.device.tables)

    @property
    def compile_s(self) -> float:
        return sum(table.compile_s for table in self.device.tables)

    @property
    def vocab_size(self) -> int:
        return self.device.model.config.vocab_size

    @property
    def expert_bytes(self) -> int:
        """Of the weights of one expert of one layer; 0 for a dense model."""
        return self.device.expert_bytes

    @property
    def num_layers(self) -> int:
        return self.device.model.config.num_layers

    def close(self) -> None:
        """Ends compiles and lets go of weights, cache and programs: another engine may need the memory."""
        self.device.close()
        self._frontiers = {}


def decode_slots(plan: StepPlan) -> np.ndarray:
    return np.fromiter((row[2] for row in plan.decode), np.int32, len(plan.decode))

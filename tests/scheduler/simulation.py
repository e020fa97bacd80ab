"""A fake runner that knows what every cell of the KV cache must hold, and a driver that checks every step.

The runner stores, for every (page, offset, layer), the hash of the token prefix that wrote it, and who wrote it in
which step. It is a harsher device than a real one:

- A step's writes land when it is dispatched and once more just before its result is read. So a page that is given away
  before the last step that names it has committed is overwritten by its old owner.
- What others wrote may be read only once the writing step has committed.
- Rows that overrun a stop write real pages, not the null page.

With some seeds, now and then no token can be sampled (-1), which ends a request as "error".

Tokens are sampled from the hash of the prefix and the request's seed, so a request's output is known in advance and
does not depend on batching, chunks, pages, pre-emption, hits or overlap. The driver holds every commit against it.
"""

import collections
import dataclasses
import random
import zlib
from collections.abc import Callable

from jaxserve.scheduler import (
    Cohort,
    LayeredPrefill,
    PagePool,
    PoolTooSmall,
    QueueFull,
    Request,
    RequestUpdate,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
    Status,
    StepPlan,
    StepResult,
)
from jaxserve.scheduler.overtaking import Order

VOCAB, EOS, STOP = 16, 0, 1
NUM_LAYERS = 4


def root_hash(request: Request) -> int:
    return zlib.crc32(repr((request.adapter, request.cache_salt)).encode())


def prefix_hashes(request: Request, tokens: list[int], share_answers: bool) -> list[int]:
    """hashes[i] stands for the first i tokens under the request's adapter and salt.

    Unless answers are shared, a token of the answer writes something else than the same token of a prompt.
    """
    hashes = [root_hash(request)]
    for i, token in enumerate(tokens):
        hashes.append(hash((hashes[-1], token, i >= len(request.prompt_token_ids) and not share_answers)))
    return hashes


def sample(prefix_hash: int, seed: int) -> int:
    drawn = hash((prefix_hash, seed, 17))
    return -1 if seed % 10 == 7 and drawn // VOCAB % 8 == 0 else drawn % VOCAB


def expected_output(
    request: Request, max_model_len: int, pool_len: int, share_answers: bool
) -> tuple[list[int], str, int | None]:
    """Tokens, finish_reason and stop_reason of a lone, undisturbed run."""
    hashes, outputs = prefix_hashes(request, request.prompt_token_ids, share_answers), []
    total = min(len(request.prompt_token_ids) + request.max_tokens, max_model_len, pool_len + 1)
    while True:
        token = sample(hashes[-1], request.sampling)
        if token < 0:
            return outputs, "error", None
        outputs.append(token)
        hashes.append(hash((hashes[-1], token, not share_answers)))
        if len(outputs) >= request.min_tokens:
            if token in request.eos_token_ids:
                return outputs, "stop", None
            if token in request.stop_token_ids:
                return outputs, "stop", token
        if len(request.prompt_token_ids) + len(outputs) >= total:
            return outputs, "length", None


@dataclasses.dataclass
class SlotState:
    """What the device holds for one slot."""

    owner: tuple[Request, int]
    tokens: list[int]  # known to the device, the sampled ones too
    hashes: list[int]
    pos: int | None = None  # the next token to compute; None until the first prefill row
    standing: tuple[int, int, int] | None = None  # (start, end, layer) of tokens that are between two groups of layers


class FakeRunner:
    def __init__(self, pool: PagePool, config: SchedulerConfig, stall: random.Random | None = None):
        self.pool, self.share_answers = pool, config.share_answers
        self.real_pages = set(range(pool.num_pages)) - set(range(0, pool.num_pages, pool.pages_per_rank))
        self.slots: list[SlotState | None] = [None] * config.max_num_seqs
        self.tables: list[dict[int, int]] = [{} for _ in range(config.max_num_seqs)]
        self.cells: dict[tuple[int, int, int], tuple[int, tuple[Request, int], int]] = {}
        self.stall = stall  # rows that get no token now and then, as those that wait for a mask
        self.committed = 0

    def dispatch(self, plan: StepPlan) -> tuple[StepResult, dict]:
        for request in plan.new_slots:
            tokens = request.prompt_token_ids + request.output_token_ids
            self.slots[request.slot] = SlotState(
                (request, request.epoch), list(tokens), prefix_hashes(request, list(tokens), self.share_answers)
            )
        for slot, index, page in plan.page_updates:
            assert page in self.real_pages
            self.tables[slot][index] = page
        members = {(request, epoch): count for request, epoch, count in plan.cohort.members} if plan.cohort else {}
        for row in plan.prefill:
            assert members.get((row.request, row.epoch)) == len(row.token_ids), "the frontier has no such rows"
        rows = [self._decode_row(row) for row in plan.decode]
        rows += [self._prefill_row(row, plan) for row in plan.prefill]
        writes = {}
        for state, slot, start, end, layers in rows:
            for key, value in self._writes(state, slot, start, end, layers, plan.step):
                assert key not in writes, "two rows of one step write the same cell"
                writes[key] = value
        self.cells |= writes
        for state, slot, _, end, layers in rows:
            self._check_reads(state, slot, end, layers)
        samples = [True] * len(plan.decode) + [row.samples for row in plan.prefill]
        tokens = [self._sample(row, row_samples) for row, row_samples in zip(rows, samples, strict=True)]
        return StepResult(token_ids=tokens), writes

    def land(self, writes: dict, step: int) -> None:
        """The step is over: its writes land for the last time."""
        self.cells |= writes
        self.committed = step

    def _decode_row(self, row):
        state = self._state(row)
        assert state.pos == len(state.tokens) - 1, "a decode row needs exactly one token that is not computed"
        return state, row.slot, state.pos, state.pos + 1, range(NUM_LAYERS)

    def _prefill_row(self, row, plan: StepPlan):
        state, end = self._state(row), row.start + len(row.token_ids)
        assert row.token_ids, "an empty prefill row"
        assert row.start == state.pos or state.pos is None, "a hole in the prefill"
        assert row.token_ids == state.tokens[row.start : end]
        lo, hi = plan.span or (0, NUM_LAYERS)
        assert plan.completes == (hi == NUM_LAYERS)
        assert (row.start, end, lo) == (state.standing or (row.start, end, 0)), "a layer is left out or passed twice"
        state.standing = None if plan.completes else (row.start, end, hi)
        assert row.samples == (plan.completes and end == len(state.tokens))
        state.pos = end if plan.completes else row.start
        return state, row.slot, row.start, end, range(lo, hi)

    def _state(self, row) -> SlotState:
        state = self.slots[row.slot]
        assert state is not None
        assert state.owner == (row.request, row.epoch), "the slot belongs to another request"
        return state

    def _cell(self, slot: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.pool.page_size)
        assert index in self.tables[slot], "the page table has a hole"
        return self.tables[slot][index], offset

    def _writes(self, state, slot, start, end, layers, step):
        for position in range(start, end):
            cell = self._cell(slot, position)
            for layer in layers:
                yield (*cell, layer), (state.hashes[position + 1], state.owner, step)

    def _check_reads(self, state, slot, end, layers) -> None:
        for position in range(end):
            cell = self._cell(slot, position)
            for layer in layers:
                found, writer, step = self.cells.get((*cell, layer), (None, None, 0))
                assert found == state.hashes[position + 1], f"position {position} reads something else in layer {layer}"
                assert writer == state.owner or step <= self.committed, "reads what is not committed"

    def _sample(self, row, samples: bool) -> list[int]:
        state, _, _, end, _ = row
        if not samples:
            return []
        if self.stall is not None and self.stall.random() < 0.2:
            state.pos = end - 1  # the same token again, with its mask
            return []
        token = sample(state.hashes[end], state.owner[0].sampling)
        state.tokens.append(token)
        state.hashes.append(hash((state.hashes[-1], token, not self.share_answers)))
        state.pos = end
        return [token]


class RandomLayered(LayeredPrefill):
    """Layered prefill whose steps are short enough at random, and whose programs are ready at random."""

    def __init__(self, config: SchedulerConfig, rng: random.Random):
        programs = lambda num_tokens, num_seqs, spans: rng.choice([None, num_tokens, num_tokens + 3])  # noqa: E731
        super().__init__(config, NUM_LAYERS, programs)
        self.rng = rng
        if config.prefill_order != "fcfs" and rng.random() < 0.5:
            self._order = Order(lambda job, now, token_s: (rng.random(),))

    def choose(self, draft, candidates):
        draft.num_decodes += 1  # groups also where nobody decodes
        return super().choose(draft, candidates)

    def _fits(self, draft, bulk, groups):
        return self.rng.random() < 0.3

    def _layers_pay(self, draft, bulk, groups, chunk):
        return self.rng.random() < 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    config: SchedulerConfig
    pages_per_rank: int = 9
    page_size: int = 4
    num_ranks: int = 1
    overlap: bool = True
    prefix_caching: bool = True
    layered: Callable[[SchedulerConfig, random.Random], LayeredPrefill] = RandomLayered
    stalls: bool = False  # rows without a token; only without overlap
    seed: int = 0


class Simulation:
    """Scheduler, pool and fake runner, driven as the engine drives them; every step is checked."""

    def __init__(self, setup: Setup, scheduler_class=Scheduler, pool_class=PagePool):
        self.setup, self.config = setup, setup.config
        self.pool = pool_class(setup.pages_per_rank * setup.num_ranks, setup.page_size, setup.num_ranks)
        rng = random.Random(setup.seed)
        prefill = None if setup.config.prefill == "chunked" else setup.layered(setup.config, rng)
        self.scheduler = scheduler_class(
            setup.config, self.pool, enable_prefix_caching=setup.prefix_caching, prefill=prefill
        )
        stall = rng if setup.stalls and not setup.overlap else None
        self.runner = FakeRunner(self.pool, setup.config, stall)
        self.in_flight: collections.deque = collections.deque()
        self.now = 0.0
        self.cohort: Cohort | None = None  # of the last step with prefill rows, if it is in flight
        self.live: list[Request] = []
        self.ended: dict[int | str, tuple[str, int | str | None]] = {}
        self.expected: dict[Request, tuple[list[int], str, int | None]] = {}
        self.seen: collections.Counter = collections.Counter()  # how often each situation came up

    @property
    def pool_len(self) -> int:
        return self.pool.num_usable * self.pool.page_size

    # What the engine does

    def add(self, request: Request) -> bool:
        """False if it was refused, which must be for a reason."""
        num_prompt, num_waiting = len(request.prompt_token_ids), self.scheduler.stats().num_requests_waiting
        try:
            self.scheduler.add(request)
        except PoolTooSmall:
            assert num_prompt > self.pool_len
        except QueueFull:
            assert num_waiting >= (self.config.max_num_queued_reqs or num_waiting + 1)
        except ValueError:
            assert not 0 < num_prompt < self.config.max_model_len
        else:
            self.live.append(request)
            sizes = (self.config.max_model_len, self.pool_len)
            self.expected[request] = expected_output(request, *sizes, self.config.share_answers)
            return True
        return False

    def finish(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        self.scheduler.finish(request, reason, stop_reason)
        self._end(request, reason, stop_reason)
        self.check()

    def release(self, request: Request) -> None:
        self.scheduler.release(request)
        self.seen["releases"] += 1
        self.check()

    def held(self) -> list[Request]:
        return [request for request in self.scheduler.waiting if request.held]

    def dispatch(self) -> StepPlan | None:
        first, num_decoding = self._first_running(), len(self.scheduler.running.decoding)
        before = self.scheduler.stats()
        plan = self.scheduler.schedule(self.now)
        self._count(before)
        self._check_plan(plan, first, num_decoding)
        if plan is not None:
            self.in_flight.append((plan, *self.runner.dispatch(plan)))
            self.seen.update(steps=1, spans=plan.span is not None, mixed=bool(plan.decode and plan.prefill))
            self.seen["overtakes"] += plan.cohort not in (None, self.cohort) and bool(
                self.cohort and self.cohort.live()
            )
            if plan.cohort is not None:
                self.cohort = None if plan.completes else plan.cohort
        elif not self.in_flight:
            self._record(self.scheduler.expired())
        self.check()
        return plan

    def commit(self) -> list[RequestUpdate]:
        plan, result, writes = self.in_flight.popleft()
        self.runner.land(writes, plan.step)
        updates = self.scheduler.commit(plan, result, self.now)
        self._record(updates)
        self.check()
        return updates

    def step(self) -> list[RequestUpdate]:
        """One step of the engine."""
        plan = self.dispatch()
        if self.in_flight and (plan is None or len(self.in_flight) > self.setup.overlap):
            return self.commit()
        return []

    def drain(self, max_steps: int = 10_000) -> None:
        """Runs until all is done; then nothing may be missing."""
        for request in self.held():
            self.release(request)
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished(), "no end in sight"
        while self.in_flight:
            self.commit()
        assert not self.live, "a request never ended"
        assert self.pool.num_available == self.pool.num_usable, "pages are missing"
        assert sorted(self.scheduler.running.free_slots) == list(range(self.config.max_num_seqs))
        assert self.scheduler.reset_prefix_cache()
        assert self.pool.num_cached == 0

    def _count(self, before: SchedulerStats) -> None:
        now = self.scheduler.stats()
        num_preemptions = now.num_preemptions - before.num_preemptions
        self.seen["preemptions"] += num_preemptions
        self.seen["preemptions in flight"] += num_preemptions if self.in_flight else 0
        self.seen["hits"] += now.prefix_cache_hits > before.prefix_cache_hits
        self.seen["waits for a fence"] += self.pool.num_returning() > 0

    # What must hold

    def _record(self, updates: list[RequestUpdate]) -> None:
        for request, tokens, finish_reason, stop_reason, *_ in updates:
            outputs, expected = request.output_token_ids, self.expected[request]
            assert outputs[len(outputs) - len(tokens) :] == tokens
            assert outputs == expected[0][: len(outputs)], "the output depends on its company"
            if finish_reason is None:
                assert len(outputs) < len(expected[0]) + (expected[1] == "error"), "it should have ended"
                continue
            if finish_reason != "abort":
                assert (outputs, finish_reason, stop_reason) == expected
            self._end(request, finish_reason, stop_reason)

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        assert request.request_id not in self.ended, "it ended twice"
        assert (request.status, request.finish_reason, request.stop_reason) == (Status.FINISHED, reason, stop_reason)
        self.ended[request.request_id] = reason, stop_reason
        self.seen[f"{reason} {stop_reason}"] += 1
        self.seen["ends in flight"] += any(request.last_step >= plan.step for plan, *_ in self.in_flight)
        self.live.remove(request)

    def _first_running(self) -> Request | None:
        """The running request that nothing may hold up, unless all its tokens are in flight."""
        first = min(self.scheduler.running, key=lambda request: request.order, default=None)
        if first is None or first.num_computed_tokens >= first.max_computed_tokens:
            return None
        return first

    def _check_plan(self, plan: StepPlan | None, first: Request | None, num_decoding: int) -> None:
        if plan is None:
            waiting = [request for request in self.scheduler.waiting if not self._stands_aside(request)]
            assert self.in_flight or not (len(self.scheduler.running) or waiting), "it is stuck"
            return
        rows = [*plan.decode, *plan.prefill]
        requests = [row.request for row in rows]
        assert 0 < len(set(requests)) == len(requests) <= self.config.max_num_seqs
        if plan.prefill:
            padded = self.config.tokens_for(len(plan.decode))
            assert len(plan.decode) <= padded <= self.config.max_num_batched_tokens - plan.num_prefill_tokens
        assert len(plan.prefill) <= self.config.max_prefill_seqs
        assert all(row.epoch == row.request.epoch and row.slot == row.request.slot for row in rows)
        assert {update.slot for update in plan.page_updates} <= {row.slot for row in rows}
        assert set(plan.new_slots) <= set(requests)
        assert not any(request.held for request in requests)
        room = self.config.max_num_batched_tokens - plan.num_prefill_tokens
        waits = self.config.prioritize_prefill and self.config.tokens_for(num_decoding) > room
        waits |= first is not None and any(row.request.order < first.order for row in plan.prefill)  # came back
        if first is not None and first.status is Status.RUNNING and self.config.prefill == "chunked" and not waits:
            assert first in requests or self.pool.num_returning(), "the first in the order does not get on"

    @staticmethod
    def _stands_aside(request: Request) -> bool:
        return request.held or (request.leader is not None and request.leader.held)

    def check(self) -> None:
        """What holds between any two calls."""
        scheduler = self.scheduler
        self.pool.check()
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        unfinished = [request for request in self.live if request.finish_reason is None]
        assert sorted(map(id, unfinished)) == sorted(map(id, running + waiting)), "a request is lost or in two places"
        entries = collections.Counter(page for request in running for page in request.page_ids)
        entries.update(self.pool.fenced_pages())
        refs = {page: self.pool.refs(page) for page in range(self.pool.num_pages) if self.pool.refs(page)}
        assert refs == dict(entries), "reference counts and tables disagree"
        slots = [request.slot for request in running] + scheduler.running.free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs)), "a slot is lost or given twice"
        for request in running:
            assert 0 <= request.num_computed_tokens <= request.num_tokens + request.num_in_flight
            assert request.num_computed_tokens <= min(request.capacity, self.config.max_model_len)
            assert request.num_in_flight >= 0
            assert self.runner.real_pages.issuperset(request.page_ids)
        for request in waiting:
            assert (request.page_ids, request.slot, request.num_computed_tokens) == ([], -1, 0)
        assert not self.pool.num_held or running or self.in_flight, "pages are held by nobody"

"""Layered prefill: prompts pass the layers group by group, one group a step, beside decodes that pass all of them.

Chunked prefill cuts a prompt along its tokens, and reads all layers' weights again for each chunk. Layered prefill cuts
along the layers: each token passes each layer once, and a step computes one group of layers for the whole prompt. That
matters most for mixtures of experts, whose weights a chunk reads nearly all of. Source: arXiv 2510.08055.

How this works. Prompts that begin together are a **cohort**. Its members stay the same and stand at the same layer; who
ends or is pre-empted leaves it and, where it comes back, begins anew. A prompt that is cut goes on in a later cohort.
Between two groups another cohort may overtake, if the order (overtaking.py) ranks it before; the one overtaken waits
with its rows on the device where they are. So each step: drop cohorts that nobody is left of; rank those in flight and
the prompts that wait; go on with the best, or let the best prompts begin. When they begin, what a step may take beside
decodes decides how: all layers at once where that is short enough, else groups, or chunks.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.scheduler.chunked import ChunkedPrefill
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.overtaking import ORDERS, Job, Rank
from jaxserve.scheduler.plan import Cohort, Draft, StepPlan, Turn
from jaxserve.scheduler.request import Request, Status
from jaxserve.scheduler.step_time import StepTimeModel, StepWork

GROUP_COUNTS = (1, 2, 4, 8, 16)
TOKENS_OF_A_GROUP = 512  # with which the paper's steps take as long as those of chunks of 512
MAX_COHORTS = 4  # in flight at once: each that waits holds its rows in device memory
GAIN = 0.95  # what layers must take of the time of chunks, for "auto" to choose them: chunks let others in meanwhile

Span = tuple[int, int]
Programs = Callable[[int, int, list[Span]], int | None]


class Bulk(NamedTuple):
    """What there is to compute of prompts."""

    num_tokens: int
    num_pairs: float  # a token, a token that it attends to

    def plus(self, start: int, num_tokens: int) -> "Bulk":
        """And so many tokens that come after `start` others."""
        return Bulk(self.num_tokens + num_tokens, self.num_pairs + num_tokens * (start + num_tokens / 2))


NOTHING = Bulk(0, 0.0)


class Opening(NamedTuple):
    """How the cohort that begins in this step passes the layers."""

    max_tokens: int
    groups: int
    num_rows: int  # of the programs that are ready for that


class LayeredPrefill(ChunkedPrefill):
    """The policy behind prefill="layered" and "auto".

    Args:
        programs: the prefill rows of the programs that are ready to take so many tokens of so many prompts through each
            of these spans, beside any number of decodes; None while they are not.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_layers: int,
        programs: Programs = lambda num_tokens, num_seqs, spans: num_tokens,
    ):
        super().__init__(config)
        self.step_time = StepTimeModel()
        self._config = config
        self._num_layers = num_layers
        self._programs = programs
        self._max_seqs = config.max_prefill_seqs
        # What fits beside all decodes that may come while the cohort is in flight
        self._max_tokens = config.max_num_batched_tokens - config.tokens_for(config.max_num_seqs)
        self._target_s = None if config.target_tbt_ms is None else config.target_tbt_ms / 1e3
        self._may_choose_chunks = config.prefill == "auto"
        self._order = ORDERS[config.prefill_order]
        self._overtakes = self._order.overtakes or config.policy == "priority"
        self._in_flight: dict[Cohort, list[int]] = {}  # where its groups that are left begin, and the last one's end
        self._opening = Opening(self._max_tokens, 1, 0)

    # The scheduler's side

    def choose(self, draft: Draft, candidates: list[Request]) -> tuple[Sequence[Request], Cohort | None]:
        self._in_flight = {cohort: left for cohort, left in self._in_flight.items() if cohort.live()}
        if not self._in_flight and not candidates:
            return (), None
        token_s = self._token_s(draft)
        ranks = {cohort: self._order.rank(self._job(cohort), draft.now, token_s) for cohort in self._in_flight}
        first = min(ranks, key=lambda cohort: ranks[cohort], default=None)
        goes_on = first if first is not None and first.num_tokens <= draft.budget else None
        if first is not None and (not self._overtakes or len(ranks) == MAX_COHORTS):
            return (), goes_on
        busy = {request for cohort in ranks for request in cohort.live()}
        ranked = [(self._order.rank(_job(r), draft.now, token_s), r) for r in candidates if r not in busy]
        ranked.sort(key=lambda pair: () if draft.in_order and pair[1].status is Status.RUNNING else pair[0])
        best = [pair for pair in ranked if first is None or pair[0] < ranks[first]]
        return self._open(draft, best), goes_on

    def turn(self, draft: Draft) -> Turn:
        cohort = draft.cohort
        if cohort is None:
            cohort, groups = self._form(draft)
            left = borders(self._num_layers, groups)
        else:
            left = self._in_flight.pop(cohort)
        lo, hi, *rest = left
        if rest:
            self._in_flight[cohort] = [hi, *rest]
        span = None if (lo, hi) == (0, self._num_layers) else (lo, hi)
        return Turn(cohort, span, not rest)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        work = StepWork(len(plan.decode), plan.num_kv_tokens)
        if plan.cohort is not None:
            lo, hi = plan.span or (0, self._num_layers)
            bulk = NOTHING
            for row in plan.prefill:
                bulk = bulk.plus(row.start, len(row.token_ids))
            share = (hi - lo) / self._num_layers
            work = StepWork(len(plan.decode), plan.num_kv_tokens, plan.cohort.num_tokens, bulk.num_pairs, share)
        self.step_time.observe(work, seconds)

    def spans_ahead(self, num_tokens: int) -> list[list[Span]]:
        """Ways through the layers that cohorts of half as many tokens and more will go, as far as can be told."""
        loads = [Draft(step=0, config=self._config, num_decodes=n) for n in (1, self._config.max_num_seqs)]
        sizes = [NOTHING.plus(0, size) for size in (num_tokens // 2 + 1, num_tokens)]
        counts = {self._num_groups(load, size) for load in loads for size in sizes}
        return [spans(self._num_layers, groups) for groups in sorted(counts - {1})]

    # A cohort that begins

    def _open(self, draft: Draft, ranked: list[tuple[Rank, Request]]) -> list[Request]:
        """Those who may be in it, and with that how they pass the layers."""
        members, bulk, limit = [], NOTHING, self._max_tokens
        for rank, request in ranked:
            if rank < ranked[0][0]:
                break  # it will overtake
            start = request.num_computed_tokens
            left = min(request.num_tokens - start, self._threshold or self._max_tokens)
            bulk = bulk.plus(start, min(left, limit - bulk.num_tokens))
            if not members and self._order.overtakes:
                limit = self._most_beside(draft, bulk)
            members.append(request)
            if bulk.num_tokens == limit or len(members) == self._max_seqs:
                break
        if members:
            self._opening = self._how(draft, bulk, members, limit)
        return members

    def _most_beside(self, draft: Draft, bulk: Bulk) -> int:
        """Tokens that a cohort of `bulk` may grow to before it takes more groups: those in it must not wait longer."""
        groups = self._num_groups(draft, bulk)
        alone, nothing = self._step_s(draft, bulk, groups), self._step_s(draft, NOTHING, groups)
        if self._target_s is None or alone is None or nothing is None:
            most = TOKENS_OF_A_GROUP * groups
        else:
            most = int(bulk.num_tokens * (self._target_s - nothing) / max(alone - nothing, 1e-9))
        return max(bulk.num_tokens, min(most, self._max_tokens))

    def _how(self, draft: Draft, bulk: Bulk, members: list[Request], limit: int) -> Opening:
        groups = self._num_groups(draft, bulk) if draft.num_decodes else 1
        if groups == 1:  # short enough, or nobody waits for his next token meanwhile
            return Opening(limit, 1, 0)
        chunk = self._chunk(draft, members[0].num_computed_tokens)
        if self._may_choose_chunks and not self._layers_pay(draft, bulk, groups, chunk):
            return Opening(chunk, 1, 0)
        num_rows = self._programs(bulk.num_tokens, len(members), spans(self._num_layers, groups))
        if num_rows is None:
            return Opening(chunk, 1, 0)
        return Opening(limit, groups, num_rows)

    def _room(self, draft: Draft) -> int:
        return min(draft.budget, self._opening.max_tokens - sum(draft.prefill.values()))

    def _form(self, draft: Draft) -> tuple[Cohort, int]:
        """The cohort of who found a place: with hits in the prefix cache, fewer tokens than `_open` counted on."""
        _, groups, num_rows = self._opening
        bulk = NOTHING
        for request, num_tokens in draft.prefill.items():
            bulk = bulk.plus(request.num_computed_tokens, num_tokens)
        if groups > 1 and (fewer := self._num_groups(draft, bulk)) <= groups:
            wanted = spans(self._num_layers, fewer)
            exact = 0 if fewer == 1 else self._programs(bulk.num_tokens, len(draft.prefill), wanted)
            if exact is not None:
                groups, num_rows = fewer, exact
        return Cohort.of(draft.prefill, num_rows), groups

    # What a step may take

    def _num_groups(self, draft: Draft, bulk: Bulk) -> int:
        """The fewest with which a step is short enough beside the decodes; the most there are, if none is."""
        return next((n for n in GROUP_COUNTS if self._fits(draft, bulk, n)), GROUP_COUNTS[-1])

    def _chunk(self, draft: Draft, start: int = 0) -> int:
        """The largest part of the budget that may pass all layers in a step, after `start` tokens of its prompt."""
        parts = [max(1, self._max_tokens // n) for n in GROUP_COUNTS]
        return next((part for part in parts if self._fits(draft, NOTHING.plus(start, part), 1)), parts[-1])

    def _fits(self, draft: Draft, bulk: Bulk, groups: int) -> bool:
        if self._target_s is None or (seconds := self._step_s(draft, bulk, groups)) is None:
            return bulk.num_tokens <= TOKENS_OF_A_GROUP * groups
        return seconds <= self._target_s

    def _step_s(self, draft: Draft, bulk: Bulk, groups: int) -> float | None:
        """Of a step that takes these prompts through the largest of so many groups of layers."""
        share = -(-self._num_layers // groups) / self._num_layers
        return self.step_time.seconds(StepWork(draft.num_decodes, draft.num_kv_tokens, *bulk, share))

    def _layers_pay(self, draft: Draft, bulk: Bulk, groups: int, chunk: int) -> bool:
        num_chunks = math.ceil(bulk.num_tokens / chunk)
        layers = self._step_s(draft, bulk, groups)
        chunks = self._step_s(draft, Bulk(chunk, bulk.num_pairs / num_chunks), 1)
        if layers is None or chunks is None:
            return False
        return min(groups, self._num_layers) * layers < GAIN * num_chunks * chunks

    def _token_s(self, draft: Draft) -> float:
        """Seconds that a token of a prompt takes beside the present decodes."""
        chunk = self._chunk(draft)
        return (self._step_s(draft, NOTHING.plus(0, chunk), 1) or 0.0) / chunk

    def _job(self, cohort: Cohort) -> Job:
        jobs = [_job(request) for request in cohort.live()]
        share = 1.0 - self._in_flight[cohort][0] / self._num_layers
        return Job(
            min(job.priority for job in jobs),
            min(job.arrival_time for job in jobs),
            min(job.deadline for job in jobs),
            cohort.num_tokens * share,
        )


def _job(request: Request) -> Job:
    deadline = math.inf if request.deadline is None else request.deadline
    return Job(request.order[0], request.arrival_time, deadline, request.num_tokens - request.num_computed_tokens)


def prefill_policy(config: SchedulerConfig, num_layers: int, programs: Programs) -> ChunkedPrefill:
    """What `config` asks for."""
    return ChunkedPrefill(config) if config.prefill == "chunked" else LayeredPrefill(config, num_layers, programs)


def borders(num_layers: int, groups: int) -> list[int]:
    """Where the groups begin, and where the last one ends; the first ones take the layers that are left over."""
    groups = min(groups, num_layers)
    size, rest = divmod(num_layers, groups)
    return [group * size + min(group, rest) for group in range(groups + 1)]


def spans(num_layers: int, groups: int) -> list[Span]:
    return list(itertools.pairwise(borders(num_layers, groups)))

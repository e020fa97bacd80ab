"""What one step does: made by `Scheduler.schedule`, run by the runner, handed back to `Scheduler.commit`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.request import Request


class DecodeRow(NamedTuple):
    """One sequence in the decode region: its token, position and stop flag are on the device, by slot."""

    request: Request
    epoch: int
    slot: int


class PrefillRow(NamedTuple):
    """Known tokens `[start, start + len(token_ids))` of one sequence, in the prefill region.

    After a pre-emption these reach beyond the prompt into the output.
    """

    request: Request
    epoch: int
    slot: int
    start: int
    token_ids: list[int]
    samples: bool  # the last known token is in this row, and this step's span ends at the last layer


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The prompts that pass the layers together, and where each has its rows: the same in all of their steps.

    A member that ended or was pre-empted since the first step keeps its rows, as padding: nobody else's may move.
    """

    members: tuple[tuple[Request, int, int], ...]  # (request, epoch, query tokens)
    num_rows: int  # prefill rows of its programs; where it passes all layers at once only the least that they may have

    @classmethod
    def of(cls, picked: Mapping[Request, int], num_rows: int = 0) -> "Cohort":
        members = tuple((request, request.epoch, count) for request, count in picked.items())
        return cls(members, max(num_rows, sum(picked.values())))

    @property
    def num_tokens(self) -> int:
        return sum(count for *_, count in self.members)

    def live(self) -> dict[Request, int]:
        """The query tokens of each member that is still in it."""
        return {request: count for request, epoch, count in self.members if request.epoch == epoch}


class PageUpdate(NamedTuple):
    """`page_table[slot, index] = page_id`, to be applied on the device before the step."""

    slot: int
    index: int
    page_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Plans name (request, epoch): a commit drops results whose epoch is over (aborted, pre-empted).

    A slot in `new_slots` may have belonged, up to the step before, to another request whose results are still to be
    committed: the device runs steps in order, so writing the slot's state before this step is all it takes.
    """

    step: int
    decode: list[DecodeRow]
    prefill: list[PrefillRow]
    new_slots: list[Request]  # requests that got a slot in this step: the runner writes their slot state first
    page_updates: list[PageUpdate]
    span: tuple[int, int] | None = None  # layers that the prefill rows pass, [lo, hi); None = all
    completes: bool = True  # the span ends at the last layer: after this step the prefill rows' KV is whole
    cohort: Cohort | None = None  # of the prefill rows; None = there are none
    num_kv_tokens: int = 0  # whose keys and values the decode rows read

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.prefill)

    def places(self) -> list[tuple[int, int]]:
        """(number of the member of the cohort, first of its rows) of each prefill row."""
        found, offset = {}, 0
        for number, (request, epoch, count) in enumerate(self.cohort.members if self.cohort else ()):
            found[request, epoch] = number, offset
            offset += count
        return [found[row.request, row.epoch] for row in self.prefill]


@dataclasses.dataclass(slots=True, kw_only=True)
class Draft:
    """A step while `Scheduler.schedule` is filling it.

    `prefill` maps a request to its query tokens in this step, which are not yet its computed tokens: a span that stops
    short of the last layer computes none.
    """

    step: int
    config: SchedulerConfig
    decode: list[DecodeRow] = dataclasses.field(default_factory=list)
    prefill: dict[Request, int] = dataclasses.field(default_factory=dict)
    new_slots: list[Request] = dataclasses.field(default_factory=list)
    page_updates: list[PageUpdate] = dataclasses.field(default_factory=list)
    cohort: Cohort | None = None  # the one in flight that goes on in this step
    now: float = 0.0
    num_decodes: int = 0  # sequences that decode, whether or not this step has their rows yet
    num_kv_tokens: int = 0  # of them
    in_order: bool = False  # running prompts go first and in their order, since pages are short
    num_pages_short: int = 0  # pages that the running requests skipped in this step wait for
    admits: bool = True  # nobody had to be pre-empted or skipped for want of pages

    @property
    def budget(self) -> int:
        """Query tokens still to give."""
        taken = self.config.tokens_for(len(self.decode)) + sum(self.prefill.values())
        return self.config.max_num_batched_tokens - taken

    def withdraw(self, request: Request, row: DecodeRow) -> None:
        """Takes every trace of `request` (whose cached row is `row`) out again."""
        self.prefill.pop(request, None)
        if row in self.decode:
            self.decode.remove(row)
        if request in self.new_slots:
            self.new_slots.remove(request)
        self.page_updates = [update for update in self.page_updates if update.slot != row.slot]

    def seal(self, prefill: list[PrefillRow], turn: "Turn | None") -> StepPlan:
        span, completes, cohort = (turn.span, turn.completes, turn.cohort) if turn else (None, True, None)
        return StepPlan(
            step=self.step,
            decode=self.decode,
            prefill=prefill,
            new_slots=self.new_slots,
            page_updates=self.page_updates,
            span=span,
            completes=completes,
            cohort=cohort,
            num_kv_tokens=self.num_kv_tokens if self.decode else 0,
        )


class Turn(NamedTuple):
    """What a cohort does in one step."""

    cohort: Cohort
    span: tuple[int, int] | None = None  # layers [lo, hi); None = all
    completes: bool = True  # the last layer is among them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the device gave back.

    `token_ids[i]` are the tokens (0..q of them) that row i sampled, rows counted through `plan.decode` and then
    `plan.prefill`; a prefill row with `samples=False` gives an empty list. A token of -1 stands for none: every one was
    forbidden, and the request ends as "error". `logprobs[i]` (None where not asked for) pass through the scheduler
    unread.
    """

    token_ids: list[list[int]]
    logprobs: list[Any] | None = None


class RequestUpdate(NamedTuple):
    """What one commit changed for one request; the engine turns it into text. `finish_reason` None = still going.

    `new_token_ids` ends at the token that ended the request; `logprobs` may be longer (it is passed on unread).
    """

    request: Request
    new_token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Any = None

"""What one step does, in plain data: made by `Scheduler.schedule`, run by the runner, handed back to `Scheduler.commit`."""

import dataclasses
from typing import NamedTuple

from jaxserve.scheduler.request import Request


class DecodeRow(NamedTuple):
    """One sequence in the decode region: its token, position and stop flag are on the device, by slot."""

    request: Request
    epoch: int
    slot: int


class PrefillRow(NamedTuple):
    """Prompt tokens `[start, start + len(token_ids))` of one sequence, in the prefill region."""

    request: Request
    epoch: int
    slot: int
    start: int
    token_ids: list[int]
    samples: bool  # the last known token is in this row, and this step's span ends at the last layer


class PageUpdate(NamedTuple):
    """`page_table[slot, index] = page_id`, to be applied on the device before the step."""

    slot: int
    index: int
    page_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Plans name (request, epoch): a commit drops results whose epoch is over (aborted, pre-empted)."""

    step: int
    decode: list[DecodeRow]
    prefill: list[PrefillRow]
    new_slots: list[Request]  # requests that got a slot in this step: the runner writes their slot state first
    page_updates: list[PageUpdate]
    span: tuple[int, int] | None = None  # layers that the prefill rows pass, [lo, hi); None = all

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.prefill)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the device gave back.

    `token_ids[i]` are the tokens (0..q of them) that row i sampled, rows counted through `plan.decode` and then
    `plan.prefill`; a prefill row with `samples=False` gives an empty list. `logprobs[i]` and `prompt_logprobs[i]`
    (None where not asked for) pass through the scheduler unread.
    """

    token_ids: list[list[int]]
    logprobs: list[object] | None = None
    prompt_logprobs: list[object] | None = None


class RequestUpdate(NamedTuple):
    """What one commit changed for one request; the engine turns it into text. `finish_reason` None = still going."""

    request: Request
    new_token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: object | None = None
    prompt_logprobs: object | None = None

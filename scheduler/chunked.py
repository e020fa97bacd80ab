"""Chunked prefill: the budget that decodes leave goes to prompts, cut to fit (Sarathi-Serve, arXiv 2403.02310)."""

from collections.abc import Sequence

from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.plan import Cohort, Draft, StepPlan, Turn
from jaxserve.scheduler.request import Request


class ChunkedPrefill:
    """Decides which prompts a step computes, which of their tokens, and which layers these pass: here, all at once.

    The scheduler asks in the order of the methods, and finds pages and slots itself. Another way to prefill is another
    class with these methods.
    """

    def __init__(self, config: SchedulerConfig):
        self._chunks = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold
        self._multiple = config.prompt_multiple

    def choose(self, draft: Draft, candidates: list[Request]) -> tuple[Sequence[Request], Cohort | None]:
        """Who may begin or go on in this step, first served first; and who goes on if none of these can.

        `candidates` are the running prompts, in their order, and then the first of the queue.
        """
        return candidates, None

    def num_query_tokens(self, request: Request, num_left: int, draft: Draft) -> int:
        """How many of the `num_left` (> 0) tokens to compute `request` brings into this step; 0 = not in this step."""
        room = self._room(draft)
        if not self._chunks:
            return num_left if num_left <= room else 0
        num_tokens = min(num_left, room, self._threshold or num_left)
        over = (request.num_tokens - num_left + num_tokens) % self._multiple
        if num_tokens == num_left or not over:
            return num_tokens
        if num_tokens > over or draft.prefill:
            return max(num_tokens - over, 0)
        up = min(num_left, num_tokens - over + self._multiple)  # else it might wait for ever
        return up if up <= draft.budget else 0

    def _room(self, draft: Draft) -> int:
        """Query tokens that the step still takes."""
        return draft.budget

    def turn(self, draft: Draft) -> Turn:
        """What the prompts of a finished draft do: those that got pages and a slot, or `draft.cohort`."""
        return Turn(Cohort.of(draft.prefill))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""

"""Chunked prefill: the budget that decodes leave goes to prompts, cut to fit (Sarathi-Serve, arXiv 2403.02310)."""

from collections.abc import Mapping

from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.request import Request


class ChunkedPrefill:
    """Decides which tokens of a prompt go into a step and which layers they pass: here, all layers at once.

    The scheduler asks in order, running prompts first, then the head of the queue, and finds pages and slots itself.
    Another prefill policy is another class with these two methods.
    """

    def __init__(self, config: SchedulerConfig):
        self._chunks = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold

    def num_query_tokens(self, request: Request, num_left: int, budget: int) -> int:
        """How many of the `num_left` (> 0) tokens to compute `request` brings into this step; 0 = not in this step."""
        if not self._chunks:
            return num_left if num_left <= budget else 0
        return min(num_left, budget, self._threshold or num_left)

    def span(self, picked: Mapping[Request, int]) -> tuple[tuple[int, int] | None, bool]:
        """The layers `[lo, hi)` that this step's prefill rows pass (None = all), and whether the last is among them.

        `picked` is what came of the answers above: request -> query tokens, for those that got pages and a slot.
        """
        return None, True

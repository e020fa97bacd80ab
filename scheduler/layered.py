"""Layered prefill: prompts pass the layers group by group, one group a step, beside decodes that pass all of them.

Chunked prefill cuts a prompt along its tokens, and reads all layers' weights again for each chunk. Layered prefill cuts
along the layers: each token passes each layer once, and a step computes one group of layers for the whole prompt. That
matters most for mixtures of experts, whose weights a chunk reads nearly all of. Source: arXiv 2510.08055.
"""

from collections.abc import Mapping

from jaxserve.scheduler.chunked import ChunkedPrefill
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.request import Request

GROUP_COUNTS = (1, 2, 4, 8, 16)
TOKENS_OF_A_GROUP = 512  # with which the paper's steps take as long as those of chunks of 512


class LayeredPrefill(ChunkedPrefill):
    """Prompts that begin together are a cohort. Nobody joins it, and no other prompt runs, until it has passed the last
    group; a member that ends or is pre-empted leaves it. A prompt that the budget cuts goes on in the next cohort.
    """

    def __init__(self, config: SchedulerConfig, num_layers: int):
        super().__init__(config)
        self._num_layers = num_layers
        self._members: dict[tuple[Request, int], int] = {}  # (request, epoch) -> query tokens
        self._borders: list[int] = []  # of the groups that are left, and the last layer's end

    def num_query_tokens(self, request: Request, num_left: int, budget: int) -> int:
        if not self._in_flight():
            return super().num_query_tokens(request, num_left, budget)
        return self._members.get((request, request.epoch), 0)

    def span(self, picked: Mapping[Request, int]) -> tuple[tuple[int, int], bool]:
        if not self._in_flight():
            self._members = {(request, request.epoch): count for request, count in picked.items()}
            self._borders = borders(self._num_layers, num_groups(sum(picked.values())))
        lo, hi, *rest = self._borders
        self._borders = [hi, *rest]
        if not rest:
            self._members = {}
        return (lo, hi), not rest

    def _in_flight(self) -> bool:
        return any(request.epoch == epoch for request, epoch in self._members)


def num_groups(num_tokens: int) -> int:
    """The fewest groups of at most `TOKENS_OF_A_GROUP` tokens' worth of work, of those that there are programs for."""
    return next((n for n in GROUP_COUNTS if n * TOKENS_OF_A_GROUP >= num_tokens), GROUP_COUNTS[-1])


def borders(num_layers: int, groups: int) -> list[int]:
    """Where the groups begin, and where the last one ends; the first ones take the layers that are left over."""
    size, rest = divmod(num_layers, min(groups, num_layers))
    return [group * size + min(group, rest) for group in range(min(groups, num_layers) + 1)]

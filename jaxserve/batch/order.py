"""In which order to run prompts that are all known in advance, after BatchLLM (arXiv 2412.03594).

Prompts that begin alike run one after the other, so that the prefix cache still holds what they share. Of two groups,
that goes first which has more to decode for each token of prompt: its rows are then still decoding when the prompts of
the others come, and a step that holds both uses the device well.
"""

from collections.abc import Sequence
from typing import Any

CHARS_PER_TOKEN = 4  # of text that is not tokenised yet; only ratios depend on it
MIN_SHARED_TOKENS = 16  # shorter beginnings in common are chance, and less than a page
MAX_LEVELS = 8  # of groups within groups

Prompt = str | Sequence[int]


def prefix_order(prompts: Sequence[Prompt], decode_lens: Sequence[int]) -> list[int]:
    """A permutation of the prompts: groups that share a beginning stay together, the decode-heavy first.

    A group's ratio is its tokens to decode over its tokens of prompt, what it shares counted once. Within a group the
    same holds for what follows the shared beginning. Prompts of equal ratio keep their order.

    Args:
        prompts: texts or lists of token ids; a text shares nothing with token ids.
        decode_lens: for each prompt, how many tokens it may decode.
    """
    texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
    ids = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]
    groups = [
        *_Kind(prompts, decode_lens, texts, CHARS_PER_TOKEN).groups(),
        *_Kind(prompts, decode_lens, ids, 1).groups(),
    ]
    return [i for group in _heavy_first(groups) for i in group[0]]


Group = tuple[list[int], int, int]  # indices, tokens to decode, units of prompt to compute


def _heavy_first(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (-group[1] / max(1, group[2]), min(group[0])))


class _Kind:
    """The prompts of one kind, sorted, so that those which share a beginning are neighbours."""

    def __init__(self, prompts: Sequence[Prompt], decode_lens: Sequence[int], chosen: list[int], per_token: int):
        comparable: Any = prompts  # all of one kind
        self._order: list[int] = sorted(chosen, key=lambda i: comparable[i])
        self._lens = [len(prompts[i]) for i in self._order]
        self._decode = [decode_lens[i] * per_token for i in self._order]
        neighbours = zip(self._order, self._order[1:], strict=False)
        self._shared = [shared_len(prompts[i], prompts[j]) for i, j in neighbours]  # [k]: of sorted k and k + 1
        self._min_shared = MIN_SHARED_TOKENS * per_token

    def groups(self) -> list[Group]:
        return self._groups(0, len(self._order), 0, MAX_LEVELS)

    def _groups(self, low: int, high: int, done: int, levels: int) -> list[Group]:
        """Groups of the sorted prompts [low, high), which share `done` units already, in no order."""
        groups, start = [], low
        for k in range(low, high):
            if k + 1 == high or self._shared[k] < done + self._min_shared:
                groups.append(self._group(start, k + 1, done, levels))
                start = k + 1
        return groups

    def _group(self, low: int, high: int, done: int, levels: int) -> Group:
        if high - low == 1:
            return [self._order[low]], self._decode[low], self._lens[low] - done
        shared = min(self._shared[low : high - 1])
        if levels:
            inner = _heavy_first(self._groups(low, high, shared, levels - 1))
        else:  # deeper than anybody shares: the sorted order keeps what is alike together
            inner = [([self._order[k]], self._decode[k], self._lens[k] - shared) for k in range(low, high)]
        indices = [i for group in inner for i in group[0]]
        return indices, sum(group[1] for group in inner), shared - done + sum(group[2] for group in inner)


def shared_len(a: Prompt, b: Prompt) -> int:
    """Length of the longest common beginning, by halving: comparing slices is what Python does fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

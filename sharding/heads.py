"""Which attention heads each rank of `tp` computes, whatever the counts."""

from typing import NamedTuple

import numpy as np

NONE = -1  # a head, row or column of zeros, which changes nothing


class HeadLayout(NamedTuple):
    """Ids of heads by rank of `tp`; NONE pads."""

    queries: np.ndarray  # [tp, K, G]: those that share each KV head of a rank
    kvs: np.ndarray  # [tp, K]

    @property
    def num_heads_per_rank(self) -> int:
        return self.queries[0].size

    @property
    def num_kv_heads_per_rank(self) -> int:
        return self.kvs.shape[1]


def head_layout(num_heads: int, num_kv_heads: int, kv: int, tp: int) -> HeadLayout:
    """KV heads in order over the ranks; with fewer of them than ranks, as many copies of each as fit.

    The query heads of a KV head are shared out among its copies. Those of a rank are padded to a multiple of `kv`,
    among whose ranks their results are shared out after attention.
    """
    group = num_heads // num_kv_heads
    copies = max(1, tp // num_kv_heads)
    num_kv_heads_per_rank = -(-num_kv_heads * copies // tp)
    share = -(-group // copies)
    share_padded = next(g for g in range(share, share + kv) if num_kv_heads_per_rank * g % kv == 0)
    place = np.arange(tp * num_kv_heads_per_rank)  # of a copy among all copies
    kvs = np.where(place < num_kv_heads * copies, place // copies, NONE)
    member = (place % copies * share)[:, None] + np.arange(share_padded)  # of the group
    end = np.minimum((place % copies + 1) * share, group)[:, None]
    queries = np.where((kvs[:, None] != NONE) & (member < end), kvs[:, None] * group + member, NONE)
    return HeadLayout(queries.reshape(tp, num_kv_heads_per_rank, share_padded), kvs.reshape(tp, num_kv_heads_per_rank))


def rows_of_heads(heads: np.ndarray, head_dim: int, first: int = 0) -> np.ndarray:
    """Rows `first + head * head_dim + [0, head_dim)` of each head, NONE for padding: [..., n * head_dim]."""
    rows = first + heads[..., None] * head_dim + np.arange(head_dim)
    return np.where(heads[..., None] == NONE, NONE, rows).reshape(*heads.shape[:-1], -1)

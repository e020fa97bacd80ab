"""The definition, one page at a time, in float32. Slow; the truth that tests compare with."""

import numpy as np
from jax import Array


def page_scores(probe: Array, meta: Array, layer: int, page_table: Array, num_pages: Array) -> np.ndarray:
    """`max_u probe . meta[u]` of each row, KV head and page of its sequence, `[T, K, max_pages]`; NaN beyond.

    The metadata `[L, P, K, M]` of a page and head are as many parts u as fit M. A page that is not here, of an id below
    0, scores 0. Source: arXiv 2406.10774, 2502.14866 (parts).
    """
    probes, kept = np.asarray(probe, np.float32), np.asarray(meta).astype(np.float32)
    (T, K, width), table = probes.shape, np.asarray(page_table)
    scores = np.full((T, K, table.shape[1]), np.nan, np.float32)
    for row in range(T):
        for number, page in enumerate(table[row, : int(num_pages[row])]):
            for head in range(K):
                parts = kept[layer, page, head].reshape(-1, width)
                scores[row, head, number] = (parts @ probes[row, head]).max() if page >= 0 else 0.0
    return scores

"""Paged attention by its definition, one query row at a time, in float32. Slow; the truth that tests compare with."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array

from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache


def paged_attention(
    q: Array,  # [rows, N, H]
    kv: KVCache,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    skip_below: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`softmax(cap(scale q k^T)) v` over the positions that each row sees, and the log of the softmax's denominator.

    Keys and values are what the pages hold, times the scales of the cache if it has any. Query head n attends with
    those of head `n // (N / K)`. Source: arXiv 1706.03762, 2305.13245 (grouped heads), 2004.05150 (sliding window),
    2408.00118 (soft cap), 2512.12087 (skipped pages).
    """
    if batch.by_kv_head:
        return _by_kv_head(q, kv, layer, batch, scale=scale, soft_cap=soft_cap, skip_below=skip_below)
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap, "skip_below": skip_below}
    return _attend(q, kv, None, layer, batch, **options)  # pyright: ignore[reportArgumentType]


def _attend(
    q: Array,
    kv: KVCache,
    mass: Array | None,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    skip_below: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Without the tokens whose `mass` [L, P, page_size] is -inf."""
    queries = np.asarray(q).astype(np.float32)
    num_rows, num_heads, _ = queries.shape
    out, lse = np.zeros(queries.shape, np.float32), np.full((num_rows, num_heads), -np.inf, np.float32)
    for row, (sequence, position) in enumerate(query_positions(batch, num_rows)):
        if position < 0:
            continue
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        keys = _read(kv.k, kv.k_scale, layer, batch.page_table, sequence, first, position + 1, num_heads)
        values = _read(kv.v, kv.v_scale, layer, batch.page_table, sequence, first, position + 1, num_heads)
        scores = np.einsum("nh,jnh->nj", queries[row], keys) * np.float32(scale)
        if soft_cap is not None:
            scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
        if mass is not None:
            scores = np.where(
                _tokens(mass, layer, batch.page_table, sequence, first, position + 1) > -np.inf, scores, -np.inf
            )
        if skip_below is not None:
            scores = _skip_pages(scores, first, kv.page_size, float(skip_below[row]))
        largest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        out[row] = np.einsum("nj,jnh->nh", weights / total, values)
        lse[row] = (largest + np.log(total))[:, 0]
    return out, lse


def _skip_pages(scores: np.ndarray, first: int, page_size: int, below: float) -> np.ndarray:
    """Scores [N, positions from `first` on] with -inf where a head skips a page."""
    scores = scores.copy()
    for head in scores:
        so_far = -np.inf
        start = 0
        while start < len(head):
            end = min(len(head), (first + start) // page_size * page_size + page_size - first)
            local = head[start:end].max()
            so_far = max(so_far, local)
            if local - so_far < below:
                head[start:end] = -np.inf
            start = end
    return scores


def _by_kv_head(
    q: Array, kv: KVCache, layer: int, batch: AttentionBatch, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Each KV head by itself, with its own table and the query heads of its group."""
    K = batch.page_table.shape[1]
    groups = q.reshape(q.shape[0], K, -1, q.shape[2])

    def head(i: int) -> tuple[np.ndarray, np.ndarray]:
        scales = (scale if scale is None else scale[:, i : i + 1] for scale in (kv.k_scale, kv.v_scale))
        k_scale, v_scale = scales
        own = KVCache(k=kv.k[..., i : i + 1, :], v=kv.v[..., i : i + 1, :], k_scale=k_scale, v_scale=v_scale)
        pages = dataclasses.replace(batch, page_table=batch.page_table[:, i], kv_lens=batch.kv_lens[:, i])
        mass = None if kv.mass is None else kv.mass[:, :, i]
        return _attend(groups[:, i], own, mass, layer, pages, sliding_window=None, **options)

    outs, lses = zip(*map(head, range(K)), strict=True)
    return np.concatenate(outs, axis=1), np.concatenate(lses, axis=1)


def query_positions(batch: AttentionBatch, num_rows: int) -> list[tuple[int, int]]:
    """(sequence, position) of each query row; position -1 for a row that belongs to no sequence."""
    kv_lens = np.asarray(batch.kv_lens).tolist()
    if batch.cu_q_lens is None:
        size = batch.max_q_len
        return [(s, max(-1, n - size + j)) for s, n in enumerate(kv_lens) for j in range(size)]
    cu_q_lens = np.asarray(batch.cu_q_lens).tolist()
    rows = []
    for s, n in enumerate(kv_lens):
        q_len = cu_q_lens[s + 1] - cu_q_lens[s]
        rows += [(s, n - q_len + j) for j in range(q_len)]
    return rows + [(0, -1)] * (num_rows - len(rows))


def _read(
    cache: Array,
    scale: Array | None,
    layer: int,
    page_table: Array,
    sequence: int,
    first: int,
    end: int,
    num_heads: int,
) -> np.ndarray:
    """Positions `[first, end)` of one sequence, repeated for the query heads that share them: [end - first, N, H]."""
    tokens = _tokens(cache, layer, page_table, sequence, first, end)
    if scale is not None:
        tokens = tokens * np.asarray(scale)[layer][:, None]
    return np.repeat(tokens, num_heads // tokens.shape[1], axis=1)


def _tokens(pages: Array, layer: int, page_table: Array, sequence: int, first: int, end: int) -> np.ndarray:
    """What pages [L, P, page_size, ...] hold of positions `[first, end)` of one sequence: [end - first, ...]."""
    own, table = np.asarray(pages)[layer], np.asarray(page_table)[sequence]
    page_size = own.shape[1]
    return np.stack([own[table[j // page_size], j % page_size] for j in range(first, end)]).astype(np.float32)

"""Paged attention in plain XLA: the CPU path, and the fallback of other backends.

How it works: a *tile* is Q consecutive query tokens of each of W sequences. `_tile` walks over the blocks of keys and
values that the tile can see, with an online softmax (arXiv 2205.14135), and stops at the last one: its trip count is
data, so the width of the page table costs nothing. The decode region is cut into groups of sequences of similar length,
the prefill region into tiles of consecutive tokens of one sequence. Loops run over the groups and tiles that exist.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache

NOTHING = -1e30  # score of what a row must not see; finite, so that exp(NOTHING - NOTHING) is not NaN


class _Reader(NamedTuple):
    """What every tile of one call shares."""

    kv: KVCache
    layer: int | Array
    batch: AttentionBatch
    scale: float
    sliding_window: int | None
    soft_cap: float | None


def paged_attention(
    q: Array,  # [rows, N, H]
    kv: KVCache,
    layer: int | Array,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    skip_below: Array | None = None,  # f32 [rows]
) -> tuple[Array, Array]:
    """Output `[rows, N, H]` in q.dtype and float32 log-sum-exp `[rows, N]`; see the package's `paged_attention`."""
    reader = _Reader(kv, layer, batch, scale, sliding_window, soft_cap)
    H = q.shape[2]
    heads = q.reshape(q.shape[0], kv.num_heads(H), -1, H)
    region = _decode if batch.cu_q_lens is None else _prefill
    out, lse = region(heads, skip_below, reader)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])


def _decode(q: Array, below: Array | None, reader: _Reader) -> tuple[Array, Array]:
    """q [B * max_q_len, K, G, H], below [B * max_q_len]."""
    rows, K, G, H = q.shape
    B, Q = reader.batch.kv_lens.shape[0], reader.batch.max_q_len
    W = decode_group(B)
    kv_lens = reader.batch.kv_lens.reshape(B, -1)
    order = jnp.argsort(jnp.max(kv_lens, axis=1)) if W < B else jnp.arange(B)  # similar lengths share a group
    q = q.reshape(B, Q, K, G, H).transpose(0, 2, 1, 3, 4)  # [B, K, Q, G, H]
    positions = kv_lens[..., None] - Q + jnp.arange(Q)[None, None]
    below = None if below is None else below.reshape(B, Q)

    def group(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        mine = jax.lax.dynamic_slice_in_dim(order, i * W, W)
        new = _tile(q[mine], positions[mine], None if below is None else below[mine], mine, reader)
        return jax.tree.map(lambda x, y: x.at[mine].set(y, unique_indices=True), carry, new)

    empty = (jnp.zeros(q.shape, jnp.float32), jnp.zeros(q.shape[:-1], jnp.float32))
    out, lse = jax.lax.fori_loop(0, B // W, group, empty)
    out, lse = out.transpose(0, 2, 1, 3, 4), lse.transpose(0, 2, 1, 3)
    return out.reshape(rows, K, G, H), lse.reshape(rows, K, G)


def _prefill(q: Array, below: Array | None, reader: _Reader) -> tuple[Array, Array]:
    """q [T, K, G, H], packed, below [T].

    Tiles come in the order of their rows. One that reaches past its sequence's end leaves zeros in rows of the next
    sequence, whose own tiles come later and overwrite them.
    """
    T, batch = q.shape[0], reader.batch
    assert batch.cu_q_lens is not None
    size = prefill_tile(T)
    starts, q_lens = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    num_tiles = -(-q_lens // size)
    ends = jnp.cumsum(num_tiles)  # of each sequence in the list of tiles
    padded = jnp.pad(q, ((0, size), (0, 0), (0, 0), (0, 0)))
    below = None if below is None else jnp.pad(below, (0, size))

    def tile(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        s = jnp.searchsorted(ends, i, side="right")
        first = (i - (ends[s] - num_tiles[s])) * size  # in the sequence's rows
        row = first + jnp.arange(size)
        positions = jnp.where(row < q_lens[s], batch.kv_lens[s] - q_lens[s] + row, -1)
        start = starts[s] + first
        mine = jax.lax.dynamic_slice_in_dim(padded, start, size).transpose(1, 0, 2, 3)[None]
        own = None if below is None else jax.lax.dynamic_slice_in_dim(below, start, size)[None]
        out, lse = _tile(mine, positions[None, None], own, s[None], reader)
        new = (out[0].transpose(1, 0, 2, 3), lse[0].transpose(1, 0, 2))
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), carry, new)

    empty = (jnp.zeros(padded.shape, jnp.float32), jnp.full(padded.shape[:-1], -jnp.inf, jnp.float32))
    out, lse = jax.lax.fori_loop(0, ends[-1], tile, empty)
    return out[:T], lse[:T]


def _tile(q: Array, positions: Array, below: Array | None, sequences: Array, reader: _Reader) -> tuple[Array, Array]:
    """Attention of query rows to the pages of their sequences.

    Args:
        q: [W, K, Q, G, H]. positions: i32 [W, 1 or K, Q], ascending in Q; -1 or less sees nothing.
        below: f32 [W, Q], see `skip_below`; None = nothing is skipped. sequences: i32 [W], rows of the batch.
    Returns:
        Output [W, K, Q, G, H] and log-sum-exp [W, K, Q, G], float32.
    """
    W, K, Q, G, H = q.shape
    block = kv_block(W, Q, reader.kv.page_size)
    first, num_blocks = _visible_blocks(positions.reshape(W, -1), reader.sliding_window, block)
    kv_lens = reader.batch.kv_lens[sequences].reshape(W, -1)  # [W, 1 or K]
    if reader.batch.own_lens is not None:
        kv_lens = reader.batch.own_lens[sequences][:, None]
        first, num_blocks = jnp.zeros_like(first), jnp.max(-(-kv_lens // block))
    dtype = matmul_dtype(Q * G, q.dtype)
    scales = reader.kv.layer_scales(reader.layer)
    k_scale, v_scale = (1.0, 1.0) if scales is None else (scale[None, :, None, None] for scale in scales)
    q = (q.reshape(W, K, Q * G, H).astype(jnp.float32) * (reader.scale * k_scale)).astype(dtype)
    row_position = jnp.repeat(positions, G, axis=2)[..., None]  # [W, 1 or K, Q * G, 1]

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        at = (first + i)[:, None] * block + jnp.arange(block)[None]  # [W, block], slots in the sequences' tables
        slots = _slots(sequences, at, reader)
        k = _gather(reader.kv.k, slots, (K, H)).astype(dtype)
        scores = jnp.einsum("wkrh,wkjh->wkrj", q, k, preferred_element_type=jnp.float32)
        if reader.soft_cap is not None:
            scores = reader.soft_cap * jnp.tanh(scores / reader.soft_cap)
        distance = row_position - _positions(sequences, at, reader)[:, None, None, :]
        visible = distance >= 0
        if reader.sliding_window is not None:
            visible &= distance < reader.sliding_window
        scores = jnp.where(visible, scores, NOTHING)
        if below is not None:
            scores = _without_skipped(scores, top, jnp.repeat(below, G, axis=1)[:, None], reader.kv.page_size)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        p = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        # Slots past the end may hold anything, NaN too, and 0 * NaN is NaN
        written = at[:, None] < kv_lens[..., None]
        v = _gather(reader.kv.v, slots, (K, H)).astype(dtype)
        v = jnp.where(written[..., None], v, jnp.zeros((), dtype))
        new = jnp.einsum("wkrj,wkjh->wkrh", p.astype(dtype), v, preferred_element_type=jnp.float32)
        return acc * decay[..., None] + new, new_top, total * decay + jnp.sum(p, axis=-1)

    zero = jnp.zeros(q.shape[:-1], jnp.float32)
    acc, top, total = jax.lax.fori_loop(0, num_blocks, body, (jnp.zeros(q.shape, jnp.float32), zero + NOTHING, zero))
    empty = top == NOTHING
    out = jnp.where(empty[..., None], 0.0, v_scale * acc / jnp.where(empty, 1.0, total)[..., None])
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
    return out.reshape(W, K, Q, G, H), lse.reshape(W, K, Q, G)


def _without_skipped(scores: Array, top: Array, below: Array, page_size: int) -> Array:
    """Scores [W, K, rows, block] with NOTHING in pages whose best is so far `below` [W, 1, rows] the best to there."""
    pages = scores.reshape(*scores.shape[:-1], -1, page_size)
    best = jnp.max(pages, axis=-1)
    so_far = jnp.maximum(jax.lax.cummax(best, axis=best.ndim - 1), top[..., None])
    skips = best - so_far < below[..., None]
    return jnp.where(skips[..., None], NOTHING, pages).reshape(scores.shape)


def _visible_blocks(positions: Array, window: int | None, block: int) -> tuple[Array, Array]:
    """The first block that each sequence of a tile sees [W], and how many the tile must walk."""
    last = jnp.max(positions, axis=1)
    lowest = jnp.min(jnp.where(positions < 0, last[:, None], positions), axis=1)
    first = jnp.zeros_like(last) if window is None else jnp.maximum(lowest - window + 1, 0) // block
    return first, jnp.max(jnp.where(last < 0, 0, last // block + 1 - first))


def _positions(sequences: Array, at: Array, reader: _Reader) -> Array:
    """Positions in their sequences of the slots [W, block] of their tables; none for slots past the last."""
    numbers, lens, page_size = reader.batch.page_numbers, reader.batch.own_lens, reader.kv.page_size
    if numbers is None or lens is None:
        return at
    page = numbers.at[sequences[:, None], at // page_size].get(mode="clip")
    return jnp.where(at < lens[sequences][:, None], page * page_size + at % page_size, jnp.iinfo(jnp.int32).max)


def _slots(sequences: Array, at: Array, reader: _Reader) -> Array:
    """Positions of the cache seen as [L * P * page_size, ...], for slots [W, block]: i32 [W, 1 or K, block]."""
    P, page_size = reader.kv.k.shape[1:3]
    table = reader.batch.page_table
    table = table[:, None] if table.ndim == 2 else table  # [S, 1 or K, max_pages]
    head = jnp.arange(table.shape[1])[None, :, None]
    page = table.at[sequences[:, None, None], head, at[:, None] // page_size].get(mode="clip")
    page = jnp.clip(page, 0, P - 1)  # here rather than in `_gather`, where it would cost as much as the reading
    return (reader.layer * P + page) * page_size + at[:, None] % page_size


def _gather(cache: Array, slots: Array, heads: tuple[int, int]) -> Array:
    """[W, K, block, H]: one gather that also brings the heads to the front.

    Rows come as they lie, on a TPU with two heads or half of one: another shape of the cache would be a copy of it.
    """
    (K, H), (position_rows, lanes) = heads, cache.shape[-2:]
    rows_of_head, heads_of_row = max(1, H // lanes), max(1, lanes // H)
    head = jnp.arange(K)
    of_position = (head // heads_of_row * rows_of_head)[:, None] + jnp.arange(rows_of_head)[None]  # [K, rows_of_head]
    row = (slots * position_rows)[..., None] + of_position[None, :, None]
    found = cache.reshape(-1, lanes).at[row].get(mode="promise_in_bounds")  # [W, K, block, rows_of_head, lanes]
    if heads_of_row == 1:
        return found.reshape(*found.shape[:3], H)
    parts = found.reshape(*found.shape[:3], heads_of_row, H)
    return jnp.take_along_axis(parts, (head % heads_of_row)[None, :, None, None, None], axis=3)[..., 0, :]


def decode_group(batch: int) -> int:
    """Sequences a group, a divisor of the batch: more share the cost of a turn, fewer fit the cache and vary less."""
    return next(w for w in (8, 4, 2, 1) if batch % w == 0)


def prefill_tile(num_tokens: int) -> int:
    """Query tokens a tile: more make larger matmuls, fewer waste less on short prompts and above the diagonal."""
    return min(num_tokens, 128)


def kv_block(num_seqs: int, num_rows: int, page_size: int) -> int:
    """Positions a block: more share the cost of a turn, fewer waste less at the ends of a group's sequences."""
    return max(page_size, 64 if num_rows == 1 and num_seqs >= 8 else 128)


def matmul_dtype(num_rows: int, dtype: DTypeLike) -> DTypeLike:
    """bfloat16 matmuls pay with many rows only; with few, the time goes to reading the operands."""
    return dtype if num_rows >= 32 else jnp.float32

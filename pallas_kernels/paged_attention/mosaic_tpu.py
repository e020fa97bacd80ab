"""Paged attention on TPU: what its kernel cannot do, and how queries and pages are laid out for it.

There the cache has rows of 128 numbers (`layers.kv_cache`), the lanes of a TPU: two heads of 64 lie in a row, since one
alone would be padded to 128. The queries of each are then zero in the other's half, and of the output only their half
is used. A head of 256 lies in two rows.
"""

import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels.paged_attention import mosaic_tpu_kernel as kernel, tpu_work
from jaxserve.pallas_kernels.paged_attention.types import FP8, LANES, AttentionBatch, KVCache, whole_rows

MAX_PAGES = 32 * 1024  # of a sequence: three tables take 384 KiB of the scalar memory, which has 1 MiB


def unsupported(q: Array, kv: KVCache, batch: AttentionBatch) -> str | None:
    """Why the kernel cannot serve this call; None if it can."""
    H, (_, _, page_size, position_rows, lanes) = q.shape[2], kv.k.shape
    if q.dtype != jnp.bfloat16:
        return f"queries must be bfloat16, got {q.dtype}"
    if H not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, got {H}"
    if reason := unsupported_rows(kv):
        return reason
    if position_rows * lanes % H:
        return f"heads of {H} must fill the {position_rows} rows of {lanes} of a position"
    if (rows := page_size * position_rows) % (tile := 32 // kv.k.dtype.itemsize):
        return f"a page must have a multiple of {tile} rows of {LANES} numbers, got {rows}"
    if batch.by_kv_head:
        return "a sequence must have one page table, not one for each KV head"
    if batch.own_lens is not None:
        return "rows must see all tokens of the pages in their tables: they hold one rank's pages"
    if (pages := batch.page_table.shape[1]) > MAX_PAGES:
        return f"a sequence may have {MAX_PAGES} pages, got {pages}"
    return None


def unsupported_rows(kv: KVCache) -> str | None:
    """Why kernels cannot move the positions of this cache as they lie; None if they can.

    What is padded would be copied for a kernel, which takes the cache as a matrix of rows.
    """
    position_rows, lanes = kv.k.shape[3:]
    if kv.k.dtype not in (jnp.bfloat16, FP8):
        return f"the cache must be bfloat16 or float8_e4m3fn, got {kv.k.dtype}"
    if lanes != LANES:
        return f"the cache must have rows of {LANES} numbers, as on a TPU, got {lanes}"
    if not whole_rows(position_rows, kv.k.dtype):
        numbers = "1, 4" if kv.k.dtype == FP8 else "1, 2, 4"
        return f"the KV heads of a position must fill {numbers} or a multiple of 8 rows of {LANES}, got {position_rows}"
    return None


def plan(
    batch: AttentionBatch, kv: KVCache, num_rows: int, num_heads: int, head_dim: int, sliding_window: int | None
) -> tpu_work.Work:
    """What the kernel needs to know of a region, whatever the layer."""
    return tpu_work.plan(batch, num_rows, sliding_window, tpu_work.tiling(kv, num_rows, num_heads, head_dim, batch))


def paged_attention(
    q: Array,  # [rows, N, H]
    kv: KVCache,
    layer: int | Array,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: object = False,
) -> tuple[Array, Array]:
    """Output `[rows, N, H]` in q.dtype and float32 log-sum-exp `[rows, N]`; see the package's `paged_attention`.

    Raises:
        NotImplementedError: see `unsupported`.
    """
    if reason := unsupported(q, kv, batch):
        raise NotImplementedError(f"paged_attention: implementation 'mosaic_tpu': {reason}")
    num_rows, N, H = q.shape
    L, P, _, _, lanes = kv.k.shape
    sizes = tpu_work.tiling(kv, num_rows, N, H, batch)
    work = batch.work or tpu_work.plan(batch, num_rows, sliding_window, sizes)
    scales = kv.layer_scales(layer)
    factor = scale * (kernel.LOG2_E if soft_cap is None else 1 / soft_cap)  # of what the softmax, or tanh, is taken
    factor = factor if scales is None else factor * _of_query_heads(scales[0], N)
    queries = _beside(q.astype(jnp.float32) * factor, kv).astype(q.dtype)
    out, lse = kernel.attend(
        _tiles(queries, work, sizes),
        (kv.k.reshape(L, P, -1, lanes), kv.v.reshape(L, P, -1, lanes)),
        layer,
        work,
        sizes,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        out_dtype=q.dtype if scales is None else jnp.float32,
        interpret=interpret,
    )
    exists = work.slots[:, None] >= 0
    out = _own_half(jnp.where(exists[..., None], _rows(out, work, sizes), 0), kv, H)
    if scales is not None:
        out = out * _of_query_heads(scales[1], N)
    lse = jnp.where(exists, _rows(lse[..., None], work, sizes)[..., 0], -jnp.inf)
    return out.astype(q.dtype), lse


def _of_query_heads(of_kv_heads: Array, num_heads: int) -> Array:
    """[K] -> [1, N, 1]."""
    return jnp.repeat(of_kv_heads, num_heads // of_kv_heads.shape[0])[None, :, None]


def _half_of_heads(num_heads: int, num_kv_heads: int) -> Array:
    """i32 [1, N, 1]: in which half of its row is the KV head of each query head, where two share one."""
    return (jnp.arange(num_heads) // (num_heads // num_kv_heads) % 2)[None, :, None]


def _beside(q: Array, kv: KVCache) -> Array:
    """[rows, N, H] -> [rows, N, max(H, 128)], zero where the row of the cache holds another head."""
    _, N, H = q.shape
    if H >= LANES:
        return q
    half = _half_of_heads(N, kv.k.shape[3] * 2)
    return jnp.concatenate([jnp.where(half == n, q, 0) for n in range(2)], axis=2)


def _own_half(out: Array, kv: KVCache, head_dim: int) -> Array:
    """[rows, N, max(H, 128)] -> [rows, N, H]: of each row its head's part."""
    if head_dim >= LANES:
        return out
    half = _half_of_heads(out.shape[1], kv.k.shape[3] * 2)
    return jnp.where(half == 0, *jnp.split(out, 2, axis=2))


def _tiles(q: Array, work: tpu_work.Work, sizes: tpu_work.Tiling) -> Array:
    """[query rows, N, lanes] -> [blocks, passes, rows, lanes]."""
    lanes = q.shape[2]
    q = q[work.tokens].reshape(-1, sizes.tokens, sizes.passes, sizes.heads, lanes).transpose(0, 2, 1, 3, 4)
    q = q.reshape(q.shape[0], sizes.passes, sizes.tokens * sizes.heads, lanes)
    return jnp.pad(q, ((0, 0), (0, 0), (0, sizes.rows - q.shape[2]), (0, 0)))


def _rows(x: Array, work: tpu_work.Work, sizes: tpu_work.Tiling) -> Array:
    """[blocks, passes, rows, ...] -> [query rows, N, ...]; anything in rows without a tile."""
    last = x.shape[-1]
    x = x[:, :, : sizes.tokens * sizes.heads].reshape(-1, sizes.passes, sizes.tokens, sizes.heads, last)
    x = x.transpose(0, 2, 1, 3, 4).reshape(-1, sizes.passes * sizes.heads, last)
    return x[jnp.maximum(work.slots, 0)]

"""Paged attention on NVIDIA Hopper: which kernel serves a region, with which tiling, and what neither can."""

import json
from pathlib import Path

import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels.paged_attention import (
    decode_work,
    mosaic_gpu_decode as decode,
    mosaic_gpu_plan,
    mosaic_gpu_prefill as prefill,
    prefill_work,
)
from jaxserve.pallas_kernels.paged_attention.hopper import (
    ROWS,
    SHARED_MEMORY_BYTES,
    WIDE,
    Scoring,
    unsupported_dtypes,
)
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.pallas_kernels.target import target_device

FEWEST = 8  # query rows of a tile
ALIGNMENT = 1024  # of an array in shared memory
MAX_WIDE = float(jnp.finfo(WIDE).max)
TILINGS: dict[str, dict[str, dict[str, int]]] = json.loads(Path(__file__).with_name("tilings.json").read_text())


def unsupported(q: Array, kv: KVCache, batch: AttentionBatch) -> str | None:
    """Why the kernels cannot serve this call; None if they can."""
    (_, N, H), K = q.shape, kv.k.shape[3]
    if reason := unsupported_dtypes("queries", q.dtype, kv):
        return reason
    if H not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, got {H}"
    if kv.page_size not in (8, 16, 32, 64) and kv.page_size % 128:
        return f"page_size must be 8, 16, 32, 64 or a multiple of 128, got {kv.page_size}"
    if batch.own_lens is not None:
        return "rows must see all tokens of the pages in their tables: they hold one rank's pages"
    if batch.cu_q_lens is None and batch.max_q_len * (N // K) > ROWS:
        return f"at most {ROWS} query rows a KV head, got {batch.max_q_len} tokens of {N // K} heads"
    return None


def plan(
    batch: AttentionBatch,
    kv: KVCache,
    num_rows: int,
    num_heads: int,
    sliding_window: int | None,
    *,
    interpret: bool = False,
) -> decode_work.Work | prefill_work.Work:
    """What the kernels need to know of a region, whatever the layer."""
    if batch.cu_q_lens is not None:
        return prefill_work.plan(batch, num_rows)
    tiling = decode_tiling(kv, num_heads, batch.max_q_len)
    heads = (num_heads, kv.k.shape[3])
    if batch.by_kv_head and (interpret or target_device().platform == "gpu"):
        return mosaic_gpu_plan.plan(batch, heads, kv.page_size, tiling, interpret=interpret)
    return decode_work.plan(batch, heads, kv.page_size, sliding_window, tiling)


def paged_attention(
    q: Array,
    kv: KVCache,
    layer: int | Array,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Output `[rows, N, H]` in q.dtype and float32 log-sum-exp `[rows, N]`; see the package's `paged_attention`.

    Raises:
        NotImplementedError: see `unsupported`.
    """
    if reason := unsupported(q, kv, batch):
        raise NotImplementedError(f"paged_attention: implementation 'mosaic_gpu': {reason}")
    scoring = Scoring(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    work = batch.work or plan(batch, kv, q.shape[0], q.shape[1], sliding_window, interpret=interpret)
    given = (q if kv.k.dtype == q.dtype else _as_wide(q), kv, layer, batch, scoring)
    if isinstance(work, prefill_work.Work):
        out, lse = prefill.paged_attention(*given, prefill_tiling(kv), work, interpret=interpret)
    else:
        tiling = decode_tiling(kv, q.shape[1], batch.max_q_len)
        out, lse = decode.paged_attention(*given, tiling, work, interpret=interpret)
    return out.astype(q.dtype), lse


def _as_wide(q: Array) -> Array:
    """Queries beside pages in float8; the largest for what `WIDE` cannot hold."""
    return jnp.clip(q.astype(jnp.float32), -MAX_WIDE, MAX_WIDE).astype(WIDE)


def decode_tiling(kv: KVCache, num_heads: int, q_len: int) -> decode_work.Tiling:
    *_, K, H = kv.k.shape
    rows = decode_work.rows_of_tile(num_heads, K, q_len)
    return decode_work.Tiling(**tuned("decode", H, kv.k.dtype.itemsize, rows), blocks=num_multiprocessors())


def prefill_tiling(kv: KVCache) -> prefill_work.Tiling:
    return prefill_work.Tiling(
        **tuned("prefill", kv.k.shape[4], kv.k.dtype.itemsize), multiprocessors=num_multiprocessors()
    )


def tuned(kernel: str, head_dim: int, itemsize: int = 2, rows: int = FEWEST) -> dict[str, int]:
    """What `benchmarks/tune.py` found fastest, which may be the computed tiling; that one where it has not looked.

    On an H200 at head_dim 128 these are the computed ones: decoding by one worker with blocks of 128 was slower at five
    of the seven shapes of `benchmarks/shapes.py`, and a third stage made prefill 3 to 4 % slower. It has not looked at
    pages in float8, of `itemsize` 1, nor at decoding more than the fewest query rows at once.
    """
    found = TILINGS[kernel].get(str(head_dim)) if (itemsize, rows) == (2, FEWEST) else None
    return found or computed(kernel, head_dim, itemsize, rows)


def computed(kernel: str, head_dim: int, itemsize: int = 2, rows: int = FEWEST) -> dict[str, int]:
    """Decode: two workers a multiprocessor; one where two would have too few units ahead or registers; three where
    pages in float8 give them more to do and few rows leave the registers for it; and the units that then fit. Prefill:
    the largest block whose scores and output share the registers of a warpgroup, and the next one ahead.
    """
    if kernel == "prefill":
        return {"block": 128 if head_dim <= 128 else 64, "stages": 2}
    pairs = 2
    if head_dim > 128 or (itemsize == 1 and rows > 32):
        pairs = 1
    elif (itemsize, rows) == (1, FEWEST):
        pairs = 3
    choices = [{"block": 64, "pairs": pairs, "stages": stages} for stages in range(1, 17)]
    sizes = [shared_bytes(kernel, head_dim, **choice, itemsize=itemsize, rows=rows) for choice in choices]
    return [choice for choice, size in zip(choices, sizes, strict=True) if size <= SHARED_MEMORY_BYTES][-1]


def shared_bytes(
    kernel: str, head_dim: int, *, block: int, stages: int, pairs: int = 1, itemsize: int = 2, rows: int = FEWEST
) -> int:
    """Of a CUDA block; when decoding, `rows` of a tile at once."""
    if kernel == "prefill":
        position_bytes = 2 if itemsize == 2 else 2 + itemsize
        return (prefill_work.TILE * 2 + stages * 2 * block * position_bytes) * head_dim
    pages = stages * block * head_dim * itemsize
    wide = 0 if itemsize == 2 else block * head_dim * 2
    a_worker = [pages, pages, wide, rows * head_dim * 2, rows * block * 4, rows * block * 2, *3 * [rows * 4]]
    return sum(-(-pairs * size // ALIGNMENT) * ALIGNMENT for size in a_worker)


def num_multiprocessors() -> int:
    """Of the GPU that programs are made for; of an H200 where they only run in the interpreter."""
    device = target_device()
    return device.core_count if device.platform == "gpu" else 132

"""Attention over the paged KV cache."""

import dataclasses
from typing import Any, Literal

from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.paged_attention import decode_work, mosaic_gpu, mosaic_tpu, prefill_work, xla
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch as AttentionBatch, KVCache as KVCache
from jaxserve.pallas_kernels.target import target_device

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]
BY_KV_HEAD = "page tables for each KV head are served by xla only"
SKIPS = "pages are skipped below a threshold by xla only"
HopperWork = decode_work.Work | prefill_work.Work  # what `prepare` adds to a batch for the Hopper kernels


def paged_attention(
    q: Float[Array, "rows N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    skip_below: Float[Array, " rows"] | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Causal attention of one region's query rows to their sequences' pages in `layer` of the cache.

    A query at position i sees the positions j <= i of its sequence, and with a sliding window only i - j < window.
    Scores are `scale * q.k`, then `soft_cap * tanh(scores / soft_cap)`, in float32. The keys and values of this step's
    own tokens must be in the cache already. Rows without a sequence (padding) come out as zeros.

    Args:
        layer: index of the layer in the cache of its kind.
        skip_below: at most 0. Of the pages of its table, in order, a query head of a row skips those whose largest
            score minus the largest up to and with this page is less (BLASST, arXiv 2512.12087); None skips none.
        batch: as it is, or as `prepare` returned it for these lengths and this sliding window.
        implementation: None chooses by backend and falls back; a name is used or refused.
    Returns:
        `[rows, N, H]` in q.dtype; with `return_lse` also float32 `[rows, N]`, the natural logarithm of the sum of
        exp(scores), -inf for a row that sees nothing.
    Raises:
        NotImplementedError: the named implementation cannot do this; the message says why.
    """
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    if implementation is None:
        implementation = _choose(q, kv, batch, skips=skip_below is not None)
    if batch.by_kv_head:
        assert (batch.max_q_len, batch.cu_q_lens, sliding_window) == (1, None, None)
        if implementation != "xla":
            raise NotImplementedError(BY_KV_HEAD)
    if skip_below is not None:
        assert batch.page_numbers is None
        if implementation != "xla":
            raise NotImplementedError(SKIPS)
    if implementation == "mosaic_gpu":
        out, lse = mosaic_gpu.paged_attention(q, kv, layer, batch, **options)
    elif implementation == "mosaic_tpu":
        out, lse = mosaic_tpu.paged_attention(q, kv, layer, batch, **options)
    else:
        out, lse = xla.paged_attention(q, kv, layer, batch, **options, skip_below=skip_below)
    return (out, lse) if return_lse else out


def prepare(
    batch: AttentionBatch,
    kv: KVCache,
    *,
    num_rows: int,
    num_heads: int,
    sliding_window: int | None,
    head_dim: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionBatch:
    """The batch with what its attention needs to work out once a step rather than once a layer.

    `num_rows` are the query rows of the region, `num_heads` and `sliding_window` those of the layers it is for, and so
    is `head_dim`, None if it is what the last dimension of the cache says.
    """
    match implementation or preferred():
        case "mosaic_gpu":
            work = mosaic_gpu.plan(batch, kv, num_rows, num_heads, sliding_window)
        case "mosaic_tpu":
            work = mosaic_tpu.plan(batch, kv, num_rows, num_heads, head_dim or kv.k.shape[-1], sliding_window)
        case _:
            return batch
    return dataclasses.replace(batch, work=work)


def preferred() -> Implementation:
    """What is fastest on the device that programs are made for, where it can serve."""
    device = target_device()
    if device.platform == "tpu":
        return "mosaic_tpu"
    hopper = device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")
    return "mosaic_gpu" if hopper else "xla"


def _choose(q: Array, kv: KVCache, batch: AttentionBatch, *, skips: bool) -> Implementation:
    """The best that can do this."""
    best = preferred()
    if best == "xla":
        return best
    kernels = mosaic_gpu if best == "mosaic_gpu" else mosaic_tpu
    reason = SKIPS if skips else BY_KV_HEAD if batch.by_kv_head else kernels.unsupported(q, kv, batch)
    if reason:
        say_once("paged attention", reason)
    return "xla" if reason else best

"""Attention over the paged KV cache."""

import dataclasses
from typing import Any, Literal

import jax
from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu, xla
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch as AttentionBatch, KVCache as KVCache

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


def paged_attention(
    q: Float[Array, "rows N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Causal attention of one region's query rows to their sequences' pages in `layer` of the cache.

    A query at position i sees the positions j <= i of its sequence, and with a sliding window only i - j < window.
    Scores are `scale * q.k`, then `soft_cap * tanh(scores / soft_cap)`, in float32. The keys and values of this step's
    own tokens must be in the cache already. Rows without a sequence (padding) come out as zeros.

    Args:
        layer: index of the layer in the cache of its kind.
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
        implementation = _choose(q, kv, batch)
    if implementation == "mosaic_gpu":
        out, lse = mosaic_gpu.paged_attention(q, kv, layer, batch, **options)
    elif implementation == "xla":
        out, lse = xla.paged_attention(q, kv, layer, batch, **options)
    else:
        raise NotImplementedError(
            f"paged_attention: implementation {implementation!r} is not written yet; use 'xla', 'mosaic_gpu' or None"
        )
    return (out, lse) if return_lse else out


def prepare(
    batch: AttentionBatch,
    kv: KVCache,
    *,
    num_rows: int,
    sliding_window: int | None,
    implementation: Implementation | None = None,
) -> AttentionBatch:
    """The batch with what its attention needs to work out once a step rather than once a layer.

    `num_rows` are the query rows of the region, `sliding_window` that of the layers it is for.
    """
    if (implementation or preferred()) != "mosaic_gpu":
        return batch
    return dataclasses.replace(batch, work=mosaic_gpu.plan(batch, kv, num_rows, sliding_window))


def preferred() -> Implementation:
    """What is fastest on the device here, where it can serve."""
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")
    return "mosaic_gpu" if hopper else "xla"


def _choose(q: Array, kv: KVCache, batch: AttentionBatch) -> Implementation:
    """The best that can do this."""
    if preferred() == "xla":
        return "xla"
    reason = mosaic_gpu.unsupported(q, kv, batch)
    if reason:
        say_once("paged attention", reason)
    return "xla" if reason else "mosaic_gpu"

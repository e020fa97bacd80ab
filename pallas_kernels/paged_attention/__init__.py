"""Attention over the paged KV cache."""

from typing import Any, Literal

from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.paged_attention import xla
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
        implementation: None chooses by backend and falls back; a name is used or refused.
    Returns:
        `[rows, N, H]` in q.dtype; with `return_lse` also float32 `[rows, N]`, the natural logarithm of the sum of
        exp(scores), -inf for a row that sees nothing.
    Raises:
        NotImplementedError: the named implementation cannot do this; the message says why.
    """
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f"paged_attention: implementation {implementation!r} is not written yet; use 'xla' or None"
        )
    out, lse = xla.paged_attention(q, kv, layer, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    return (out, lse) if return_lse else out

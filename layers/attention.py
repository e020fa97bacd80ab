"""Attention of one layer over both regions of a step: write keys and values, then read the pages."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.kv_cache import KVCache, StepBatch, write_kv
from jaxserve.layers.linear import Weight, linear
from jaxserve.pallas_kernels.paged_attention import Implementation, paged_attention, prepare


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What the layers of one kind ask of attention."""

    scale: float
    sliding_window: int | None = None  # positions that a query sees, itself included; None = all before it
    soft_cap: float | None = None


def project_qkv(
    x: Float[Array, "T D"], qkv: Weight, bias: Float[Array, " out"] | None, num_heads: int, num_kv_heads: int
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Queries, keys and values from one fused projection, whose rows are those of q, then k, then v."""
    heads = linear(x, qkv, bias).reshape(x.shape[0], num_heads + 2 * num_kv_heads, -1)
    q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    return q, k, v


def prepare_batch(
    batch: StepBatch, kv: KVCache, spec: AttentionSpec, implementation: Implementation | None = None
) -> StepBatch:
    """The batch for the layers of one kind, whose cache is `kv`: what all of them share is worked out here."""
    cut = batch.num_decode_rows
    options = {"sliding_window": spec.sliding_window, "implementation": implementation}
    decode, prefill = (
        None if region is None else prepare(region, kv, num_rows=num_rows, **options)
        for region, num_rows in ((batch.decode, cut), (batch.prefill, batch.token_ids.shape[0] - cut))
    )
    return dataclasses.replace(batch, decode=decode, prefill=prefill)


def attend(
    q: Float[Array, "rows N H"],
    k: Float[Array, "rows K H"],
    v: Float[Array, "rows K H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    batch: StepBatch,
    spec: AttentionSpec,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows N H"], KVCache]:
    """Attention output of every row, and the cache with this step's keys and values in it."""
    kv = write_kv(kv, layer, k, v, batch.page_ids, batch.page_offsets)
    cut = batch.num_decode_rows
    outs = [
        paged_attention(rows, kv, layer, region, **dataclasses.asdict(spec), implementation=implementation)
        for rows, region in ((q[:cut], batch.decode), (q[cut:], batch.prefill))
        if region is not None
    ]
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs), kv

"""Attention of one layer over both regions of a step: rotate, write keys and values, then read the pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch, write_kv
from jaxserve.layers.linear import Weight, linear
from jaxserve.layers.rope import apply_rope, rotation
from jaxserve.layers.sparse.attend import Attention, Draw, attend_decode, attend_prefill
from jaxserve.layers.sparse.hooks import LayerPolicies, SparseStep
from jaxserve.layers.sparse.mass import begin_mass
from jaxserve.layers.sparse.page_meta import fold
from jaxserve.pallas_kernels import rope_kv_write
from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.paged_attention import HopperWork, Implementation, paged_attention, prepare
from jaxserve.pallas_kernels.paged_attention.mass import add_mass
from jaxserve.pallas_kernels.target import kept_apart
from jaxserve.sharding.collectives import axis_size
from jaxserve.sharding.kv_parallel import AXIS, local_pages, lse_over_kv, merge_over_kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What the layers of one kind ask of attention."""

    num_heads: int
    num_kv_heads: int
    scale: float
    sliding_window: int | None = None  # positions that a query sees, itself included; None = all before it
    soft_cap: float | None = None
    frequencies: np.ndarray  # of the rotary embedding, float32 [H/2]

    @property
    def head_dim(self) -> int:
        return 2 * len(self.frequencies)


def project_qkv(
    x: Float[Array, "T D"], qkv: Weight, bias: Float[Array, " out"] | None, head_dim: int
) -> Float[Array, "T heads H"]:
    """Queries, keys and values from one fused projection, whose rows are those of q, then k, then v."""
    return kept_apart(linear(x, qkv, bias)).reshape(x.shape[0], -1, head_dim)


def prepare_batch(
    batch: StepBatch,
    kv: KVCache,
    spec: AttentionSpec,
    implementation: Implementation | None = None,
    policies: LayerPolicies | None = None,
) -> StepBatch:
    """The batch for the layers of one kind, whose cache is `kv`: what all of them share is worked out here.

    `policies` are those of sparse attention in these layers; layers with a sliding window have none.
    """
    cut = batch.num_decode_rows
    options = {
        "num_heads": spec.num_heads // spec.num_kv_heads * kv.num_heads(spec.head_dim),
        "head_dim": spec.head_dim,
        "sliding_window": spec.sliding_window,
        "implementation": implementation,
    }
    decode, prefill = (
        None
        if region is None
        else prepare(_simplest(own_pages(region, kv, spec.sliding_window), spec), kv, num_rows=num_rows, **options)
        for region, num_rows in ((batch.decode, cut), (batch.prefill, batch.token_ids.shape[0] - cut))
    )
    sparse = None
    if policies is not None and spec.sliding_window is None:
        sparse = SparseStep(policies=policies, decode=batch.decode, prefill=batch.prefill)
    turn = rotation(batch.positions, spec.frequencies)
    if on_hopper(decode, prefill):
        turn = rope_kv_write.for_heads(turn, kv)
    return dataclasses.replace(
        batch, decode=decode, prefill=prefill, rotation=turn, real=batch.real_rows(), sparse=sparse
    )


def own_pages(region: AttentionBatch, kv: KVCache, sliding_window: int | None) -> AttentionBatch:
    """The region with only those pages in its table that are on this rank and that some row sees."""
    if axis_size(AXIS) == 1:
        return region
    table, kv_lens, page_size = region.page_table, region.kv_lens, kv.page_size
    local = local_pages(table, kv.k.shape[1])
    number = jax.lax.broadcasted_iota(jnp.int32, table.shape, 1)
    tokens = jnp.clip(kv_lens[:, None] - number * page_size, 0, page_size)  # in each page
    mine = (tokens > 0) & (local >= 0)
    if sliding_window is not None:
        q_lens = region.max_q_len if region.cu_q_lens is None else jnp.diff(region.cu_q_lens)
        lowest = kv_lens - q_lens + 1 - sliding_window  # position that the first row sees
        mine &= (number + 1) * page_size > lowest[:, None]
    to = jnp.where(mine, jnp.cumsum(mine, axis=1) - 1, table.shape[1])
    rows = jnp.arange(table.shape[0])[:, None]
    return dataclasses.replace(
        region,
        page_table=jnp.zeros_like(table).at[rows, to].set(local, mode="drop"),
        page_numbers=jnp.zeros_like(table).at[rows, to].set(number, mode="drop"),
        own_lens=jnp.sum(jnp.where(mine, tokens, 0), axis=1),
    )


def _simplest(region: AttentionBatch, spec: AttentionSpec) -> AttentionBatch:
    """The same sequences with all positions from 0 on, where rows see all of what a table with few pages holds."""
    if region.own_lens is None or region.cu_q_lens is not None or region.max_q_len > 1 or spec.sliding_window:
        return region
    return dataclasses.replace(region, kv_lens=region.own_lens, own_lens=None, page_numbers=None)


def on_hopper(*regions: AttentionBatch | None) -> bool:
    """Whether a region is prepared for the kernels."""
    return any(region is not None and isinstance(region.work, HopperWork) for region in regions)


def attend(
    heads: Float[Array, "rows heads H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    batch: StepBatch,
    spec: AttentionSpec,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows N H"], KVCache]:
    """Attention output of every row, and the cache with this step's keys and values in it.

    With KV parallelism the output has this rank's share of the heads.

    Args:
        heads: N queries, K keys and K values of each row, before their rotation.
        batch: as `prepare_batch` made it.
    """
    q, kv = rotate_and_write(heads, kv, layer, batch, spec.num_kv_heads)
    cut = batch.num_decode_rows
    options = {"scale": spec.scale, "sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}

    def attention(
        rows: Array, region: AttentionBatch, skip_below: Array | None = None, cache: KVCache = kv
    ) -> tuple[Array, Array]:
        how = {"skip_below": skip_below, "implementation": implementation}
        return paged_attention(rows, cache, layer, region, **options, **how, return_lse=True)

    def draw(rows: Array, lse: Array, counts: Array, cache: KVCache, region: AttentionBatch) -> KVCache:
        how = {"scale": spec.scale, "soft_cap": spec.soft_cap}
        return dataclasses.replace(cache, mass=add_mass(rows, lse_over_kv(lse), counts, cache, layer, region, **how))

    if batch.sparse is not None:
        outs, kv = _attend_sparse(q, kv, layer, batch, batch.sparse, attention, draw)
    else:
        regions = ((q[:cut], batch.decode), (q[cut:], batch.prefill))
        outs = [attention(rows, region) for rows, region in regions if region is not None]
    out, lse = outs[0] if len(outs) == 1 else map(jnp.concatenate, zip(*outs, strict=True))
    return merge_over_kv(out[:, : spec.num_heads], lse[:, : spec.num_heads]), kv


def _attend_sparse(
    q: Array,
    kv: KVCache,
    layer: int | Array,
    batch: StepBatch,
    sparse: SparseStep,
    attention: Attention,
    draw: Draw,
) -> tuple[list[tuple[Array, Array]], KVCache]:
    """Attention of each region's rows to the pages that policies select for them."""
    outs, cut, policies = [], batch.num_decode_rows, sparse.policies
    if sparse.decode is not None and policies.decode is not None:
        out, kv = attend_decode(policies.decode, q[:cut], kv, layer, sparse.decode, attention, draw)
        outs.append(out)
    elif batch.decode is not None:
        outs.append(attention(q[:cut], batch.decode))
    if sparse.prefill is not None and (prefill := batch.prefill) is not None:
        out, kv = attend_prefill(policies, q[cut:], kv, layer, sparse.prefill, prefill, attention, draw)
        outs.append(out)
    return outs, kv


def rotate_and_write(
    heads: Float[Array, "rows heads H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    batch: StepBatch,
    num_kv_heads: int,
) -> tuple[Float[Array, "rows N H"], KVCache]:
    """Rotated queries, and the cache with this step's keys and values, and with what policies keep of them."""
    q, kv = _rotate_and_write(heads, kv, layer, batch, num_kv_heads)
    policies = None if batch.sparse is None else batch.sparse.policies
    if policies is not None and (page_meta := policies.page_meta):
        kv = fold(kv, layer, page_meta, heads.shape[2], batch.page_ids, batch.page_offsets)
    if policies is not None and policies.retain:
        kv = begin_mass(kv, layer, batch.page_ids, batch.page_offsets)
    return q, kv


def _rotate_and_write(
    heads: Array, kv: KVCache, layer: int | Array, batch: StepBatch, num_kv_heads: int
) -> tuple[Array, KVCache]:
    assert batch.rotation is not None, "not prepared"
    cos, sin = batch.rotation
    if on_hopper(batch.decode, batch.prefill):
        reason = rope_kv_write.unsupported(heads, kv)
        if reason is None:
            return rope_kv_write.rope_kv_write(heads, (cos, sin), kv, layer, batch.page_ids, batch.page_offsets)
        say_once("the write of keys and values", reason)
    K, padded = num_kv_heads, kv.num_heads(heads.shape[2])
    q, k, v = jnp.split(heads, [heads.shape[1] - 2 * K, heads.shape[1] - K], axis=1)
    q, k = (apply_rope(x, (cos[:, :1], sin[:, :1])) for x in (q, k))
    if padded > K:
        more = padded - K
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, count), (0, 0))) for x, count in ((q, q.shape[1] // K * more), (k, more), (v, more))
        )
    return q, write_kv(kv, layer, k, v, batch.page_ids, batch.page_offsets)

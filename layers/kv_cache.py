"""The paged KV cache as layers see it, and the batch of one step."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import SparseStep
from jaxserve.pallas_kernels import kv_write
from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.paged_attention import preferred
from jaxserve.pallas_kernels.paged_attention.types import (
    LANES,
    AttentionBatch as AttentionBatch,
    KVCache as KVCache,
    quantize,
    whole_rows,
)
from jaxserve.pallas_kernels.target import target_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One step as the model sees it: decode rows first (B * q of them), then T prefill rows. Either may be absent."""

    token_ids: Array  # i32 [B*q + T]
    positions: Array  # i32 [B*q + T]
    page_ids: Array  # i32 [B*q + T], where each row's key and value go; 0 for padding rows
    page_offsets: Array  # i32 [B*q + T]
    decode: AttentionBatch | None
    prefill: AttentionBatch | None
    rotation: tuple[Array, Array] | None = None  # of `layers.rope`, once `prepare_batch` knows the layers' frequencies
    real: Array | None = None  # bool [B*q + T], of `real_rows`, once prepared
    sparse: SparseStep | None = None  # in layers with sparse attention, once prepared

    @property
    def num_decode_rows(self) -> int:
        return 0 if self.decode is None else self.decode.kv_lens.shape[0] * self.decode.max_q_len

    def real_rows(self) -> Array:
        """bool [B*q + T]: which rows are a token of a sequence; the others are padding."""
        regions = []
        if self.decode is not None:
            regions.append(jnp.repeat(self.decode.kv_lens > 0, self.decode.max_q_len))
        if self.prefill is not None:
            assert self.prefill.cu_q_lens is not None
            regions.append(jnp.arange(self.token_ids.shape[0] - self.num_decode_rows) < self.prefill.cu_q_lens[-1])
        return jnp.concatenate(regions)


@runtime_checkable  # so that tests can check it
class CacheShape(Protocol):
    """What a cache needs to know of a model; `jaxserve.models.base.ModelConfig` is one."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def init_kv_cache(config: CacheShape, *, num_pages: int, page_size: int, dtype: DTypeLike) -> dict[str, KVCache]:
    """Empty caches, one for each layer kind. They share page ids: page p of every kind holds the same tokens."""
    position = position_shape(config.num_kv_heads, config.head_dim, dtype, target_device().platform)
    num_kv_heads = math.prod(position) // config.head_dim
    return {
        kind: KVCache.zeros(
            config.layer_kinds.count(kind), num_pages, page_size, position, dtype, num_kv_heads=num_kv_heads
        )
        for kind in dict.fromkeys(config.layer_kinds)
    }


def position_shape(num_kv_heads: int, head_dim: int, dtype: DTypeLike, platform: str) -> tuple[int, int]:
    """The shape of one position's keys, or values, in the cache of a device of this platform.

    On TPU memory has rows of 128 numbers: a head of 64 alone would take twice its memory, so that two share a row, and
    one of 256 takes two rows. Rows of 128 are also what can be written in place there, in numbers of which memory pads
    none (`whole_rows`): heads that nobody reads fill them up.
    """
    if platform != "tpu" or head_dim not in (64, 128, 256):
        return num_kv_heads, head_dim
    rows = -(-num_kv_heads * head_dim // LANES)
    while not whole_rows(rows, dtype) or rows * LANES % head_dim:
        rows += 1
    return rows, LANES


def write_kv(
    kv: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> KVCache:
    """The cache with each row of k and v at its page and offset of `layer`. In place when the cache was donated."""
    if scales := kv.layer_scales(layer):
        k, v = (quantize(x, scale) for x, scale in zip((k, v), scales, strict=True))
    k, v = (x.reshape(x.shape[0], *kv.k.shape[3:]).astype(kv.k.dtype) for x in (k, v))
    if preferred() == "mosaic_tpu":
        reason = kv_write.unsupported(kv, k.shape[0])
        if reason is None:
            pages = kv_write.kv_write((k, v), (kv.k, kv.v), layer, page_ids, page_offsets)
            return dataclasses.replace(kv, k=pages[0], v=pages[1])
        say_once("the write of keys and values", reason)
    at = (layer, page_ids, page_offsets)
    return dataclasses.replace(kv, k=kv.k.at[at].set(k), v=kv.v.at[at].set(v))

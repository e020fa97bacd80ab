"""Metadata of pages, beside the pages: kept up when keys are written, and compared with queries."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import PageMeta
from jaxserve.pallas_kernels.paged_attention.types import FP8, KVCache
from jaxserve.pallas_kernels.target import target_device
from jaxserve.sharding.collectives import axis_size
from jaxserve.sharding.kv_parallel import AXIS, local_pages, sum_over_kv


def meta_dtype(kv_dtype: DTypeLike) -> DTypeLike:
    """That of the pages, which holds the least and the largest of what they hold; for float8 bfloat16 does."""
    return jnp.bfloat16 if kv_dtype == FP8 else kv_dtype


def fold(
    kv: KVCache,
    layer: int | Int[Array, ""],
    page_meta: PageMeta,
    head_dim: int,
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> KVCache:
    """The cache with the metadata of pages that had keys written at these places, which it reads from there."""
    assert kv.meta is not None
    keys = kv.k[layer, page_ids, page_offsets].reshape(page_ids.shape[0], -1, head_dim)
    if scales := kv.layer_scales(layer):
        keys = keys.astype(jnp.float32) * scales[0][None, :, None]
    values = _in_parts(page_meta.of_keys(keys).astype(kv.meta.dtype), page_meta.num_parts, page_offsets, kv.page_size)
    num_pages = kv.meta.shape[1]
    begun = jnp.where(page_offsets == 0, page_ids, num_pages)  # what the page's owner before left is forgotten
    meta = kv.meta.at[layer, begun].set(values, mode="drop")
    return dataclasses.replace(kv, meta=meta.at[layer, page_ids].max(values))


def _in_parts(values: Array, num_parts: int, page_offsets: Array, page_size: int) -> Array:
    """Values [T, K, width] as metadata of pages [T, K, M]: other parts than the token's are as low as can be."""
    if num_parts == 1:
        return values
    is_own = (page_offsets * num_parts // page_size)[:, None] == jnp.arange(num_parts)[None]
    nothing = jnp.finfo(values.dtype).min
    return jnp.where(is_own[:, None, :, None], values[:, :, None], nothing).reshape(*values.shape[:2], -1)


def page_scores(
    probe: Float[Array, "T K width"],
    meta: Float[Array, "L P K M"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "T max_pages"],
    num_pages: Int[Array, " T"],
) -> Float[Array, "T K max_pages"]:
    """Dot products of each row's probe with the metadata of its sequence's pages, float32; of a page in parts the
    largest. The same on all ranks of kv.

    Args:
        page_table: ids of all ranks' pages.
        num_pages: of each sequence; the scores of what its table holds beyond them mean nothing.
    """
    width = probe.shape[2]

    def score(found: Array, _: Array) -> Array:
        parts = found.astype(jnp.float32).reshape(*found.shape[:3], -1, width)
        return jnp.max(jnp.einsum("tkm,tkpum->tkpu", probe, parts, precision="highest"), axis=3)

    return for_each_page(score, meta, layer, page_table, num_pages)


def for_each_page(
    function: Callable[[Array, Array], Array],
    meta: Float[Array, "L P K M"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "T max_pages"],
    num_pages: Int[Array, " T"],
) -> Float[Array, "T K max_pages"]:
    """What the function gives for the metadata [T, K, pages, M] of some pages of each row's sequence, and for their
    numbers in it [pages]: float32 [T, K, pages]. The same on all ranks of kv. Beyond `num_pages` it means nothing.
    """
    _, P, K, M = meta.shape
    T, max_pages = page_table.shape
    local = page_table if axis_size(AXIS) == 1 else local_pages(page_table, P)
    block = _pages_a_turn(max_pages)
    local = jnp.pad(local, ((0, 0), (0, -max_pages % block)))

    def turn(i: Array, values: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(local, i * block, block, axis=1)[:, None]
        rows = (layer * P + jnp.clip(page, 0, P - 1)) * K + jnp.arange(K)[None, :, None]
        found = meta.reshape(-1, M).at[rows].get(mode="promise_in_bounds")
        new = jnp.where(page >= 0, function(found, i * block + jnp.arange(block)), 0.0)
        return jax.lax.dynamic_update_slice_in_dim(values, new, i * block, axis=2)

    turns = -(-jnp.max(num_pages) // block)
    values = jax.lax.fori_loop(0, turns, turn, jnp.zeros((T, K, local.shape[1]), jnp.float32))
    return sum_over_kv(values[..., :max_pages])


def _pages_a_turn(max_pages: int) -> int:
    """On CPU sequences shorter than the longest possible save time; elsewhere a loop costs more than it saves."""
    return min(max_pages, 64) if target_device().platform == "cpu" else max_pages

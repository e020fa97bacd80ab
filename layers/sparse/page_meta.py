"""Metadata of pages, beside the pages: kept up when keys are written, and compared with queries."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import MaximumMeta, PageMeta, TokenMeta, WholePageMeta
from jaxserve.pallas_kernels import page_scores as page_scores_kernel
from jaxserve.pallas_kernels.paged_attention.types import FP8, KVCache
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
    page_meta = page_meta.in_layer(layer)
    if isinstance(page_meta, WholePageMeta):
        return fold_whole(kv, layer, page_meta, head_dim, page_ids, page_offsets)
    assert isinstance(page_meta, MaximumMeta | TokenMeta)
    keys = kv.k[layer, page_ids, page_offsets].reshape(page_ids.shape[0], -1, head_dim)
    if scales := kv.layer_scales(layer):
        keys = keys.astype(jnp.float32) * scales[0][None, :, None]
    values = page_meta.of_keys(keys).astype(kv.meta.dtype)
    if isinstance(page_meta, TokenMeta):
        K, width = values.shape[1:]
        place = page_offsets[:, None] * width + jnp.arange(width)[None]
        at = (layer, page_ids[:, None, None], jnp.arange(K)[None, :, None], place[:, None])
        return dataclasses.replace(kv, meta=kv.meta.at[at].set(values))
    values = _in_parts(values, page_meta.num_parts, page_offsets, kv.page_size)
    num_pages = kv.meta.shape[1]
    begun = jnp.where(page_offsets == 0, page_ids, num_pages)  # what the page's owner before left is forgotten
    meta = kv.meta.at[layer, begun].set(values, mode="drop")
    return dataclasses.replace(kv, meta=meta.at[layer, page_ids].max(values))


def fold_whole(
    kv: KVCache,
    layer: int | Int[Array, ""],
    page_meta: WholePageMeta,
    head_dim: int,
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> KVCache:
    """As `fold`, of the pages that these keys complete, some at a time: where there are none it costs little."""
    assert kv.meta is not None
    page_size, num_pages = kv.page_size, kv.meta.shape[1]
    size = min(page_ids.shape[0], 8)
    completes = page_offsets == page_size - 1
    pages = jnp.pad(page_ids[jnp.argsort(~completes, stable=True)], (0, size))
    count = jnp.sum(completes)

    def turn(i: Array, meta: Array) -> Array:
        mine = jax.lax.dynamic_slice_in_dim(pages, i * size, size)
        keys = kv.k[layer, mine].reshape(size, page_size, -1, head_dim).astype(jnp.float32)
        if scales := kv.layer_scales(layer):
            keys *= scales[0][None, None, :, None]
        to = jnp.where(i * size + jnp.arange(size) < count, mine, num_pages)
        return meta.at[layer, to].set(page_meta.of_pages(keys).astype(meta.dtype), mode="drop")

    return dataclasses.replace(kv, meta=jax.lax.fori_loop(0, -(-count // size), turn, kv.meta))


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
    local = page_table if axis_size(AXIS) == 1 else local_pages(page_table, meta.shape[1])
    return sum_over_kv(page_scores_kernel.page_scores(probe, meta, layer, local, num_pages))


def of_each_page(
    function: Callable[[Array, Array], Array],
    kept: Float[Array, "L P K M"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "T max_pages"],
    num_pages: Int[Array, " T"],
) -> Float[Array, "T K max_pages"]:
    """What the function gives for what is kept [T, K, pages, M] of some pages of each row's sequence, and for their
    numbers in it [pages]: float32 [T, K, pages]. The same on all ranks of kv. Beyond `num_pages` it means nothing.
    """
    local = page_table if axis_size(AXIS) == 1 else local_pages(page_table, kept.shape[1])
    return sum_over_kv(page_scores_kernel.xla.of_each_page(function, kept, layer, local, num_pages))

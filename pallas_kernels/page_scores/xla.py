"""Scores of pages in plain XLA: the CPU path, and the fallback of other backends."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels.target import target_device


def page_scores(probe: Array, meta: Array, layer: int | Array, page_table: Array, num_pages: Array) -> Array:
    """As the package's `page_scores`; scores beyond a sequence's pages are 0 or those of what its table holds there."""
    width = probe.shape[2]

    def score(found: Array, _: Array) -> Array:
        parts = found.astype(jnp.float32).reshape(*found.shape[:3], -1, width)
        return jnp.max(jnp.einsum("tkm,tkpum->tkpu", probe, parts, precision="highest"), axis=3)

    return of_each_page(score, meta, layer, page_table, num_pages)


def of_each_page(
    function: Callable[[Array, Array], Array], kept: Array, layer: int | Array, page_table: Array, num_pages: Array
) -> Array:
    """What the function gives for what is kept [T, K, pages, M] of some pages of each row's sequence, of all that is
    `kept` [L, P, K, M], and for their numbers in it [pages]: float32 [T, K, max_pages], 0 for a page of an id below 0.
    Beyond `num_pages` of each sequence it means nothing.
    """
    _, P, K, M = kept.shape
    T, max_pages = page_table.shape
    block = min(max_pages, 64) if target_device().platform == "cpu" else max_pages  # elsewhere a loop costs more
    table = jnp.pad(page_table, ((0, 0), (0, -max_pages % block)))

    def values_of(first: int | Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(table, first, block, axis=1)[:, None]
        rows = (layer * P + jnp.clip(page, 0, P - 1)) * K + jnp.arange(K)[None, :, None]
        found = kept.reshape(-1, M).at[rows].get(mode="promise_in_bounds")
        return jnp.where(page >= 0, function(found, first + jnp.arange(block)), 0.0)

    if block == max_pages:
        return values_of(0)

    def turn(i: Array, values: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(values, values_of(i * block), i * block, axis=2)

    turns = -(-jnp.max(num_pages) // block)
    return jax.lax.fori_loop(0, turns, turn, jnp.zeros((T, K, table.shape[1]), jnp.float32))[..., :max_pages]

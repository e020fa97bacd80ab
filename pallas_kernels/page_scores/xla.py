"""Scores of pages in plain XLA: the CPU path, and the fallback of other backends."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels.target import target_device


def page_scores(probe: Array, meta: Array, layer: int | Array, page_table: Array, num_pages: Array) -> Array:
    """As the package's `page_scores`; scores beyond a sequence's pages are 0 or those of what its table holds there."""
    _, P, K, M = meta.shape
    width = probe.shape[2]
    T, max_pages = page_table.shape

    def scores_of(page: Array) -> Array:
        rows = (layer * P + jnp.clip(page[:, None], 0, P - 1)) * K + jnp.arange(K)[None, :, None]
        found = meta.reshape(-1, M).at[rows].get(mode="promise_in_bounds").astype(jnp.float32)
        parts = found.reshape(*rows.shape, M // width, width)
        products = jnp.max(jnp.einsum("tkm,tkpum->tkpu", probe, parts, precision="highest"), axis=3)
        return jnp.where(page[:, None] >= 0, products, 0.0)

    if target_device().platform != "cpu":  # there a loop costs more than it saves
        return scores_of(page_table)
    block = min(max_pages, 64)
    table = jnp.pad(page_table, ((0, 0), (0, -max_pages % block)))

    def turn(i: Array, scores: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(table, i * block, block, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(scores, scores_of(page), i * block, axis=2)

    turns = -(-jnp.max(num_pages) // block)
    return jax.lax.fori_loop(0, turns, turn, jnp.zeros((T, K, table.shape[1]), jnp.float32))[..., :max_pages]

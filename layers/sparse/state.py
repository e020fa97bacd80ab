"""What sparse attention keeps on the device beside the pages."""

import dataclasses

import jax.numpy as jnp

from jaxserve.layers.sparse.hooks import SparseAttention
from jaxserve.layers.sparse.page_meta import meta_dtype
from jaxserve.pallas_kernels.paged_attention.types import KVCache


def init_state(sparse: SparseAttention, kv: KVCache, head_dim: int, *, num_slots: int, max_pages: int) -> KVCache:
    """The cache with room for metadata of its pages, for their tokens' mass, and for what `num_slots` sequences select,
    as policies need it.

    Args:
        max_pages: of a sequence.
    """
    (L, P), K = kv.k.shape[:2], kv.num_heads(head_dim)
    meta = carry = mass = None
    if sparse.page_meta is not None:
        width = sparse.page_meta.num_parts * sparse.page_meta.width(head_dim)
        meta = jnp.zeros((L, P, K, width), meta_dtype(kv.k.dtype))
    if sparse.decode is not None and sparse.decode.reselect > 1:
        most = min(sparse.decode.select.max_pages(kv.page_size), max_pages)
        carry = jnp.full((L, num_slots, K, most), -1, jnp.int32)
    if sparse.drops:
        mass = jnp.zeros((L, P, K, kv.page_size), jnp.float32)
    return dataclasses.replace(kv, meta=meta, carry=carry, mass=mass)

"""What sparse attention keeps on the device beside the pages."""

import dataclasses

import jax.numpy as jnp

from jaxserve.layers.sparse.hooks import SparseAttention
from jaxserve.layers.sparse.kascade import Kascade
from jaxserve.layers.sparse.page_meta import meta_dtype
from jaxserve.layers.sparse.selection import NO_PAGE
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
        size = sparse.page_meta.size(head_dim, kv.page_size)
        meta = jnp.zeros((L, P, K, size), meta_dtype(kv.k.dtype))
    if sparse.decode is not None and sparse.decode.reselect > 1:
        assert sparse.decode.select is not None
        most = min(sparse.decode.select.max_pages(kv.page_size), max_pages)
        carry = jnp.full((L, num_slots, K, most), -1, jnp.int32)
    if sparse.drops:
        mass = jnp.zeros((L, P, K, kv.page_size), jnp.float32)
    return dataclasses.replace(kv, meta=meta, carry=carry, mass=mass)


def begin_step(
    sparse: SparseAttention | None, kv: KVCache, head_dim: int, *, num_decode: int, num_prefill: int, max_pages: int
) -> KVCache:
    """The cache with room for what layers choose for later ones, if they do, for so many decode and prefill rows.

    Args:
        max_pages: of a sequence.
    """
    if sparse is None or not sparse.carries_over_layers:
        return kv
    selects = [p.select for p in (sparse.decode, sparse.prefill) if isinstance(p, Kascade)]
    most = max(select.most(kv.page_size, max_pages) for select in selects)
    decode, prefill = (
        jnp.full((num_rows, kv.num_heads(head_dim), most), NO_PAGE, jnp.int32) for num_rows in (num_decode, num_prefill)
    )
    return dataclasses.replace(kv, chosen=(decode, prefill))

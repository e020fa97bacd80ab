"""From what a policy selects to page tables for each KV head."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Policy
from jaxserve.layers.sparse.page_meta import page_scores
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.sharding.collectives import axis_size
from jaxserve.sharding.kv_parallel import AXIS, local_pages

NO_PAGE = -1


def select_pages(
    policy: Policy, q: Float[Array, "S N H"], kv: KVCache, layer: int | Int[Array, ""], region: AttentionBatch
) -> AttentionBatch:
    """The decode region, of one row a sequence, with what the policy selects for each row and KV head.

    Args:
        region: with the pages of all ranks.
    """
    S, _, H = q.shape
    K, page_size = kv.num_heads(H), kv.page_size
    scores = None
    if policy.page_meta is not None:
        assert kv.meta is not None
        probe = policy.page_meta.probe(q.reshape(S, K, -1, H))
        scores = page_scores(probe, kv.meta, layer, region.page_table, -(-region.kv_lens // page_size))
    numbers = policy.select.pages(region.kv_lens, page_size, scores)[..., : region.page_table.shape[1]]
    numbers = jnp.broadcast_to(numbers, (S, K, numbers.shape[2]))
    return tables_of(numbers, region, page_size, kv.k.shape[1])


def tables_of(numbers: Int[Array, "S K C"], region: AttentionBatch, page_size: int, num_pages: int) -> AttentionBatch:
    """Tables of the pages with these numbers in their sequences; on a rank of kv of those that it has.

    Args:
        numbers: ascending, then NO_PAGE.
        num_pages: of this rank.
    """
    at = jnp.maximum(numbers, 0)
    pages = jnp.take_along_axis(region.page_table[:, None], at, axis=2)
    tokens = jnp.clip(region.kv_lens[:, None, None] - at * page_size, 0, page_size)  # in each page
    mine = numbers != NO_PAGE
    if axis_size(AXIS) > 1:
        pages = local_pages(pages, num_pages)
        mine &= pages >= 0
        order = jnp.argsort(~mine, axis=2, stable=True)
        pages, tokens, mine = (jnp.take_along_axis(x, order, axis=2) for x in (pages, tokens, mine))
    return AttentionBatch(
        page_table=jnp.where(mine, pages, 0), kv_lens=jnp.sum(jnp.where(mine, tokens, 0), axis=2, dtype=jnp.int32)
    )


def ascending(numbers: Array, is_page: Array) -> Array:
    """The numbers that are a page's in ascending order, then NO_PAGE, along the last axis."""
    last = jnp.iinfo(numbers.dtype).max
    numbers = jnp.sort(jnp.where(is_page, numbers, last), axis=-1)
    return jnp.where(numbers == last, NO_PAGE, numbers)

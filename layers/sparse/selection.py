"""From what a policy selects to page tables for each KV head."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.layers.sparse.hooks import Policy
from jaxserve.layers.sparse.page_meta import page_scores
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.sharding.collectives import axis_size
from jaxserve.sharding.kv_parallel import AXIS, local_pages

NO_PAGE = -1


def select_pages(
    policy: Policy,
    q: Float[Array, "T N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "T max_pages"],
    kv_lens: Int[Array, " T"],
) -> Int[Array, "T K C"]:
    """The numbers of pages in each row's sequence that the policy selects, ascending, then NO_PAGE.

    Args:
        page_table: with the pages of all ranks.
        kv_lens: positions that each row sees; 0 for rows that select nothing.
    """
    (T, _, H), page_size = q.shape, kv.page_size
    K, scores = kv.num_heads(H), None
    if policy.select is None:
        return all_pages(kv_lens, page_size, K, page_table.shape[1])
    if policy.page_meta is not None:
        assert kv.meta is not None
        probe = policy.page_meta.in_layer(layer).probe(q.reshape(T, K, -1, H))
        scored = functools.partial(
            page_scores, meta=kv.meta, layer=layer, page_table=page_table, num_pages=-(-kv_lens // page_size)
        )
        scores = scored(probe) if probe.ndim == 3 else jax.vmap(scored, in_axes=2, out_axes=2)(probe)
    numbers = policy.select.pages(kv_lens, page_size, scores, layer)[..., : page_table.shape[1]]
    return jnp.broadcast_to(numbers, (T, K, numbers.shape[2]))


def all_pages(
    kv_lens: Int[Array, " T"], page_size: int, num_kv_heads: int, max_pages: int
) -> Int[Array, "T K max_pages"]:
    """The numbers of all pages that rows see."""
    numbers = jnp.broadcast_to(jnp.arange(max_pages, dtype=jnp.int32), (kv_lens.shape[0], num_kv_heads, max_pages))
    return jnp.where(numbers * page_size < kv_lens[:, None, None], numbers, NO_PAGE)


def united(numbers: Int[Array, "T K C"], max_pages: int) -> Int[Array, "T K max_pages"]:
    """For each row the numbers that one or more of the rows have."""
    K = numbers.shape[1]
    head = jnp.arange(K)[None, :, None]
    found = (
        jnp.zeros((K, max_pages), bool)
        .at[head, jnp.where(numbers == NO_PAGE, max_pages, numbers)]
        .set(True, mode="drop")
    )
    every = ascending(jnp.broadcast_to(jnp.arange(max_pages, dtype=numbers.dtype), found.shape), found)
    return jnp.broadcast_to(every, (*numbers.shape[:2], max_pages))


def with_pages_begun(
    numbers: Int[Array, "T K C"], at_lens: Int[Array, " T"], kv_lens: Int[Array, " T"], page_size: int, most: int
) -> Int[Array, "T K C2"]:
    """The numbers, selected when rows saw `at_lens` positions, and the pages begun since; these are at most `most`."""
    begun = -(-at_lens // page_size)[:, None] + jnp.arange(most)[None]
    begun = jnp.broadcast_to(begun[:, None], (*numbers.shape[:2], most))
    is_page = jnp.concatenate([numbers != NO_PAGE, begun * page_size < kv_lens[:, None, None]], axis=2)
    return ascending(jnp.concatenate([numbers, begun], axis=2), is_page)


def tables_of(
    numbers: Int[Array, "T K C"],
    page_table: Int[Array, "T max_pages"],
    kv_lens: Int[Array, " T"],
    page_size: int,
    num_pages: int,
) -> AttentionBatch:
    """A decode region of tables of the pages with these numbers; on a rank of kv of those that it has.

    Args:
        page_table: with the pages of all ranks.
        num_pages: of this rank.
    """
    at = jnp.maximum(numbers, 0)
    pages = jnp.take_along_axis(page_table[:, None], at, axis=2)
    tokens = jnp.clip(kv_lens[:, None, None] - at * page_size, 0, page_size)  # in each page
    mine = numbers != NO_PAGE
    if axis_size(AXIS) > 1:
        pages = local_pages(pages, num_pages)
        mine &= pages >= 0
        order = jnp.argsort(~mine, axis=2, stable=True)
        pages, tokens, mine = (jnp.take_along_axis(x, order, axis=2) for x in (pages, tokens, mine))
    return AttentionBatch(
        page_table=jnp.where(mine, pages, 0), kv_lens=jnp.sum(jnp.where(mine, tokens, 0), axis=2, dtype=jnp.int32)
    )


def ascending(numbers: Int[Array, "*rows C"], is_page: Bool[Array, "*rows C"]) -> Int[Array, "*rows C"]:
    """The numbers that are a page's in ascending order, then NO_PAGE."""
    last = jnp.iinfo(numbers.dtype).max
    numbers = jnp.sort(jnp.where(is_page, numbers, last), axis=-1)
    return jnp.where(numbers == last, NO_PAGE, numbers)

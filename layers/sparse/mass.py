"""The mass of tokens beside their pages: begun when keys are written, and what policies make of it.

`paged_attention.mass` adds to it. A token that a KV head has dropped has -inf there, whatever is added, until its place
is written anew.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.layers.sparse.hooks import Retain
from jaxserve.layers.sparse.page_meta import of_each_page
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.sharding.collectives import axis_size
from jaxserve.sharding.kv_parallel import AXIS, local_pages, sum_over_kv


def begin_mass(
    kv: KVCache, layer: int | Int[Array, ""], page_ids: Int[Array, " T"], page_offsets: Int[Array, " T"]
) -> KVCache:
    """The cache where tokens at these places, whose keys were just written, have drawn nothing."""
    assert kv.mass is not None
    return dataclasses.replace(kv, mass=kv.mass.at[layer, page_ids, :, page_offsets].set(0.0))


def kept_tokens(
    kv: KVCache, layer: int | Int[Array, ""], page_table: Int[Array, "T max_pages"], kv_lens: Int[Array, " T"]
) -> Float[Array, "T K max_pages"]:
    """How many tokens of each page among the first `kv_lens` are kept; beyond these the numbers mean nothing.

    Args:
        page_table: with the pages of all ranks.
    """
    assert kv.mass is not None

    def count(mass: Array, numbers: Array) -> Array:
        is_kept = (mass > -jnp.inf) & _is_before(kv_lens, numbers, kv.page_size)
        return jnp.sum(is_kept, axis=3, dtype=jnp.float32)

    return of_each_page(count, kv.mass, layer, page_table, -(-kv_lens // kv.page_size))


def drop_lightest(
    kv: KVCache,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "T max_pages"],
    kv_lens: Int[Array, " T"],
    wanted: Bool[Array, " T"],
) -> KVCache:
    """The cache where each KV head has dropped the token of least mass among the first `kv_lens` of wanted rows; of
    equal ones the last.

    Args:
        page_table: with the pages of all ranks, of another sequence in each row.
    """
    assert kv.mass is not None
    (_, P, K, page_size), (T, max_pages) = kv.mass.shape, page_table.shape

    def candidates(mass: Array, numbers: Array) -> Array:
        is_one = (mass > -jnp.inf) & _is_before(kv_lens, numbers, page_size)
        return jnp.where(is_one, mass, jnp.inf)

    least = of_each_page(
        lambda mass, numbers: jnp.min(candidates(mass, numbers), axis=3),
        kv.mass, layer, page_table, -(-kv_lens // page_size),
    )  # fmt: skip
    is_page = jnp.arange(max_pages)[None] * page_size < kv_lens[:, None]
    least = jnp.where(is_page[:, None], least, jnp.inf)
    number = _last_least(least)
    page = jnp.take_along_axis(page_table, number, axis=1)
    local = page if axis_size(AXIS) == 1 else local_pages(page, P)
    head = jnp.broadcast_to(jnp.arange(K)[None], (T, K))
    mass = kv.mass[layer, jnp.maximum(local, 0), head]  # [T, K, page_size]
    is_before = number[..., None] * page_size + jnp.arange(page_size)[None, None] < kv_lens[:, None, None]
    offset = _last_least(jnp.where((mass > -jnp.inf) & is_before, mass, jnp.inf))
    is_there = wanted[:, None] & (jnp.min(least, axis=2) < jnp.inf) & (local >= 0)
    to = jnp.where(is_there, local, P)
    return dataclasses.replace(kv, mass=kv.mass.at[layer, to, head, offset].set(-jnp.inf, mode="drop"))


def end_prompts(retain: Retain, kv: KVCache, layer: int | Int[Array, ""], region: AttentionBatch) -> KVCache:
    """The cache with what is kept of those prompts whose last rows are among a prefill region's.

    Args:
        region: with the pages of all ranks.
    """
    assert kv.mass is not None
    assert region.cu_q_lens is not None
    assert region.prompt_lens is not None
    P, K, page_size = kv.mass.shape[1:]
    starts = region.kv_lens - jnp.diff(region.cu_q_lens)
    is_end = (starts < region.prompt_lens) & (region.prompt_lens <= region.kv_lens)
    order = jnp.argsort(~is_end, stable=True)
    number = jnp.arange(region.page_table.shape[1])
    position = jnp.arange(number.shape[0] * page_size)

    def one(i: Array, mass: Array) -> Array:
        s = order[i]
        table, prompt_len = region.page_table[s], region.prompt_lens[s]  # pyright: ignore[reportOptionalSubscript]
        local = table if axis_size(AXIS) == 1 else local_pages(table, P)
        is_mine = (local >= 0) & (number * page_size < prompt_len)
        found = mass[layer, jnp.clip(local, 0, P - 1)]  # [max_pages, K, page_size]
        whole = jnp.where(is_mine[:, None, None], found, 0.0).transpose(1, 0, 2).reshape(K, -1)
        is_prompt = (position < prompt_len)[None]
        whole = sum_over_kv(jnp.where(is_prompt, whole, 0.0))
        is_dropped = is_prompt & ~retain.of_prompt(whole, prompt_len)
        is_dropped = is_dropped.reshape(K, -1, page_size).transpose(1, 0, 2)
        return mass.at[layer, jnp.where(is_mine, local, P)].set(jnp.where(is_dropped, -jnp.inf, found), mode="drop")

    return dataclasses.replace(kv, mass=jax.lax.fori_loop(0, jnp.sum(is_end), one, kv.mass))


def heaviest(mass: Float[Array, "K S"], is_candidate: Bool[Array, "K S"], count: int) -> Bool[Array, "K S"]:
    """Those `count` candidates of the largest mass; of equal ones the first."""
    best, at = jax.lax.top_k(jnp.where(is_candidate, mass, -jnp.inf), min(count, mass.shape[1]))
    head = jnp.arange(mass.shape[0])[:, None]
    return jnp.zeros(mass.shape, bool).at[head, at].set(best > -jnp.inf)


def _is_before(kv_lens: Array, numbers: Array, page_size: int) -> Array:
    """Which places [T, 1, pages, page_size] of the pages with these numbers are among the first `kv_lens`."""
    positions = numbers[:, None] * page_size + jnp.arange(page_size)[None]
    return (positions[None] < kv_lens[:, None, None])[:, None]


def _last_least(x: Array) -> Array:
    """Where the least number is in the last axis; of equal ones the last."""
    return x.shape[-1] - 1 - jnp.argmin(jnp.flip(x, axis=-1), axis=-1)

"""How much attention the tokens of pages draw: `exp(score - lse)` of rows whose attention is known, in plain XLA.

A second pass over the keys, after attention in whatever implementation: its log-sum-exp is all that it must know. Only
tiles and blocks with rows that count are walked over.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.pallas_kernels.paged_attention.xla import (
    Reader,
    block_scores,
    decode_group,
    page_rows,
    prefill_tile,
    prefill_tiles,
    walk_of,
)


def add_mass(
    q: Float[Array, "rows N H"],
    lse: Float[Array, "rows N"],
    counts: Bool[Array, " rows"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    batch: AttentionBatch,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "L P K page_size"]:
    """`kv.mass` with what the rows that count draw from each token that they see, over the heads of each group.

    Args:
        lse: of each row's attention, over all that it saw. In place when `kv.mass` was donated.
        batch: a region with one row a sequence, or a prefill region.
    """
    assert kv.mass is not None
    assert batch.max_q_len == 1
    reader = Reader(dataclasses.replace(kv, mass=None), layer, batch, scale, None, soft_cap)
    (rows, _, H), K = q.shape, kv.num_heads(q.shape[2])
    q, lse = q.reshape(rows, K, -1, H), lse.reshape(rows, K, -1)
    lse = jnp.where(counts[:, None, None] & (lse > -jnp.inf), lse, jnp.inf)  # exp(score - inf) is nothing
    mass = kv.mass.reshape(-1, kv.page_size)
    add = _add_decode if batch.cu_q_lens is None else _add_prefill
    return add(mass, q, lse, counts, reader).reshape(kv.mass.shape)


def _add_decode(mass: Array, q: Array, lse: Array, counts: Array, reader: Reader) -> Array:
    B = q.shape[0]
    W = decode_group(B)
    positions = jnp.where(counts[:, None], reader.batch.kv_lens.reshape(B, -1) - 1, -1)

    def group(i: Array, mass: Array) -> Array:
        mine = i * W + jnp.arange(W)
        return _add_tile(mass, q[mine][:, :, None], lse[mine][:, :, None], positions[mine][..., None], mine, reader)

    return jax.lax.fori_loop(0, B // W, group, mass)


def _add_prefill(mass: Array, q: Array, lse: Array, counts: Array, reader: Reader) -> Array:
    size = prefill_tile(q.shape[0])
    num_tiles, place_of = prefill_tiles(reader.batch, size)
    q = jnp.pad(q, ((0, size), (0, 0), (0, 0), (0, 0)))
    lse = jnp.pad(lse, ((0, size), (0, 0), (0, 0)), constant_values=jnp.inf)
    counts = jnp.pad(counts, (0, size))

    def tile(i: Array, mass: Array) -> Array:
        s, start, positions = place_of(i)
        part, part_lse, part_counts = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (q, lse, counts))
        positions = jnp.where(part_counts, positions, -1)
        part, part_lse = part.transpose(1, 0, 2, 3)[None], part_lse.transpose(1, 0, 2)[None]
        return _add_tile(mass, part, part_lse, positions[None, None], s[None], reader)

    return jax.lax.fori_loop(0, num_tiles, tile, mass)


def _add_tile(mass: Array, q: Array, lse: Array, positions: Array, sequences: Array, reader: Reader) -> Array:
    """The mass of all pages [L * P * K, page_size] with that of a tile; its rows are as `xla._tile` has them."""
    W, K, page_size = *q.shape[:2], reader.kv.page_size
    walk = walk_of(q, positions, sequences, reader)
    lse = lse.reshape(W, K, -1, 1)

    def block(i: Array, mass: Array) -> Array:
        scores, _, slots = block_scores(walk, i, reader)
        # Of dropped tokens too, which stay at -inf: to ask for them would be to read the array that is written here
        drawn = jnp.sum(jnp.exp(jnp.minimum(scores - lse, 0.0)), axis=2).reshape(W, K, -1, page_size)
        return mass.at[page_rows(slots, K, page_size)].add(drawn)

    return jax.lax.fori_loop(0, walk.num_blocks, block, mass)

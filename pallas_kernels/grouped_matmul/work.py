"""How the work of the experts of one layer is cut into tiles of rows, and where each row lies.

The rows of one expert, one for each (token, choice) pair that picks it, lie together and in the order of the tokens.
An expert's first row is a multiple of `UNIT`, since TMA with a swizzle moves whole units; the rows between are
nobody's, and nobody writes or reads them for others.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

UNIT = 8  # rows
BEYOND = 56
COMPARED = 1024  # pairs that are ranked by comparing each with each, in one kernel of XLA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The tiles of all experts that have rows, by expert."""

    expert: Array  # i32 [tiles]
    row: Array  # i32 [tiles], the first row, in units
    num_rows: Array  # i32 [tiles]
    num_tiles: Array  # i32 [1], those in use; fields of others hold anything


def max_rows(num_pairs: int, num_experts: int) -> int:
    """Rows that hold any choice of experts: up to `UNIT - 1` rows a visited expert are nobody's.

    Rows are fetched by powers of two, so that the last fetch may reach up to `BEYOND` rows past those in use.
    """
    return -(-(num_pairs + (UNIT - 1) * min(num_pairs, num_experts)) // UNIT) * UNIT + BEYOND


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    visited = min(num_pairs, num_experts)
    return visited + (num_pairs - visited) // tile_rows


def plan(experts: Array, num_experts: int, tile_rows: int) -> tuple[Work, Array]:
    """The tiles, of up to `tile_rows` rows, and the row of every (token, choice) pair, i32 `[T, top_k]`.

    `experts` `[T, top_k]` are those that each token picks, no one twice.
    """
    num_pairs = experts.size
    if experts.shape[0] == 1:  # every pair is an expert of its own
        row = jnp.arange(num_pairs, dtype=jnp.int32)
        num_rows, num_tiles = jnp.ones_like(row), jnp.full(1, num_pairs, jnp.int32)
        return Work(expert=experts[0], row=row, num_rows=num_rows, num_tiles=num_tiles), UNIT * row[None]
    counts, rank = _counts_and_ranks(experts, num_experts)
    units, tiles = -(-counts // UNIT), -(-counts // tile_rows)
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    up_to = ids[:, None] >= ids[None]  # a sum over a few experts: one kernel, where a cumulative sum takes several
    unit_ends, tile_ends = (jnp.sum(jnp.where(up_to, x[None], 0), axis=1, dtype=jnp.int32) for x in (units, tiles))
    tile = jnp.arange(max_tiles(num_pairs, num_experts, tile_rows), dtype=jnp.int32)
    of_tile = jnp.sum(tile_ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    of_tile = jnp.minimum(of_tile, num_experts - 1)
    before = tile_rows * (tile - (tile_ends - tiles)[of_tile])  # rows of the same expert in earlier tiles
    work = Work(
        expert=of_tile,
        row=(unit_ends - units)[of_tile] + lax.div(before, UNIT),
        num_rows=jnp.minimum(counts[of_tile] - before, tile_rows),
        num_tiles=tile_ends[-1:],
    )
    return work, UNIT * (unit_ends - units)[experts] + rank


def _counts_and_ranks(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """Pairs of each expert, i32 `[E]`, and for each pair those of the same expert that come before it `[T, top_k]`."""
    if experts.size <= COMPARED:
        flat = experts.reshape(-1)
        place = jnp.arange(flat.size)
        earlier = (flat[:, None] == flat[None]) & (place[:, None] > place[None])
        ids = jnp.arange(num_experts)
        counts = jnp.sum(ids[:, None] == flat[None], axis=1, dtype=jnp.int32)
        return counts, jnp.sum(earlier, axis=1, dtype=jnp.int32).reshape(experts.shape)
    picks = jnp.any(experts[:, :, None] == jnp.arange(num_experts)[None, None], axis=1)  # [T, E]
    so_far = jnp.cumsum(picks, axis=0, dtype=jnp.int32)
    return so_far[-1], jnp.take_along_axis(so_far, experts, axis=1) - 1

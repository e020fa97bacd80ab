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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picks:
    """Which experts the tokens pick, by blocks of consecutive tokens."""

    expert: Array  # i32 [top_k, tokens]
    rank: Array  # i32 [top_k, tokens], how many tokens before it in its block pick the same; below 0: pick of no one
    counts: Array  # i32 [blocks, E], how many tokens of a block pick an expert


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The tiles of all experts that have rows, by expert."""

    expert: Array  # i32 [tiles]
    row: Array  # i32 [tiles], the first row, in units
    num_rows: Array  # i32 [tiles]
    num_tiles: Array  # i32 [1 or more], those in use; fields of others hold anything
    num_experts: Array  # i32 [], that have rows


def max_rows(num_pairs: int, num_experts: int) -> int:
    """Rows that hold any choice of experts: up to `UNIT - 1` rows a visited expert are nobody's.

    Rows are fetched by powers of two, so that the last fetch may reach up to `BEYOND` rows past those in use.
    """
    return -(-(num_pairs + (UNIT - 1) * min(num_pairs, num_experts)) // UNIT) * UNIT + BEYOND


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    visited = min(num_pairs, num_experts)
    return visited + (num_pairs - visited) // tile_rows


def plan(picks: Picks, num_pairs: int, tile_rows: int, unit: int = UNIT) -> tuple[Work, Array]:
    """The tiles, of up to `tile_rows` rows, and the row of the first token of each block that picks an expert.

    The latter is i32 `[blocks, E]`: a pick's row is its rank more. An expert's first row is a multiple of `unit`.
    """
    (num_blocks, E), counts = picks.counts.shape, jnp.sum(picks.counts, axis=0, dtype=jnp.int32)
    units, tiles = -(-counts // unit), -(-counts // tile_rows)
    # Sums of the few before each one: a kernel, where a cumulative sum takes several
    up_to, blocks_before = jnp.tri(E, dtype=bool), jnp.tri(num_blocks, k=-1, dtype=bool)
    unit_ends, tile_ends = (jnp.sum(jnp.where(up_to, x[None], 0), axis=1, dtype=jnp.int32) for x in (units, tiles))
    earlier = jnp.sum(jnp.where(blocks_before[:, :, None], picks.counts[None], 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(max_tiles(num_pairs, E, tile_rows), dtype=jnp.int32)
    of_tile = jnp.sum(tile_ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    of_tile = jnp.minimum(of_tile, E - 1)
    before = tile_rows * (tile - (tile_ends - tiles)[of_tile])  # rows of the same expert in earlier tiles
    work = Work(
        expert=of_tile,
        row=(unit_ends - units)[of_tile] + lax.div(before, unit),
        num_rows=jnp.minimum(counts[of_tile] - before, tile_rows),
        num_tiles=tile_ends[-1:],
        num_experts=jnp.sum(counts > 0, dtype=jnp.int32),
    )
    return work, unit * (unit_ends - units)[None] + earlier


def choices(logits: Array, top_k: int, normalize: bool) -> tuple[Array, Array]:
    """Weights and ids of the experts of each token, `[T, top_k]`."""
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    return (weights / jnp.sum(weights, axis=-1, keepdims=True) if normalize else weights), experts


def picks_of(experts: Array, num_experts: int, real: Array | None = None) -> Picks:
    """The picks of `[T, top_k]` experts, no one twice by a token, as one block; `real` as in `fused_moe`.

    An expert that there is not is picked by no one.
    """
    picked = experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]  # [T, top_k, E]
    if real is not None:
        picked &= real[:, None, None]
    so_far = jnp.cumsum(jnp.any(picked, axis=1), axis=0, dtype=jnp.int32)
    rank = jnp.sum(jnp.where(picked, so_far[:, None], 0), axis=2, dtype=jnp.int32) - 1
    return Picks(expert=experts.T, rank=rank.T, counts=so_far[-1:])


def combine(rows: Array, weights: Array, *, axis: int) -> Array:
    """The sum of rows `[..., D]` over the choices, which are one axis, by their weights, in float32.

    What has no weight, or one that is not a number, is left out, whatever is in its row.
    """
    weights = weights[..., None]
    return jnp.sum(jnp.where(weights > 0.0, rows.astype(jnp.float32) * weights, 0.0), axis=axis)

"""Where the tiles of prefill attention are: see `mosaic_gpu_prefill`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.pallas_kernels.paged_attention.hopper import ROWS, SHARED_MEMORY_BYTES, Scoring
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch

TILE = 2 * ROWS
UNIT = 8  # rows of a swizzle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    block: int  # positions whose scores are in registers at once
    stages: int  # blocks in shared memory
    multiprocessors: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the kernel knows when it is compiled, besides shapes."""

    scoring: Scoring
    tiling: Tiling
    clears: bool  # rows that hold no query come out as zeros; else nobody reads them
    interpret: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile of one head; all scalars. Its blocks are used from the last to the first."""

    tile: Array
    head: Array
    sequence: Array
    row: Array
    position: Array
    num_rows: Array
    kv_len: Array
    last: Array  # block, exclusive
    count: Array  # blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Where the tiles are, heaviest first: the same for every layer."""

    tile: Array  # i32 [tiles], its place in the output
    sequence: Array  # i32 [tiles]
    row: Array  # i32 [tiles], where the kernel's view of the queries has its first row, in units of UNIT
    position: Array  # i32 [tiles], of that row
    num_rows: Array  # i32 [tiles], that are its sequence's; 0 = no such tile
    num_tiles: Array  # i32 [1], that there are
    view: Array  # i32 [T + (UNIT - 1) S + TILE, rounded up to whole units], the query row in each row of the view
    place: Array  # i32 [T], where the output has each query row


def plan(batch: AttentionBatch, num_rows: int) -> Work:
    """Cuts each sequence's query tokens into tiles; `num_rows` is T."""
    cu_q_lens, num_seqs = batch.cu_q_lens, batch.kv_lens.shape[0]
    assert cu_q_lens is not None
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    counts = lax.div(q_lens + (TILE - 1), TILE)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(-(-num_rows // TILE) + num_seqs - 1, dtype=jnp.int32)
    sequence = _interval(ends, tile)
    offset = (tile - (ends - counts)[sequence]) * TILE
    position = (batch.kv_lens - q_lens)[sequence] + offset
    live = tile < ends[-1]
    order = jnp.argsort(jnp.where(live, -position, 1)).astype(jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    row_sequence = _interval(cu_q_lens[1:], row)
    place = (ends - counts)[row_sequence] * TILE + row - cu_q_lens[row_sequence]
    unit_ends = jnp.cumsum(lax.div(q_lens + (UNIT - 1), UNIT), dtype=jnp.int32)
    unit_starts = unit_ends - lax.div(q_lens + (UNIT - 1), UNIT)
    view = jnp.arange(-(-(num_rows + (UNIT - 1) * num_seqs + TILE) // UNIT) * UNIT, dtype=jnp.int32)
    view_sequence = _interval(unit_ends * UNIT, view)
    return Work(
        tile=order,
        sequence=sequence[order],
        row=(unit_starts[sequence] + lax.div(offset, UNIT))[order],
        position=position[order],
        num_rows=jnp.where(live, jnp.minimum(q_lens[sequence] - offset, TILE), 0)[order],
        num_tiles=ends[-1:],
        view=jnp.minimum((cu_q_lens[:-1] - unit_starts * UNIT)[view_sequence] + view, num_rows - 1),
        place=jnp.minimum(place, tile.size * TILE - 1),
    )


def rows_ahead(block: int, stages: int, head_dim: int, *, is_fp8: bool) -> tuple[int, int]:
    """Tiles whose queries are fetched ahead, of which two leave outputs a place of their own, and blocks that are
    fetched in float8 before they are widened: as many as there is room for.
    """

    def needed(ahead: int, pages_ahead: int) -> int:
        rows_of_tiles, rows_of_pages = TILE * (3 if ahead > 1 else 1), 2 * block * pages_ahead
        return (2 * rows_of_tiles + 2 * 2 * block * stages + is_fp8 * rows_of_pages) * head_dim

    choices = [(2, stages), (1, stages), (1, 1)]
    return next(choice for choice in choices if needed(*choice) <= SHARED_MEMORY_BYTES)


def _interval(ends: Array, x: Array) -> Array:
    """The first interval whose end lies beyond each x; the last where there is none."""
    found = jnp.searchsorted(ends, x, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(found, ends.shape[0] - 1)

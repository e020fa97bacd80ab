"""How the work of decode attention is cut up and shared out: see `mosaic_gpu_decode`.

These functions take arrays, when a step is planned, and scalars, inside a kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.pallas_kernels.paged_attention.hopper import Scoring
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch

EVERYTHING = 2**30  # a window that nothing is out of
CONTINUED, BEGUN, UNREAD = range(3)  # a worker's parts: of the tile it continues, the one it begins, and whole ones
PARTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    block: int  # positions in a unit
    stages: int  # units of a worker in shared memory
    pairs: int  # workers in a CUDA block
    blocks: int  # CUDA blocks

    @property
    def workers(self) -> int:
        return self.blocks * self.pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the kernels know when they are compiled, besides shapes."""

    q_len: int  # query rows of a sequence
    group: int  # query heads of a KV head
    shared: int  # KV heads whose query heads are the rows of one tile
    as_they_are: bool  # the queries are such tiles already
    scoring: Scoring
    tiling: Tiling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit of work: scalars in a kernel, one value a worker in a plan."""

    sequence: Array
    head: Array
    at: Array  # block
    kv_len: Array
    first: Array  # block of the sequence that its rows see
    last: Array  # exclusive

    def before(self, shared: int) -> Array:
        """Units of its tile, of `shared` heads, that come before this one."""
        return lax.rem(self.head, shared) * (self.last - self.first) + self.at - self.first

    def of_tile(self, shared: int) -> Array:
        """Units of its tile."""
        return shared * (self.last - self.first)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """How the units are shared out: the same for every layer of a kind."""

    ends: Array  # i32 [B], units of the sequences up to and with this one
    start: Array  # i32 [workers + 1], the first unit of each worker, and the number of units
    begin: Unit  # i32 [workers], that unit
    prepared_for: tuple[int | None, Tiling] = dataclasses.field(metadata={"static": True})  # sliding window, tiling


def plan(batch: AttentionBatch, num_kv_heads: int, sliding_window: int | None, tiling: Tiling) -> Work:
    """Equal runs of units for all workers. Empty sequences at the end, which are padding, have no units."""
    kv_lens, K = batch.kv_lens, num_kv_heads
    first, last = block_range(kv_lens, batch.max_q_len, sliding_window, tiling.block)
    row = jnp.arange(kv_lens.shape[0])
    size = jnp.where(row <= jnp.max(jnp.where(kv_lens > 0, row, -1)), last - first, 0)
    ends = K * jnp.cumsum(size, dtype=jnp.int32)
    share, rest = lax.div(ends[-1], tiling.workers), lax.rem(ends[-1], tiling.workers)
    start = _first_unit(jnp.arange(tiling.workers + 1, dtype=jnp.int32), share, rest)
    sequence = jnp.searchsorted(ends, start[:-1], side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)  # beyond: a worker without work
    offset = start[:-1] - (ends - K * size)[sequence]
    begin = Unit(
        sequence=sequence,
        head=lax.div(offset, (last - first)[sequence]),
        at=first[sequence] + lax.rem(offset, (last - first)[sequence]),
        kv_len=kv_lens[sequence],
        first=first[sequence],
        last=last[sequence],
    )
    return Work(ends=ends, start=start, begin=begin, prepared_for=(sliding_window, tiling))


def block_range(kv_lens: Array, q_len: int, sliding_window: int | None, block: int) -> tuple[Array, Array]:
    """Blocks `[first, last)` that the rows of a sequence see; an empty sequence has one, of the null page."""
    window = EVERYTHING if sliding_window is None else sliding_window
    first = lax.div(jnp.maximum(kv_lens - q_len + 1 - window, 0), block)
    return first, jnp.maximum(lax.div(kv_lens + (block - 1), block), first + 1)


def _first_unit(worker: Array, share: Array, rest: Array) -> Array:
    """The first `rest` workers take `share + 1` units, the others `share`."""
    return worker * share + jnp.minimum(worker, rest)


def workers_of_tile(
    end: Array, tile: Array, num_blocks: Array, num_tiles: int, num_units: Array, options: Options
) -> tuple[Array, Array]:
    """The first worker of a tile, and how many have some of it.

    Its sequence has `num_tiles` tiles and the units up to `end`, `num_blocks` for each head.
    """
    size = options.shared * num_blocks
    return _workers_of(end - (num_tiles - tile) * size, size, num_units, options)


def workers_of_begun_tile(worker: Array, end: Array, after: Unit, num_units: Array, options: Options) -> Array:
    """How many workers have some of the tile that this one begins and does not complete; 0 if there is none.

    This worker has the units up to `end`, which is that of the next one, `after`. So it is the tile of that unit.
    """
    num_before = after.before(options.shared)
    first, count = _workers_of(end - num_before, after.of_tile(options.shared), num_units, options)
    return jnp.where((num_before > 0) & (first == worker), count, 0)


def _workers_of(begin: Array, size: Array, num_units: Array, options: Options) -> tuple[Array, Array]:
    """The worker that has unit `begin`, and how many have that and the next ones, `size` in all."""
    workers = options.tiling.workers
    share, rest = lax.div(num_units, workers), lax.rem(num_units, workers)
    first = _worker_of(begin, share, rest)
    return first, _worker_of(begin + size - 1, share, rest) + 1 - first


def _worker_of(unit: Array, share: Array, rest: Array) -> Array:
    large = rest * (share + 1)
    return jnp.where(unit < large, lax.div(unit, share + 1), rest + lax.div(unit - large, jnp.maximum(share, 1)))

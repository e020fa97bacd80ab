"""How the work of decode attention is cut up and shared out: see `mosaic_gpu_decode`.

These functions take arrays, when a step is planned, and scalars, inside a kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.pallas_kernels.paged_attention.hopper import Scoring, page_ids
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
class Apart:
    """KV heads with tables of their own: each is a sequence with one tile of one KV head.

    The query heads of `beside` KV heads are one tile of queries. All of these attend to each of the KV heads, in tiles
    of outputs of which only some rows count.
    """

    num_kv_heads: int
    beside: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the kernels know when they are compiled, besides shapes."""

    q_len: int  # query rows of a sequence
    group: int  # query heads of a KV head
    shared: int  # KV heads whose query heads are the rows of one tile
    num_tiles: int  # of a sequence
    as_they_are: bool  # the queries are such tiles already
    scoring: Scoring
    tiling: Tiling
    apart: Apart | None = None  # the sequences are KV heads with tables of their own

    @property
    def slices(self) -> int:
        return self.tiling.workers // self.num_tiles

    def queries_of(self, sequence: Array) -> Array:
        """Whose tiles of queries those of a sequence are."""
        return sequence if self.apart is None else lax.div(sequence, self.apart.beside)

    def kv_head(self, sequence: Array, tile: Array, head: Array | int) -> Array:
        """Of the pages of a head of a tile."""
        return tile * self.shared + head if self.apart is None else lax.rem(sequence, self.apart.num_kv_heads)


def heads_of_tile(num_heads: int, num_kv_heads: int, q_len: int) -> tuple[int, bool]:
    """The KV heads whose query heads are the rows of one tile, and whether the queries are such tiles as they are."""
    group = num_heads // num_kv_heads
    as_they_are = q_len == 1 and num_heads % 8 == 0 and (8 % group == 0 or group % 8 == 0)
    return max(1, 8 // group) if as_they_are else 1, as_they_are


def by_sequence(batch: AttentionBatch) -> AttentionBatch:
    """The region with KV heads that have tables of their own as sequences."""
    if not batch.by_kv_head:
        return batch
    table = batch.page_table.reshape(-1, batch.page_table.shape[2])
    return dataclasses.replace(batch, page_table=table, kv_lens=batch.kv_lens.reshape(-1))


def rows_of_tile(num_heads: int, num_kv_heads: int, q_len: int) -> int:
    """The query rows of a tile, in whole eights."""
    shared, _ = heads_of_tile(num_heads, num_kv_heads, q_len)
    return -(-shared * q_len * (num_heads // num_kv_heads) // 8) * 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit of work of a tile: scalars in a kernel, one value a slice in a plan."""

    sequence: Array
    head: Array  # of those of the tile
    at: Array  # block
    kv_len: Array
    first: Array  # block of the sequence that its rows see
    last: Array  # exclusive

    def before(self, shared: int) -> Array:
        """Units of its tile, of `shared` heads, that come before this one."""
        return (self.at - self.first) * shared + self.head

    def of_tile(self, shared: int) -> Array:
        """Units of its tile."""
        return shared * (self.last - self.first)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """How the units of a tile of each sequence are shared out: the same for all tiles, and for all layers of a kind."""

    ends: Array  # i32 [B], units of the sequences up to and with this one
    share: tuple[Array, Array]  # i32 [1] each: units of a slice, and how many slices, the first ones, have one more
    start: Array  # i32 [slices + 1], the first unit of each slice, and the number of units
    begin: Unit  # i32 [slices], that unit
    begin_pages: Array  # i32 [slices, pages of a block], of that unit: its copies wait for no read of a table
    prepared_for: tuple[tuple[int, int], int | None, Tiling] = dataclasses.field(metadata={"static": True})  # of `plan`


def plan(
    batch: AttentionBatch, heads: tuple[int, int], page_size: int, sliding_window: int | None, tiling: Tiling
) -> Work:
    """Equal runs of units for all slices, or for as many as `whole_slices` says if all sequences are equally long.

    Empty sequences at the end, which are padding, have no units.

    `heads` are the numbers of query and of KV heads.
    """
    shared, slices = 1, tiling.workers
    if not batch.by_kv_head:
        shared, _ = heads_of_tile(*heads, batch.max_q_len)
        slices = tiling.workers // (heads[1] // shared)
    batch = by_sequence(batch)
    kv_lens = batch.kv_lens
    first, last = block_range(kv_lens, batch.max_q_len, sliding_window, tiling.block)
    row = jnp.arange(kv_lens.shape[0])
    size = jnp.where(row <= jnp.max(jnp.where(kv_lens > 0, row, -1)), last - first, 0)
    ends = shared * jnp.cumsum(size, dtype=jnp.int32)
    used = slices
    if (whole := whole_slices(kv_lens.shape[0], slices)) != slices:
        used = jnp.where(jnp.all(size == size[0]), whole, slices)
    share, rest = lax.div(ends[-1], used), lax.rem(ends[-1], used)
    start = jnp.minimum(first_unit(jnp.arange(slices + 1, dtype=jnp.int32), share, rest), ends[-1])
    sequence = jnp.searchsorted(ends, start[:-1], side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)  # beyond: a slice without work
    offset = start[:-1] - (ends - shared * size)[sequence]
    begin = Unit(
        sequence=sequence,
        head=lax.rem(offset, shared),
        at=first[sequence] + lax.div(offset, shared),
        kv_len=kv_lens[sequence],
        first=first[sequence],
        last=last[sequence],
    )
    pages = page_ids(batch.page_table, sequence, begin.kv_len, begin.at * tiling.block, tiling.block, page_size)
    return Work(
        ends=ends,
        share=(share[None], rest[None]),
        start=start,
        begin=begin,
        begin_pages=jnp.stack(pages, axis=1),
        prepared_for=(heads, sliding_window, tiling),
    )


def block_range(kv_lens: Array, q_len: int, sliding_window: int | None, block: int) -> tuple[Array, Array]:
    """Blocks `[first, last)` that the rows of a sequence see; an empty sequence has one, of the null page."""
    window = EVERYTHING if sliding_window is None else sliding_window
    first = lax.div(jnp.maximum(kv_lens - q_len + 1 - window, 0), block)
    return first, jnp.maximum(lax.div(kv_lens + (block - 1), block), first + 1)


def whole_slices(batch: int, slices: int) -> int:
    """How many slices are used if all sequences are equally long: so many that none is split, if that leaves at most a
    sixteenth of the workers idle. These are missed, but less than it takes to write parts and to add them.
    """
    of_a_slice = -(-batch // slices)  # sequences
    used = batch // of_a_slice
    return used if batch % of_a_slice == 0 and 16 * used >= 15 * slices else slices


def first_unit(number: Array, share: Array, rest: Array) -> Array:
    """The first `rest` slices take `share + 1` units, the others `share`."""
    return number * share + jnp.minimum(number, rest)


def slices_of_tile(end: Array, num_blocks: Array, share: tuple[Array, Array], shared: int) -> tuple[Array, Array]:
    """The first slice of a tile, and how many have some of it.

    Its sequence has the units up to `end`, `num_blocks` for each of the `shared` heads.
    """
    size = shared * num_blocks
    return _slices_of(end - size, size, share)


def slices_of_begun_tile(number: Array, end: Array, after: Unit, share: tuple[Array, Array], shared: int) -> Array:
    """How many slices have some of the tile that this one begins and does not complete; 0 if there is none.

    This slice has the units up to `end`, which is that of the next one, `after`. So it is the tile of that unit.
    """
    num_before = after.before(shared)
    first, count = _slices_of(end - num_before, after.of_tile(shared), share)
    return jnp.where((num_before > 0) & (first == number) & (count > 1), count, 0)


def _slices_of(begin: Array, size: Array, share: tuple[Array, Array]) -> tuple[Array, Array]:
    """The slice that has unit `begin`, and how many have that and the next ones, `size` in all."""
    first = _slice_of(begin, *share)
    return first, _slice_of(begin + size - 1, *share) + 1 - first


def _slice_of(unit: Array, share: Array, rest: Array) -> Array:
    large = rest * (share + 1)
    return jnp.where(unit < large, lax.div(unit, share + 1), rest + lax.div(unit - large, jnp.maximum(share, 1)))

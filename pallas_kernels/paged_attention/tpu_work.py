"""What the TPU kernel of paged attention walks over: tiles of query tokens, blocks of pages.

A *tile* is `tokens` consecutive query tokens of one sequence: all that it decodes, or a piece of its chunk of a prompt.
Tiles that exist come first in the list. Pages lie in memory as rows of 128 numbers, `position_rows` a position: with
head_dim 64 two heads share a row, with 256 a head has two.

Sizes follow from the chip (`jaxserve.pallas_kernels.tpu`), bandwidth B and vector memory V of a core:

- A block of pages takes about `BLOCK_S` = 0.64 us to come, so that what each block costs beside its bytes (some 300
  bundles, 0.2 us at 1.5 to 2.2 GHz, and the start of its copies) is hidden behind the next one's bytes: B * 0.64 us,
  as a power of two, is 512 KiB of keys and values on a v5e (0.82 TB/s), 1 MiB on a core of a v5p (1.23) and a v6e
  (1.64), 2 MiB on half a 7x (3.7). With 8 heads of 128 in bfloat16, 4 KiB a position, these are 128, 256 and 512
  positions. In a prompt a block has 256 positions at most: each is used by many rows, so that bandwidth matters less.
- A tile of a prompt has up to 1,024 query rows of a KV head. Its matmuls then do 2 * 2 * 1024 * 128 operations for the
  512 bytes of a position: 1,024 a byte, where a v6e does 560 in the time of a byte, a v5e 240, half a 7x 620.
- In V lie two blocks of pages and their copy in float32, twice the tile's queries and outputs (the next tile's come
  while it is worked on), its sums, maxima and outputs in float32, and the distances: for the tile above and 8 heads
  some 28 MiB of the 64 (a core of a v5p, half a 7x) or 128 MiB. Where a tile takes more than three quarters of V it has
  fewer rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.paged_attention.types import LANES, AttentionBatch, KVCache

UNSEEN = -(1 << 30)  # as a distance: less than any
ROWS = 16  # of a tile in bfloat16: rows come in multiples of it
BLOCK_S = 0.64e-6
MAX_BLOCK = 1024  # positions of sequences that decode
MAX_PROMPT_BLOCK = 256
TILE_ROWS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static sizes of one call."""

    cores: int  # of the device
    tokens: int  # query tokens of a tile
    together: bool  # all heads in one pass over a block, each masked to its columns; else a pass for each
    passes: int
    heads: int  # query heads of a pass
    position_rows: int
    page_size: int
    pages: int  # of a block
    head_rows: int  # rows of 128 numbers of a head: of its queries and outputs
    itemsize: int  # of the cache

    @property
    def rows(self) -> int:
        """Query rows of a pass, with padding."""
        return -(-self.tokens * self.heads // ROWS) * ROWS

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.pages * self.page_size

    @property
    def columns(self) -> int:
        """Of the scores of a pass: positions, or positions and heads."""
        return self.block * (self.position_rows if self.together else 1)

    @property
    def vmem_bytes(self) -> int:
        """What the kernel may use of the vector memory: what it is known to hold, and a quarter more."""
        pages = self.block * self.position_rows * LANES * (4 * self.itemsize + (0 if self.together else 2 * 4))
        tile = self.passes * self.rows * LANES * (self.head_rows * (2 * 2 + 2 * 4 + 4) + 2 * 4)
        scores = self.rows * self.columns * (2 * 4 + 3 * 4)  # distances, twice; scores, weights and a mask
        return (pages + tile + scores) * 5 // 4 + (4 << 20)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The tiles of a region, each core's in turn. Those after `num_tiles` repeat the last one of their core."""

    num_tiles: Array  # i32 [1]
    blocks: Array  # i32 [tiles], of the queries: which are a tile's
    sequences: Array  # i32 [tiles]
    positions: Array  # i32 [tiles], of the first query token
    first_pages: Array  # i32 [tiles], of its sequence: the first that a tile sees
    ends: Array  # i32 [tiles], after the last position that a tile sees
    tables: Array  # i32 [S, 1, max_pages rounded up to lanes]: a row of it can be copied by itself
    tokens: Array  # i32 [blocks, tokens], the query rows of each block
    slots: Array  # i32 [query rows], where in `tokens` each row is; -1 = nowhere
    distances: Array  # i32 [rows, columns], query token minus position, both counted in the tile and the block


def tiling(kv: KVCache, num_rows: int, num_heads: int, head_dim: int, batch: AttentionBatch) -> Tiling:
    """Decode: all heads in one matmul, of which each row uses its own head's columns, as long as rows of one head alone
    would not fill a tile of the matrix unit. Else a matmul for each row of a position.
    """
    _, _, page_size, position_rows, lanes = kv.k.shape
    chip, decodes = tpu.chip(), batch.cu_q_lens is None
    head_rows = max(1, head_dim // lanes)
    passes = position_rows // head_rows
    group = num_heads // passes
    block_bytes = 1 << round(math.log2(chip.mem_bw_bytes_per_second * BLOCK_S))
    block = min(
        MAX_BLOCK if decodes else MAX_PROMPT_BLOCK, block_bytes // (2 * position_rows * lanes * kv.k.dtype.itemsize)
    )

    def of(tokens: int) -> Tiling:
        together = position_rows == 1 or (head_rows == 1 and tokens * group < ROWS)
        return Tiling(
            cores=chip.num_cores,
            tokens=tokens,
            together=together,
            passes=1 if together else passes,
            heads=num_heads if together else group,
            position_rows=position_rows,
            page_size=page_size,
            pages=max(1, block // page_size),
            head_rows=head_rows,
            itemsize=kv.k.dtype.itemsize,
        )

    if decodes:
        return of(batch.max_q_len)
    tokens = max(1, min(-(-num_rows // 8) * 8, TILE_ROWS // group))
    while tokens > 8 and of(tokens).vmem_bytes > chip.vmem_capacity_bytes * 3 // 4:
        tokens //= 2
    return of(tokens)


def plan(batch: AttentionBatch, num_rows: int, sliding_window: int | None, sizes: Tiling) -> Work:
    """The tiles of a region, whatever the layer."""
    region = _decode if batch.cu_q_lens is None else _prefill
    exists, blocks, sequences, positions, ends, tokens, slots = region(batch, num_rows, sizes.tokens)
    num_tiles, cores = jnp.sum(exists), sizes.cores
    order = jnp.argsort(~exists, stable=True)
    entry = jnp.arange(-(-exists.shape[0] // cores) * cores)
    last = num_tiles - 1 - (num_tiles - 1 - entry) % cores  # of the same core
    entry = jnp.where(entry < num_tiles, entry, last)
    order = order[jnp.maximum(entry, 0)]
    blocks = blocks[order]
    if cores > 1:  # one without a tile has a block of queries of its own
        blocks = jnp.where(entry < 0, tokens.shape[0] + jnp.arange(entry.shape[0]) % cores, blocks)
        tokens = jnp.pad(tokens, ((0, cores), (0, 0)))
    first = jnp.zeros_like(positions)
    if sliding_window is not None:
        first = jnp.maximum(positions - sliding_window + 1, 0) // sizes.page_size
    sequences, positions, first, ends = (x[order].astype(jnp.int32) for x in (sequences, positions, first, ends))
    return Work(
        num_tiles=num_tiles.astype(jnp.int32)[None],
        blocks=blocks.astype(jnp.int32),
        sequences=sequences,
        positions=positions,
        first_pages=first,
        ends=ends,
        tables=jnp.pad(batch.page_table, ((0, 0), (0, -batch.page_table.shape[1] % LANES)))[:, None].astype(jnp.int32),
        tokens=tokens.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        distances=_distances(sizes),
    )


def _decode(batch: AttentionBatch, num_rows: int, size: int) -> tuple[Array, ...]:
    """A tile a sequence."""
    tiles, rows = jnp.arange(batch.kv_lens.shape[0]), jnp.arange(num_rows)
    exists = batch.kv_lens > 0
    slots = jnp.where(exists[rows // size], rows, -1)
    return exists, tiles, tiles, batch.kv_lens - size, batch.kv_lens, rows.reshape(-1, size), slots


def _prefill(batch: AttentionBatch, num_rows: int, size: int) -> tuple[Array, ...]:
    """Each sequence's rows in pieces, of which the last may be short."""
    assert batch.cu_q_lens is not None
    starts, q_lens, num_seqs = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens), batch.kv_lens.shape[0]
    counts = -(-q_lens // size)
    ends = jnp.cumsum(counts)  # of each sequence in the list of tiles
    tiles = jnp.arange(min(num_rows, num_rows // size + num_seqs))
    s = jnp.minimum(jnp.searchsorted(ends, tiles, side="right"), num_seqs - 1)
    first = (tiles - (ends - counts)[s]) * size
    positions = batch.kv_lens[s] - q_lens[s] + first
    tokens = jnp.clip((starts[s] + first)[:, None] + jnp.arange(size)[None], 0, num_rows - 1)
    rows = jnp.arange(num_rows)
    of_row = jnp.minimum(jnp.searchsorted(batch.cu_q_lens[1:], rows, side="right"), num_seqs - 1)
    slots = (ends - counts)[of_row] * size + rows - starts[of_row]
    slots = jnp.where(rows < batch.cu_q_lens[-1], slots, -1)
    seen = jnp.minimum(batch.kv_lens[s], positions + size)
    return tiles < ends[-1], tiles, s, positions, seen, tokens, slots


def _distances(sizes: Tiling) -> Array:
    rows, columns = jnp.arange(sizes.rows)[:, None], jnp.arange(sizes.columns)[None]
    in_use = rows < sizes.tokens * sizes.heads
    positions_apart = sizes.position_rows if sizes.together else 1
    if sizes.together:
        own = rows % sizes.heads // (sizes.heads // sizes.position_rows)
        in_use &= own == columns % sizes.position_rows
    return jnp.where(in_use, rows // sizes.heads - columns // positions_apart, UNSEEN)

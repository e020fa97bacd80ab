"""The TPU kernel of paged attention, for decode and for chunks of prompts.

Each core walks over its tiles of `tpu_work`, one after the other. A tile walks over the blocks of pages that it can
see, with an online softmax (arXiv 2205.14135) to the base 2. While the matrix unit works on a block, the next one
comes, be it the first of the next tile: there are two buffers, which blocks use in turn. Only pages that hold a visible
position are read.

What takes time besides the matmuls is vector work on the scores, so that there is little of it: a row's maximum is kept
in all lanes and its sum apart in each, which spares exchanges between lanes, and blocks that all rows see whole are not
masked. Several heads are worked on in one turn of a loop: the matmuls of one fill the waits of another.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.paged_attention.tpu_work import Tiling, Work

NOTHING = -1e30  # score of what a row must not see; finite, so that exp(NOTHING - NOTHING) is not NaN
LOG2_E = math.log2(math.e)
LANES = 128  # of a register
TABLES = 3
WHOLE, MASKED = 8, 2  # passes in one turn of a loop at most, over blocks without and with a mask: a long compile


class Scalars(NamedTuple):
    """In scalar memory, before the kernel starts."""

    layer: Any  # i32 [1]
    num_tiles: Any  # i32 [1]
    blocks: Any  # i32 [tiles], and so are the others
    sequences: Any
    positions: Any
    first_pages: Any
    ends: Any


class Blocks(NamedTuple):
    """The pages of the cache, and where those of two blocks are put."""

    pages: tuple[Any, Any]  # keys and values [L, P, page_size * position_rows, lanes], in HBM
    buffers: tuple[Any, Any]  # [2, block * position_rows, lanes]
    arrived: Any  # DMA semaphores [2 (keys, values), 2 (buffers)]


class Tables(NamedTuple):
    """The page tables, and where those of a tile's sequence and of the two that follow are put: all do not fit."""

    tables: Any  # i32 [S, 1, max_pages], in HBM
    rows: Any  # i32 [TABLES, max_pages], in scalar memory
    arrived: Any  # DMA semaphores [TABLES]

    def copy(self, tile: Any, scalars: Scalars, sizes: Tiling) -> Any:
        row = self.row_of(tile, sizes)
        sequence = self.tables.at[scalars.sequences[tile], 0]
        return pltpu.make_async_copy(sequence, self.rows.at[row], self.arrived.at[row])

    def row_of(self, tile: Any, sizes: Tiling) -> Any:
        return jax.lax.rem(tile // sizes.cores, TABLES)


def attend(
    q: Array,  # [blocks, passes, rows, lanes of a head], scaled
    pages: tuple[Array, Array],  # keys and values, [L, P, page_size * position_rows, lanes]
    layer: int | Array,
    work: Work,
    sizes: Tiling,
    *,
    sliding_window: int | None,
    soft_cap: float | None,
    out_dtype: Any,
    interpret: Any,
) -> tuple[Array, Array]:
    """Output like q and float32 log-sum-exp [blocks, passes, rows]. Blocks that belong to no tile hold anything."""
    _, passes, rows, head_lanes = q.shape
    lanes = pages[0].shape[-1]
    block_rows = sizes.block * sizes.position_rows
    of_block = lambda core, t, *scalars: (Scalars(*scalars).blocks[t * sizes.cores + core], 0, 0, 0)  # noqa: E731
    tile = pl.BlockSpec((1, passes, rows, head_lanes), of_block)
    wide = [pltpu.VMEM((block_rows, lanes), jnp.float32)] * (0 if sizes.together else 2)
    kernel = functools.partial(_kernel, sizes=sizes, sliding_window=sliding_window, soft_cap=soft_cap)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Scalars._fields),
            grid=(sizes.cores, work.sequences.shape[0] // sizes.cores),
            in_specs=[
                tile,
                pl.BlockSpec(work.distances.shape, lambda core, t, *_: (0, 0)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * 3,
            ],
            out_specs=[tile, pl.BlockSpec((1, passes, 1, rows), of_block)],
            scratch_shapes=[
                pltpu.VMEM((2, block_rows, lanes), pages[0].dtype),
                pltpu.VMEM((2, block_rows, lanes), pages[1].dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((TABLES, work.tables.shape[2]), jnp.int32),
                pltpu.SemaphoreType.DMA((TABLES,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((passes, rows, head_lanes), jnp.float32),
                pltpu.VMEM((passes, rows, LANES), jnp.float32),
                pltpu.VMEM((passes, rows, LANES), jnp.float32),
                *wide,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, out_dtype),
            jax.ShapeDtypeStruct((*q.shape[:2], 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=sizes.vmem_bytes
        ),
        interpret=interpret,
        name="paged_attention",
    )
    scalars = Scalars(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        num_tiles=work.num_tiles,
        blocks=work.blocks,
        sequences=work.sequences,
        positions=work.positions,
        first_pages=work.first_pages,
        ends=work.ends,
    )
    out, lse = call(*scalars, q, work.distances, work.tables, *pages)
    return out, lse[:, :, 0]


def _kernel(*refs: Any, sizes: Tiling, sliding_window: int | None, soft_cap: float | None) -> None:
    scalars, refs = Scalars(*refs[: len(Scalars._fields)]), refs[len(Scalars._fields) :]
    q, distances, all_tables, k_pages, v_pages = refs[:5]  # [1, passes, rows, lanes], [rows, columns], HBM, HBM, HBM
    out, lse = refs[5:7]  # [1, passes, rows, lanes], [1, passes, 1, rows]
    k_buffers, v_buffers, arrived, table_rows, table_arrived, turns = refs[7:13]  # turns [1]: blocks so far
    acc, top, total = refs[13:16]  # [passes, rows, lanes or 128], of the softmax
    wide = refs[16:]  # float32 [block * position_rows, lanes] for keys and for values, with several passes
    blocks = Blocks((k_pages, v_pages), (k_buffers, v_buffers), arrived)
    tables = Tables(all_tables, table_rows, table_arrived)
    move = functools.partial(_move, scalars=scalars, blocks=blocks, tables=tables, sizes=sizes)
    core, num_tiles = pl.program_id(0), scalars.num_tiles[0]
    tile = pl.program_id(1) * sizes.cores + core
    num_blocks = pl.cdiv(_num_pages(tile, scalars, sizes), sizes.pages)

    @pl.when(pl.program_id(1) == 0)
    def _():
        turns[0] = 0

        @pl.when(tile < num_tiles)
        def _():
            start(tables.copy(tile, scalars, sizes))

        @pl.when(tile + sizes.cores < num_tiles)
        def _():
            start(tables.copy(tile + sizes.cores, scalars, sizes))

        @pl.when(tile < num_tiles)
        def _():
            wait(tables.copy(tile, scalars, sizes))
            move(tile, 0, 0, start)

    @pl.when(tile + 2 * sizes.cores < num_tiles)
    def _():
        start(tables.copy(tile + 2 * sizes.cores, scalars, sizes))

    def block(i: Array, _: None) -> None:
        buffer = jax.lax.rem(turns[0], 2)
        turns[0] += 1
        done = i + 1 == num_blocks
        next_tile, next_block = jnp.where(done, tile + sizes.cores, tile), jnp.where(done, 0, i + 1)

        @pl.when(done & (next_tile < num_tiles))
        def _():
            wait(tables.copy(next_tile, scalars, sizes))

        @pl.when(next_tile < num_tiles)
        def _():
            move(next_tile, next_block, 1 - buffer, start)

        move(tile, i, buffer, wait)
        first = (scalars.first_pages[tile] + i * sizes.pages) * sizes.page_size
        _clear_after(v_buffers.at[buffer], (scalars.ends[tile] - first) * sizes.position_rows, sizes)
        for source, copy in zip((k_buffers, v_buffers), wide, strict=False):
            copy[...] = source[buffer].astype(jnp.float32)
        nearest = first - scalars.positions[tile]

        def visible() -> Array:
            seen = distances[...] >= nearest
            return seen if sliding_window is None else seen & (distances[...] < nearest + sliding_window)

        def attend_all(mask: Callable[[], Array] | None, most: int) -> None:
            together = math.gcd(sizes.passes, most)

            def attend_passes(i: Array, _: None) -> None:
                for n in (i * together + j for j in range(together)):
                    k, v = (
                        _rows_of(n, buffers.at[buffer], copy, sizes).astype(q.dtype)
                        for buffers, copy in zip((k_buffers, v_buffers), wide or (None, None), strict=True)
                    )
                    _add(q[0, n], k, v, mask, acc.at[n], top.at[n], total.at[n], soft_cap)

            jax.lax.fori_loop(0, sizes.passes // together, attend_passes, None)

        if sizes.together:
            attend_all(visible, 1)
        else:  # most blocks of a long prompt are seen whole by all rows
            whole = nearest + sizes.block <= 1
            if sliding_window is not None:
                whole &= nearest + sliding_window >= sizes.tokens
            pl.when(whole)(lambda: attend_all(None, WHOLE))
            pl.when(jnp.logical_not(whole))(lambda: attend_all(visible, MASKED))

    @pl.when(tile < num_tiles)
    def _():
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        top[...] = jnp.full(top.shape, NOTHING, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        jax.lax.fori_loop(0, num_blocks, block, None)

        def write(n: Array, _: None) -> None:
            empty = top[n] == NOTHING
            whole = jnp.where(empty, 1.0, jnp.sum(total[n], axis=1, keepdims=True))
            out[0, n] = jnp.where(empty[:, :1], 0.0, acc[n] / whole[:, :1]).astype(out.dtype)
            lse[0, n] = jnp.where(empty, -jnp.inf, top[n] / LOG2_E + jnp.log(whole)).T[:1]

        jax.lax.fori_loop(0, sizes.passes, write, None)


def _num_pages(tile: Any, scalars: Scalars, sizes: Tiling) -> Any:
    """Of its sequence, that a tile sees."""
    return pl.cdiv(scalars.ends[tile], sizes.page_size) - scalars.first_pages[tile]


def _move(
    tile: Any, block: Any, buffer: Any, act: Any, *, scalars: Scalars, blocks: Blocks, tables: Tables, sizes: Tiling
) -> None:
    """Starts, or waits for, the copies of a tile's block of pages into a buffer."""
    page_rows = sizes.page_size * sizes.position_rows
    table, first = tables.row_of(tile, sizes), scalars.first_pages[tile] + block * sizes.pages

    def page(i: Any, _: None) -> None:
        page_id = tables.rows[table, first + i]
        for n, (pages, buffers) in enumerate(zip(blocks.pages, blocks.buffers, strict=True)):
            source = pages.at[scalars.layer[0], page_id]
            target = buffers.at[buffer, pl.ds(i * page_rows, page_rows)]
            act(pltpu.make_async_copy(source, target, blocks.arrived.at[n, buffer]))

    left = _num_pages(tile, scalars, sizes) - block * sizes.pages
    jax.lax.fori_loop(0, jnp.minimum(left, sizes.pages), page, None)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


def _clear_after(rows: Any, num_rows: Any, sizes: Tiling) -> None:
    """Zeros in values after the last visible position: they may be anything, NaN too, and 0 * NaN is NaN."""
    page_rows = sizes.page_size * sizes.position_rows

    def page(i: Any, _: None) -> None:
        part = rows.at[pl.ds(i * page_rows, page_rows)]
        row = i * page_rows + jax.lax.broadcasted_iota(jnp.int32, part.shape, 0)
        part[...] = jnp.where(row < num_rows, part[...].astype(jnp.float32), 0.0).astype(rows.dtype)

    jax.lax.fori_loop(num_rows // page_rows, sizes.pages, page, None)


def _rows_of(n: Array, rows: Any, wide: Any, sizes: Tiling) -> Array:
    """A block's rows for one pass: all, or those of a head. Only float32 can be read with a stride."""
    if sizes.together:
        return rows[...]
    rows_of_head = sizes.position_rows // sizes.passes
    parts = [
        wide[pl.ds(n * rows_of_head + part, sizes.block, stride=sizes.position_rows), :] for part in range(rows_of_head)
    ]
    return jnp.concatenate(parts, axis=1)


def _add(
    q: Array, k: Array, v: Array, visible: Callable[[], Array] | None, acc: Any, top: Any, total: Any, soft_cap: Any
) -> None:
    """A block's part of the softmax of one pass, to the base 2."""
    scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = (soft_cap * LOG2_E) * jnp.tanh(scores)
    if visible is not None:
        scores = jnp.where(visible(), scores, NOTHING)
    old = top[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    p = jnp.exp2(scores - _wide(new, scores.shape[1]))
    decay = jnp.exp2(old - new)
    total[...] = total[...] * decay + _sums(p)
    values = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc[...] = acc[...] * _wide(decay, acc.shape[1]) + values
    top[...] = new


def _wide(x: Array, lanes: int) -> Array:
    """The number of each row, which all of its lanes hold, in so many lanes."""
    if lanes % LANES:
        return jnp.broadcast_to(x[:, :1], (x.shape[0], lanes))
    return jnp.concatenate([x] * (lanes // LANES), axis=1)


def _sums(p: Array) -> Array:
    """[rows, LANES], whose sum over the lanes is that of p."""
    if p.shape[1] % LANES:
        return jnp.broadcast_to(jnp.sum(p, axis=1, keepdims=True) / LANES, (p.shape[0], LANES))
    return functools.reduce(jnp.add, (p[:, i : i + LANES] for i in range(0, p.shape[1], LANES)))

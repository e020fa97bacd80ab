"""The TPU kernel of the experts of one layer: gate, up, activation and down in one.

The grid walks over the tiles of rows, one after the other, and within a tile over blocks of an expert's hidden columns;
often one block is all. While the matrix unit works on a tile, what comes next is fetched: the rows of the next tile,
each from where its token lies, and the next weights, which have two buffers. A *fetch* is the gate, up and down columns
of one block. Tiles of the same expert follow each other, and where one block is all, they share one fetch.

Rows come and go as words (`mosaic_tpu_rows`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu_rows import LANES, load, pack, store, word_rows

UNIT = 16  # rows that are gathered together: those of a register in bfloat16
TRANSPOSED = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static sizes of one call."""

    rows: int  # of a tile, a multiple of pass_rows
    pass_rows: int  # that pass the matrix unit together, a multiple of UNIT
    columns: int  # of a block, of F
    vmem_bytes: int


class Scalars(NamedTuple):
    """In scalar memory, before the kernel starts."""

    layer: Any  # i32 [1]
    num_fetches: Any  # i32 [1]
    experts: Any  # i32 [fetches of a first block], whose weights it is
    fetches: Any  # i32 [tiles], the place in `experts` of each tile's
    first: Any  # i32 [tiles], the place in `tokens` of its first row
    num_rows: Any  # i32 [tiles]
    tokens: Any  # i32 [pairs + UNIT], whose row it is, by expert


class Weights(NamedTuple):
    """Those of all experts, and where two fetches are put."""

    gate_up: Any  # [L, E, 2 F, D], in HBM
    down: Any  # [L, E, D, F], in HBM
    gate_up_buffers: Any  # [2, 2 columns, D]
    down_buffers: Any  # [2, D, columns]
    arrived: Any  # DMA semaphores [2]


class Rows(NamedTuple):
    """Those of all tokens, and where those of two tiles are put."""

    x: Any  # u32 [T * word_rows, 128], in HBM
    buffers: Any  # u32 [2, rows * word_rows, 128]
    num_rows: int  # of a tile
    arrived: Any  # DMA semaphores [2]


def experts(
    x: Array,  # [T, D]
    gate_up: Array,  # [L, E, 2 F, D]
    down: Array,  # [L, E, D, F]
    scalars: Scalars,
    num_tiles: Array,  # i32 [], at least 1
    sizes: Tiling,
    *,
    interpret: Any,
) -> Array:
    """What the experts make of the rows of each tile, in words; anything where a tile has no row."""
    (_, D), F, max_tiles = x.shape, down.shape[-1], scalars.fetches.shape[0]
    blocks, words = F // sizes.columns, word_rows(D)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Scalars._fields),
            grid=(num_tiles, blocks),
            in_specs=[anywhere] * 3,
            out_specs=pl.BlockSpec((sizes.rows * words, LANES), lambda t, *_: (t, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, 2 * sizes.columns, D), gate_up.dtype),
                pltpu.VMEM((2, D, sizes.columns), down.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((2, sizes.rows * words, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((sizes.rows, D), x.dtype),
                *[pltpu.VMEM((sizes.rows, D), jnp.float32)] * (blocks > 1),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((max_tiles * sizes.rows * words, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_bytes,
            disable_bounds_checks=True,  # else they are most of what the copy of a row costs
        ),
        interpret=interpret,
        name="experts",
    )
    return call(*scalars, pack(x), gate_up, down)


def _kernel(*refs: Any, sizes: Tiling, blocks: int) -> None:
    scalars, refs = Scalars(*refs[: len(Scalars._fields)]), refs[len(Scalars._fields) :]
    x, gate_up, down, out = refs[:4]  # out u32 [rows * word_rows, 128]
    weights, rows = Weights(gate_up, down, *refs[4:7]), Rows(x, refs[7], sizes.rows, refs[8])
    unpacked, sums = refs[9], refs[10:]  # [rows, D], and with several blocks float32 [rows, D]
    tile, block, num_tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(0)
    fetch, num_fetches = scalars.fetches[tile] * blocks + block, scalars.num_fetches[0]
    move = functools.partial(_move, scalars=scalars, weights=weights, blocks=blocks)
    gather = functools.partial(_gather, scalars=scalars, rows=rows)
    is_new = (tile == 0) | (scalars.fetches[tile] != scalars.fetches[jnp.maximum(tile - 1, 0)])

    @pl.when((tile == 0) & (block == 0))
    def _():
        gather(0)

        @pl.when(num_fetches > 0)
        def _():
            move(0, start)

    @pl.when(is_new & (fetch + 1 < num_fetches))
    def _():
        move(fetch + 1, start)

    @pl.when((block == 0) & (tile + 1 < num_tiles))
    def _():
        gather(tile + 1)

    @pl.when(block == 0)
    def _():
        _wait_for_rows(tile, scalars, rows)

    @pl.when(is_new & (fetch < num_fetches))
    def _():
        move(fetch, wait)

    buffer = jax.lax.rem(fetch, 2)

    def rows_pass(i: Any, _: None) -> None:
        those = pl.ds(i * sizes.pass_rows, sizes.pass_rows)

        @pl.when(block == 0)
        def _():
            load(rows.buffers.at[jax.lax.rem(tile, 2)], i * sizes.pass_rows, unpacked.at[those])

        y = _mlp(unpacked[those], weights.gate_up_buffers.at[buffer], weights.down_buffers.at[buffer])
        if sums:
            y += jnp.where(block == 0, 0.0, sums[0][those])
            sums[0][those] = y
        store(y, out, i * sizes.pass_rows)

    jax.lax.fori_loop(0, pl.cdiv(scalars.num_rows[tile], sizes.pass_rows), rows_pass, None)


def _mlp(x: Array, gate_up: Any, down: Any) -> Array:
    """`[rows, D]`, of a block of columns."""
    hidden = jax.lax.dot_general(x, gate_up[...], TRANSPOSED, preferred_element_type=jnp.float32)
    gate, up = jnp.split(hidden, 2, axis=1)
    hidden = (gate * jax.nn.sigmoid(gate) * up).astype(x.dtype)
    return jax.lax.dot_general(hidden, down[...], TRANSPOSED, preferred_element_type=jnp.float32)


def _move(fetch: Any, act: Any, *, scalars: Scalars, weights: Weights, blocks: int) -> None:
    """Starts, or waits for, the copies of a fetch."""
    columns, F = weights.down_buffers.shape[2], weights.down.shape[3]
    expert = scalars.experts[fetch if blocks == 1 else jax.lax.div(fetch, blocks)]
    first = 0 if blocks == 1 else pl.multiple_of(jax.lax.rem(fetch, blocks) * columns, columns)
    buffer = jax.lax.rem(fetch, 2)
    gate_up, down = (of_all.at[scalars.layer[0], expert] for of_all in (weights.gate_up, weights.down))
    to_gate_up, to_down = weights.gate_up_buffers.at[buffer], weights.down_buffers.at[buffer]
    for source, target in (
        (gate_up.at[pl.ds(first, columns)], to_gate_up.at[pl.ds(0, columns)]),
        (gate_up.at[pl.ds(F + first, columns)], to_gate_up.at[pl.ds(columns, columns)]),
        (down.at[:, pl.ds(first, columns)], to_down),
    ):
        act(pltpu.make_async_copy(source, target, weights.arrived.at[buffer]))


def _gather(tile: Any, *, scalars: Scalars, rows: Rows) -> None:
    """Starts the copies of a tile's rows, by units; the last one may have rows of other tiles too."""
    buffer, size = jax.lax.rem(tile, 2), rows.buffers.shape[1] // rows.num_rows

    def unit(i: Any, _: None) -> None:
        for n in range(UNIT):
            token = scalars.tokens[scalars.first[tile] + i * UNIT + n]
            source = rows.x.at[pl.ds(pl.multiple_of(token * size, size), size)]
            target = rows.buffers.at[buffer, pl.ds(pl.multiple_of((i * UNIT + n) * size, size), size)]
            pltpu.make_async_copy(source, target, rows.arrived.at[buffer]).start()

    jax.lax.fori_loop(0, pl.cdiv(scalars.num_rows[tile], UNIT), unit, None)


def _wait_for_rows(tile: Any, scalars: Scalars, rows: Rows) -> None:
    buffer, size = jax.lax.rem(tile, 2), UNIT * rows.buffers.shape[1] // rows.num_rows

    def unit(i: Any, _: None) -> None:
        target = rows.buffers.at[buffer, pl.ds(pl.multiple_of(i * size, size), size)]
        pltpu.make_async_copy(target, target, rows.arrived.at[buffer]).wait()

    jax.lax.fori_loop(0, pl.cdiv(scalars.num_rows[tile], UNIT), unit, None)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()

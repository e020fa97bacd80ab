"""The TPU kernel that sums the rows of each token by their weights.

The grid walks over blocks of tokens. While one block is summed, the rows of the next are fetched, each from where the
experts' kernel put it, and only those that count.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu_rows import LANES, halves_of, unpack, word_rows, words_of

ROWS = 256  # of a block, at most, if a token has no more
UNIT = 16  # rows that are waited for together


class Rows(NamedTuple):
    """Those of all tiles, and where those of two blocks are put."""

    places: Any  # i32 [choices of all blocks and one more], in scalar memory: the row of each choice, -1 = none
    rows: Any  # u32 [any * word_rows, 128], in HBM
    buffers: Any  # u32 [2, choices * word_rows, 128]
    arrived: Any  # DMA semaphores [2]


def combine(rows: Array, places: Array, weights: Array, D: int, *, interpret: Any) -> Array:
    """`sum over j of weights[t, j] * rows[places[t, j]]` in float32, then rounded, `[T, D]` in bfloat16.

    Args:
        rows: in words, of D numbers each.
        places: i32 `[T, top_k]`, -1 = no row. weights: float32 `[T, top_k]`, 0 where there is no row.
    """
    (T, top_k), size = places.shape, word_rows(D)
    tokens = max(1, min(T, ROWS // top_k))  # of a block
    blocks = -(-T // tokens)
    places = jnp.pad(places, ((0, (blocks + 1) * tokens - T), (0, 0)), constant_values=-1).reshape(blocks + 1, -1)
    weights = jnp.pad(weights, ((0, blocks * tokens - T), (0, 0))).reshape(blocks, 1, -1)
    words = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, top_k=top_k),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks,),
            in_specs=[
                pl.BlockSpec((1, 1, tokens * top_k), lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((tokens * size, LANES), lambda b, *_: (b, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, tokens * top_k * size, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((blocks * tokens * size, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="combine_experts",
    )(places.reshape(-1), jnp.sum(places >= 0, axis=1, dtype=jnp.int32), weights, rows)
    return unpack(words, D)[:T]


def _kernel(
    places: Any,
    counts: Any,  # i32 [blocks and one more], in scalar memory: rows of each block
    weights: Any,  # f32 [1, 1, choices], in scalar memory
    all_rows: Any,
    out: Any,  # u32 [tokens * word_rows, 128]
    buffers: Any,
    arrived: Any,
    *,
    tokens: int,
    top_k: int,
) -> None:
    rows, block, size = Rows(places, all_rows, buffers, arrived), pl.program_id(0), out.shape[0] // tokens
    fetch = functools.partial(_fetch, rows=rows, size=size)
    buffer = jax.lax.rem(block, 2)

    @pl.when(block == 0)
    def _():
        jax.lax.fori_loop(0, tokens, lambda i, _: fetch(0, i, top_k, tokens), None)

    _wait(counts[block], buffer, rows, size)

    def token(i: Any, _: None) -> None:
        """In one loop, so that the scalar unit starts copies while the vector units work."""
        low = high = jnp.zeros((size, LANES), jnp.float32)
        for choice in range(top_k):
            weight = jnp.full((size, LANES), weights[0, 0, i * top_k + choice])
            its_low, its_high = halves_of(buffers[buffer, _row(i * top_k + choice, size), :])
            low += jnp.where(weight > 0.0, its_low * weight, 0.0)
            high += jnp.where(weight > 0.0, its_high * weight, 0.0)
        fetch(block + 1, i, top_k, tokens)
        out[_row(i, size), :] = words_of(low, high)

    jax.lax.fori_loop(0, tokens, token, None)


def _row(number: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(number * size, size), size)


def _fetch(block: Any, token: Any, top_k: int, tokens: int, *, rows: Rows, size: int) -> None:
    """Starts the copies of the rows of one of a block's tokens."""
    buffer = jax.lax.rem(block, 2)
    for choice in range(top_k):
        number = token * top_k + choice
        place = rows.places[block * (tokens * top_k) + number]

        @pl.when(place >= 0)
        def _(number=number, place=place):
            source, target = rows.rows.at[_row(place, size)], rows.buffers.at[buffer, _row(number, size)]
            pltpu.make_async_copy(source, target, rows.arrived.at[buffer]).start()


def _wait(num_rows: Any, buffer: Any, rows: Rows, size: int) -> None:
    """For so many copies, by sixteens and then one by one."""
    many = min(UNIT, rows.buffers.shape[1] // size)
    for unit, number in ((many, jax.lax.div(num_rows, many)), (1, jax.lax.rem(num_rows, many))):
        those = rows.buffers.at[buffer, pl.ds(0, unit * size)]
        copy = pltpu.make_async_copy(those, those, rows.arrived.at[buffer])
        jax.lax.fori_loop(0, number, lambda _, __, copy=copy: copy.wait(), None)

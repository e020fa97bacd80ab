"""Routing of few tokens on NVIDIA Hopper, in one kernel: choices, work of the matmuls, and the rows where they belong.

How this works. Tokens are the rows of one matmul of a warpgroup, experts its columns. Choices are made by taking the
largest logit `top_k` times. Sums over tokens (how many pick an expert before this one) and over experts (where the rows
of one begin) are products with triangular matrices of ones; all numbers are small enough to be exact. Every CUDA block
does this for all tokens, since it takes less time than to ask another, and copies one token's row; the last one writes
the list of tiles. In XLA the same takes eight kernels, each of which costs little but its launch.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_permute import copy_row
from jaxserve.pallas_kernels.grouped_matmul.work import UNIT, Work, max_rows
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS, SWIZZLED, iota, over, zeros

BY_ROW = plgpu.Layout.WGMMA.reduce(1)
NONE = 2.0**20  # no expert


def serves(num_tokens: int, num_experts: int, top_k: int, tile_rows: int) -> bool:
    """Whether the tokens fit one warpgroup and the experts its memory, and no expert has more than one tile."""
    return num_tokens <= ROWS <= tile_rows and num_experts in (64, 128) and top_k <= 16


def route_and_permute(
    x: Array, logits: Array, top_k: int, *, normalize: bool, interpret: bool = False
) -> tuple[Array, Work, Array, Array]:
    """The rows by expert, `[max_rows, D]`, the tiles, and i32 places and f32 weights of the choices, `[top_k, T]`."""
    (T, D), E = x.shape, logits.shape[1]
    num_rows = max_rows(T * top_k, E)
    square = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=SWIZZLED)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows, expert, row, counts, num_tiles, places, weights = plgpu.kernel(
        functools.partial(_route_kernel, top_k=top_k, normalize=normalize),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, D), x.dtype),
            ints((E,)),
            ints((E,)),
            ints((E,)),
            ints((ROWS,)),
            ints((top_k, ROWS)),
            jax.ShapeDtypeStruct((top_k, ROWS), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((ROWS, E), jnp.float32),
            square((2, ROWS, ROWS)),
            square((ROWS, E)),
            square((ROWS, E)),
            square((ROWS, E)),
            square((E, E)),
            plgpu.SMEM((top_k, ROWS), jnp.int32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            plgpu.SMEM((3, E), jnp.int32),
            plgpu.SMEM((ROWS,), jnp.int32),
            plgpu.Barrier(),
        ),
        grid=(T + 1,),
        grid_names=("token",),
        kernel_name="grouped_route",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, logits)
    work = Work(expert=expert, row=row, num_rows=counts, num_tiles=num_tiles)
    return rows, work, places[:, :T], weights[:, :T]


def _route_kernel(
    x_gmem,  # [T, D]
    logits_gmem,  # f32 [T, E]
    rows_gmem,  # [max_rows, D]
    expert_gmem,  # i32 [E], of tiles
    row_gmem,
    num_rows_gmem,
    num_tiles_gmem,  # i32 [ROWS], all the same
    places_gmem,  # i32 [top_k, ROWS]
    weights_gmem,  # f32 [top_k, ROWS]
    logits_smem,  # f32 [ROWS, E]
    tokens_smem,  # [2, ROWS, ROWS], ones up to the diagonal, and ones
    picks_smem,  # [ROWS, E], one where a token picks an expert
    sizes_smem,  # [ROWS, E], units of each expert
    visited_smem,  # [ROWS, E], one if it has any
    experts_smem,  # [E, E], ones above the diagonal
    places_smem,  # i32 [top_k, ROWS]
    largest_smem,  # f32 [top_k, ROWS], the logits of the choices
    chosen_smem,  # f32 [top_k, ROWS], their experts; NONE where a row is not numbers
    weights_smem,  # f32 [top_k, ROWS]
    tiles_smem,  # i32 [3, E]
    num_tiles_smem,  # i32 [ROWS]
    arrived,
    *,
    top_k: int,
    normalize: bool,
):
    (T, E), block = logits_gmem.shape, lax.axis_index("token")
    parts = range(0, E, ROWS)  # experts are looked at 64 at a time: what is known of all does not fit the registers
    column, row = (iota((ROWS, ROWS), axis).astype(jnp.float32) for axis in (1, 0))

    def some(part: int) -> Any:
        return (slice(None), pl.ds(part, ROWS))

    def picked(expert: Array, part: int) -> Array:
        return column == over(expert - part, column)

    plgpu.copy_gmem_to_smem(logits_gmem, logits_smem.at[pl.ds(0, T)], arrived)
    tokens_smem[0] = _ones(column <= row)
    tokens_smem[1] = _ones(column >= 0.0)
    for part, other in itertools.product(parts, parts):
        experts_smem[pl.ds(part, ROWS), pl.ds(other, ROWS)] = _ones(part + row < other + column)
    plgpu.barrier_wait(arrived)

    def logits(part: int) -> Array:
        return plgpu.load(logits_smem.at[some(part)], layout=plgpu.Layout.WGMMA, optimized=False)

    def choose(j: Array, left: list[Array]) -> list[Array]:
        value = functools.reduce(jnp.maximum, [some.max(axis=1) for some in left])
        found = [
            p - jnp.where(s == over(value, s), -column, -NONE).max(axis=1) for p, s in zip(parts, left, strict=True)
        ]
        expert = functools.reduce(jnp.minimum, found)
        largest_smem[j], chosen_smem[j] = value, expert
        return [jnp.where(picked(expert, p), -jnp.inf, s) for p, s in zip(parts, left, strict=True)]

    lax.fori_loop(0, top_k, choose, [logits(part) for part in parts])
    plgpu.commit_smem()

    def pick(j: Array, picks: list[Array]) -> list[Array]:
        expert = plgpu.load(chosen_smem.at[j], layout=BY_ROW)
        return [jnp.where(picked(expert, p), 1.0, s) for p, s in zip(parts, picks, strict=True)]

    nothing = [zeros((ROWS, ROWS), plgpu.Layout.WGMMA)] * len(parts)
    picks = lax.fori_loop(0, top_k, pick, nothing)
    for part, ones in zip(parts, picks, strict=True):
        picks_smem[some(part)] = jnp.where(row < T, ones, 0.0).astype(picks_smem.dtype)
    plgpu.commit_smem()
    for part in parts:
        counts = _product(tokens_smem.at[1], picks_smem.at[some(part)])  # all rows are the same
        visited_smem[some(part)] = _ones(counts > 0.0)
        units = lax.div(counts.astype(jnp.int32) + (UNIT - 1), UNIT)
        sizes_smem[some(part)] = units.astype(jnp.float32).astype(sizes_smem.dtype)
    plgpu.commit_smem()
    ranks = [_product(tokens_smem.at[0], picks_smem.at[some(part)]) - 1.0 for part in parts]
    firsts = [_product(sizes_smem, experts_smem.at[some(part)]) for part in parts]
    places = [first * UNIT + rank for first, rank in zip(firsts, ranks, strict=True)]
    dump = jnp.float32(rows_gmem.shape[0] - 1)  # no tile has it

    def place(j: Array, _) -> None:
        expert = plgpu.load(chosen_smem.at[j], layout=BY_ROW)
        own = [jnp.where(picked(expert, p), s, 0.0).sum(axis=1) for p, s in zip(parts, places, strict=True)]
        places_smem[j] = jnp.where(expert < NONE, functools.reduce(jnp.add, own), dump).astype(jnp.int32)

    lax.fori_loop(0, top_k, place, None)
    plgpu.commit_smem()

    @pl.when(block < T)
    def _copy():
        copy_row(x_gmem.at[block], [rows_gmem.at[places_smem[j, block]] for j in range(top_k)])

    @pl.when(block == T)
    def _write():
        largest = plgpu.load(largest_smem.at[0], layout=BY_ROW)

        def weight(j: Array) -> Array:
            return jnp.exp(plgpu.load(largest_smem.at[j], layout=BY_ROW) - largest)

        if normalize:
            total = lax.fori_loop(0, top_k, lambda j, total: total + weight(j), zeros((ROWS,), BY_ROW))
        else:
            shares = [jnp.exp(x - over(largest, x)).sum(axis=1) for x in map(logits, parts)]
            total = functools.reduce(jnp.add, shares)

        def store_weight(j: Array, _) -> None:
            weights_smem[j] = weight(j) / total

        lax.fori_loop(0, top_k, store_weight, None)

        def tiles(i: Array, _) -> None:
            """Fields of 64 tiles, each that of the one expert whose tile it is."""

            def look(p: Array, found: list[Array]) -> list[Array]:
                experts = (slice(None), pl.ds(p * ROWS, ROWS))
                counts = _product(tokens_smem.at[1], picks_smem.at[experts])
                first_unit = _product(sizes_smem, experts_smem.at[experts])
                tile = jnp.where(counts > 0.0, _product(visited_smem, experts_smem.at[experts]), NONE)
                here = tile == (i * ROWS).astype(jnp.float32) + row
                expert = column + (p * ROWS).astype(jnp.float32)
                new = [jnp.where(here, value, 0.0).sum(axis=1) for value in (expert, first_unit, counts)]
                new.append(jnp.where(counts > 0.0, 1.0, 0.0).sum(axis=1))
                return [a + b for a, b in zip(found, new, strict=True)]

            found = lax.fori_loop(0, len(parts), look, [zeros((ROWS,), BY_ROW)] * 4)
            *fields, num_tiles = (values.astype(jnp.int32) for values in found)
            for field, values in enumerate(fields):
                tiles_smem[field, pl.ds(i * ROWS, ROWS)] = values
            num_tiles_smem[...] = num_tiles

        lax.fori_loop(0, len(parts), tiles, None)
        plgpu.commit_smem()
        for i, target in enumerate((expert_gmem, row_gmem, num_rows_gmem)):
            plgpu.copy_smem_to_gmem(tiles_smem.at[i], target)
        for source, target in (
            (num_tiles_smem, num_tiles_gmem),
            (places_smem, places_gmem),
            (weights_smem, weights_gmem),
        ):
            plgpu.copy_smem_to_gmem(source, target)
        plgpu.wait_smem_to_gmem(0)


def _ones(where: Array) -> Array:
    return jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)


def _product(a_smem: Any, b_smem: Any) -> Array:
    def multiply(ref):
        plgpu.wgmma(ref, a_smem, b_smem)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a_smem.shape[0], b_smem.shape[1])))

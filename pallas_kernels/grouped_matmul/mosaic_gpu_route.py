"""Routing of up to 64 tokens on NVIDIA Hopper in one kernel: choices, tiles of the matmuls, rows where they belong.

How this works. Every CUDA block makes the choices of all tokens, since that takes less time than to ask another one.
Most then copy a token's row each, and one writes what the matmuls need to know. For one token there is a block on every
multiprocessor, and they bring the first weights of its experts to the L2 cache before the next kernel starts. Sums over
experts, of where the rows of one begin, are products with a triangular matrix of ones. In XLA the same takes eight
kernels, each of which costs little but its launch.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_choices import (
    BY_ROW,
    NONE,
    Choices,
    by_block,
    ones,
    product,
    square,
)
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_matmul_cta import Tiling, prefetch_unit
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_permute import load_row, store_row
from jaxserve.pallas_kernels.grouped_matmul.work import UNIT, Work, max_rows
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS, zeros


def route_and_permute(
    x: Array,
    logits: Array,
    real: Array,
    gate_up: Array,
    layer: int | Array,
    top_k: int,
    tiling: Tiling,
    *,
    normalize: bool,
    interpret: bool = False,
) -> tuple[Array, Work, Array, Array]:
    """The rows by expert, `[max_rows, D]`, the tiles, and i32 places and f32 weights of the choices, `[top_k, T]`.

    Tokens that are not `real` have no tile: the place of their choices is a row that no tile has, the weight zero.
    The first weights of a lone token's experts in the stack `gate_up` are brought to the L2 cache by units of `tiling`.
    """
    (T, D), E = x.shape, logits.shape[1]
    assert T <= ROWS, T
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows, expert, row, counts, num_tiles, places, weights = plgpu.kernel(
        functools.partial(_route_kernel, columns=tiling.columns, normalize=normalize),
        out_type=(
            jax.ShapeDtypeStruct((max_rows(T * top_k, E), D), x.dtype),
            ints((E,)),
            ints((E,)),
            ints((E,)),
            ints((ROWS,)),
            ints((top_k, ROWS)),
            jax.ShapeDtypeStruct((top_k, ROWS), jnp.float32),
        ),
        scratch_types=(
            square(ROWS, E),
            square(ROWS, E),
            square(E, E),
            plgpu.SMEM((E,), jnp.int32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            plgpu.SMEM((3, E), jnp.int32),
            plgpu.SMEM((ROWS,), jnp.int32),
            Choices.barrier(E),
            *Choices.scratch(E, top_k),
        ),
        grid=(tiling.multiprocessors if T == 1 else T + 1,),
        grid_names=("block",),
        kernel_name="grouped_route",
        interpret=INTERPRETER if interpret else None,
        # What one thread reads and another writes has a `commit_smem` in between
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(x, logits, by_block(real), gate_up.reshape(-1, *gate_up.shape[2:]), jnp.asarray(layer, jnp.int32).reshape(1))
    work = Work(expert=expert, row=row, num_rows=counts, num_tiles=num_tiles, num_experts=num_tiles[0])
    return rows, work, places[:, :T], weights[:, :T]


def _route_kernel(
    x_gmem,  # [T, D]
    logits_gmem,  # f32 [T, E]
    real_gmem,  # f32 [1, ROWS]
    gate_up_gmem,  # [L E, 2 F, D]
    layer_gmem,  # i32 [1]
    rows_gmem,  # [max_rows, D]
    expert_gmem,  # i32 [E], of tiles
    row_gmem,
    num_rows_gmem,
    num_tiles_gmem,  # i32 [ROWS], all the same
    places_gmem,  # i32 [top_k, ROWS]
    weights_gmem,  # f32 [top_k, ROWS]
    sizes_smem,  # [ROWS, E], units of each expert
    visited_smem,  # [ROWS, E], one if it has any
    experts_smem,  # [E, E], ones above the diagonal
    own_smem,  # i32 [E], where each expert has the block's token
    weights_smem,  # f32 [top_k, ROWS]
    tiles_smem,  # i32 [3, E]
    num_tiles_smem,  # i32 [ROWS]
    arrived,
    *choices_smem,
    columns: int,
    normalize: bool,
):
    choices, T, block = Choices(*choices_smem), x_gmem.shape[0], lax.axis_index("block")
    row, column, parts = choices.row, choices.column, choices.parts
    choices.fetch(logits_gmem, 0, real_gmem.at[0], arrived)
    x_row = load_row(x_gmem.at[jnp.minimum(block, T - 1)])
    for part, other in itertools.product(parts, parts):
        experts_smem[pl.ds(part, ROWS), pl.ds(other, ROWS)] = ones(part + row < other + column)
    choices.make(arrived)
    for part in parts:
        counts, some = choices.counts(part), pl.ds(part, ROWS)
        visited_smem[:, some] = ones(counts > 0.0)
        units = (counts.astype(jnp.int32) + (UNIT - 1)) >> 3
        sizes_smem[:, some] = units.astype(jnp.float32).astype(sizes_smem.dtype)
    plgpu.commit_smem()

    def before(smem, part):
        """Sums over the experts before each one."""
        return product(smem, experts_smem.at[:, pl.ds(part, ROWS)])

    @pl.when(block < T)
    def _copy():
        """The token's row, to the places of its choices."""
        no_tile = rows_gmem.shape[0] - 1  # a row that no tile has, for what is no choice
        for part in parts:
            places = before(sizes_smem, part) * UNIT + choices.ranks(part)  # where each expert has each token
            own = jnp.where(row == block.astype(jnp.float32), places, 0.0).sum(axis=0)
            own_smem[pl.ds(part, ROWS)] = own.astype(jnp.int32)
        plgpu.commit_smem()
        chosen = [choices.chosen_smem[j, block] for j in range(choices.top_k)]
        experts = [jnp.where(expert < NONE, expert, 0.0).astype(jnp.int32) for expert in chosen]
        places = [jnp.where(c < NONE, own_smem[e], no_tile) for c, e in zip(chosen, experts, strict=True)]

        @pl.when(places[0] < no_tile)
        def _real():
            store_row(x_row, [rows_gmem.at[place] for place in places])

        for j, place in enumerate(places):
            places_gmem[j, block] = place

    @pl.when(block == T)
    def _write():
        choices.store_weights(weights_smem, normalize)

        def tiles(i: Array, _) -> None:
            """Fields of 64 tiles, each that of the one expert whose tile it is."""

            def look(p: Array, found: list[Array]) -> list[Array]:
                part = p * ROWS
                counts, first_unit = choices.counts(part), before(sizes_smem, part)
                tile = jnp.where(counts > 0.0, before(visited_smem, part), NONE)
                here = tile == (i * ROWS).astype(jnp.float32) + row
                expert = column + part.astype(jnp.float32)
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
        plgpu.copy_smem_to_gmem(num_tiles_smem, num_tiles_gmem)
        plgpu.copy_smem_to_gmem(weights_smem, weights_gmem)
        plgpu.wait_smem_to_gmem(0)

    if T == 1:
        runs = gate_up_gmem.shape[1] // (2 * columns)
        choice = lax.div(block, runs)
        chosen = choices.chosen_smem[jnp.minimum(choice, choices.top_k - 1), 0]

        @pl.when((choice < choices.top_k) & (chosen < NONE))
        def _prefetch():
            expert = layer_gmem[0] * logits_gmem.shape[1] + chosen.astype(jnp.int32)
            prefetch_unit(gate_up_gmem.at[expert], lax.rem(block, runs), columns, parts=2)

"""Products of rows with the weights of their experts, on NVIDIA Hopper.

How this works. The rows of each expert are cut into *tiles*, the outputs of an expert into runs of *columns*; a tile
and a run are a unit of work. A CUDA block, one a multiprocessor, takes one unit after another. One warpgroup fetches
rows and weights by TMA, some blocks of the summed dimension ahead and on into the next unit; each of the others
multiplies its 64 rows with the weights of all columns of the unit. Rows beyond those that the expert has are not
fetched: what is computed for them is not stored.

The weights that the next matmul begins with are brought to the L2 cache while the last products are made, so that the
memory does not rest between the kernels.

With an activation, a unit has the same columns of both halves of the weights, so that `act(gate) * up` is formed where
both are, in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_matmul_cta import Cta, Options, Tiling
from jaxserve.pallas_kernels.grouped_matmul.work import UNIT, Work
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS


def swizzled(width: int, itemsize: int = 2) -> Any:
    """The form in shared memory of rows of `width` elements."""
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    tiled: Any = plgpu.TilingTransform((UNIT, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return (tiled, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]


def grouped_matmul(
    rows: Array,
    stack: Array,
    layer: int | Array,
    work: Work,
    tiling: Tiling,
    *,
    gated: bool,
    following: tuple[Array, Tiling] | None = None,
    interpret: bool = False,
) -> Array:
    """`rows[i] @ stack[layer, expert of row i].T` for every row of a tile, in rows.dtype; other rows hold anything.

    With `gated` the two halves of each output are `g` and `u`, and `silu(g) * u` comes back.

    Args:
        rows: `[rows, in]`. stack: `[L, E, out, in]`.
        following: the stack and the tiling of the matmul that comes next, of the same tiles of rows and not gated.
    """
    (num_rows, depth), (L, E, outs, _) = rows.shape, stack.shape
    parts = 2 if gated else 1
    width = outs // parts
    columns, stages, block = tiling.columns, tiling.stages, tiling.block
    assert width % columns == 0, (width, columns)
    assert depth % block == 0, (depth, block)
    piece = max(p for p in (16, 32, 48, 64) if columns % p == 0)
    next_stack, next_tiling = following or (stack, None)
    options = Options(tiling=tiling, next_tiling=next_tiling, parts=parts, num_experts=E)
    return plgpu.kernel(
        functools.partial(_kernel, options=options),
        out_type=jax.ShapeDtypeStruct((num_rows, width), rows.dtype),
        scratch_types=(
            plgpu.SMEM((stages, tiling.tile_rows, block), rows.dtype, transforms=swizzled(block)),
            plgpu.SMEM((stages, parts * columns, block), rows.dtype, transforms=swizzled(block)),
            plgpu.SMEM((tiling.warpgroups, 2, ROWS, piece), rows.dtype, transforms=swizzled(piece)),
            plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=stages),
        ),
        grid=(tiling.multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="grouped_gate_up" if gated else "grouped_down",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        rows,
        stack.reshape(L * E, outs, depth),
        next_stack.reshape(L * E, *next_stack.shape[2:]),
        work.expert,
        work.row,
        work.num_rows,
        work.num_tiles,
        jnp.asarray(layer, jnp.int32).reshape(1),
    )


def _kernel(
    rows_gmem,
    weights_gmem,
    next_weights_gmem,
    expert_gmem,
    row_gmem,
    num_rows_gmem,
    num_tiles_gmem,
    layer_gmem,
    out_gmem,
    rows_smem,
    weights_smem,
    out_smem,
    arrived,
    consumed,
    *,
    options: Options,
):
    warpgroup, computing = lax.axis_index("warpgroup"), options.tiling.warpgroups
    cta = Cta(
        rows_gmem=rows_gmem,
        weights_gmem=weights_gmem,
        next_weights_gmem=next_weights_gmem,
        expert_gmem=expert_gmem,
        row_gmem=row_gmem,
        num_rows_gmem=num_rows_gmem,
        num_tiles_gmem=num_tiles_gmem,
        layer_gmem=layer_gmem,
        out_gmem=out_gmem,
        rows_smem=rows_smem,
        weights_smem=weights_smem,
        out_smem=out_smem,
        arrived=arrived,
        consumed=consumed,
        warpgroup=warpgroup,
        options=options,
    )

    @pl.when(warpgroup == computing)
    def _fetch():
        if computing > 1:
            plgpu.set_max_registers(40, action="decrease")
        cta.each_unit(cta.fetch)
        if options.next_tiling is not None:
            cta.prefetch(options.next_tiling)

    @pl.when(warpgroup < computing)
    def _compute():
        if computing > 1:
            plgpu.set_max_registers(232, action="increase")
        cta.each_unit(cta.compute)
        plgpu.wait_smem_to_gmem(0)

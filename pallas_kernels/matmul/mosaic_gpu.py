"""Products of few rows with a large weight on NVIDIA Hopper, at the speed of the memory that holds the weight.

How this works. The rows fill part of one 64-row matmul; what counts is that all multiprocessors stream the weight all
the time. A *unit* is `DEPTH` inputs of `width` outputs, a *tile* all units of the same outputs, and every CUDA block
takes an equal run of consecutive units (stream-K, arXiv 2301.03598), fetched by TMA a few units ahead. A block's sum
over its part of tile t is stored as part t + block: consecutive for one tile, unique over all. Which parts make up a
tile follows from the shapes alone, so XLA adds them up inside whatever reads the product.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a matmul of one warpgroup
DEPTH = 128  # inputs in a unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    width: int = 64  # outputs in a tile
    stages: int = 6  # units in shared memory
    blocks: int = 132  # CUDA blocks


def unsupported(x: Array, stack: Array, tiling: Tiling = Tiling()) -> str | None:
    """Why the kernel cannot do this product; None if it can."""
    if x.dtype not in ("bfloat16", "float16") or stack.dtype != x.dtype:
        return f"rows and weight must both be bfloat16 or both float16, got {x.dtype} and {stack.dtype}"
    if not 0 < x.shape[0] <= ROWS:
        return f"at most {ROWS} rows, got {x.shape[0]}"
    if stack.shape[1] % tiling.width or stack.shape[2] % DEPTH:
        return f"outputs must be a multiple of {tiling.width} and inputs of {DEPTH}, got {stack.shape[1:]}"
    return None


def matmul(x: Array, stack: Array, layer: Array, tiling: Tiling = Tiling()) -> Array:
    """`x @ stack[layer].T` in float32: x [T, in], stack [L, out, in] -> [T, out]."""
    num_rows, (_, N, D) = x.shape[0], stack.shape
    width, stages, blocks = tiling.width, tiling.stages, tiling.blocks
    rows = -(-num_rows // 8) * 8
    tiles, depth = N // width, D // DEPTH
    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
    parts = plgpu.kernel(
        functools.partial(_multiply, tiling=tiling),
        out_type=jax.ShapeDtypeStruct((tiles + blocks, rows, width), jnp.float32),
        scratch_types=(
            plgpu.SMEM((stages, ROWS, DEPTH), x.dtype, **swizzled),
            plgpu.SMEM((stages, width, DEPTH), x.dtype, **swizzled),
            plgpu.SMEM(
                (ROWS, width), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="matmul_few_rows",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512),
    )(jnp.pad(x, ((0, rows - num_rows), (0, 0))), stack, jnp.asarray(layer, jnp.int32).reshape(1))
    first, last = parts_of_tiles(tiles, depth, blocks)
    total = jnp.zeros((), jnp.float32)
    for i in range(int((last - first).max()) + 1):
        part = parts[np.minimum(first + i, last)]  # [tiles, rows, width]
        there = (first + i <= last)[:, None, None]
        total = total + (part if there.all() else jnp.where(there, part, 0.0))
    return total.transpose(1, 0, 2).reshape(rows, N)[:num_rows]


def parts_of_tiles(tiles: int, depth: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last part of each tile."""
    share, rest = divmod(tiles * depth, blocks)
    starts = np.arange(blocks + 1) * share + np.minimum(np.arange(blocks + 1), rest)
    tile = np.arange(tiles)
    first = np.searchsorted(starts, tile * depth, side="right") - 1
    last = np.searchsorted(starts, tile * depth + depth - 1, side="right") - 1
    return tile + first, tile + last


def _multiply(
    x_gmem,  # [rows, D]
    stack_gmem,  # [L, N, D]
    layer_gmem,  # i32 [1]
    out_gmem,  # f32 [tiles + blocks, rows, width]
    x_smem,  # [stages, ROWS, DEPTH]; what lies beyond `rows` is never stored
    w_smem,  # [stages, width, DEPTH]
    out_smem,  # f32 [ROWS, width]
    arrived,  # [stages]
    consumed,
    *,
    tiling: Tiling,
):
    width, stages, blocks = tiling.width, tiling.stages, tiling.blocks
    rows, D = x_gmem.shape
    depth = D // DEPTH
    share, rest = divmod(stack_gmem.shape[1] // width * depth, blocks)
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    start = block * share + jnp.minimum(block, rest)
    count = share + jnp.where(block < rest, 1, 0)

    @pl.when(warpgroup == 1)
    def _fetch():
        layer = layer_gmem[0]

        def step(i, _):
            slot, unit = lax.rem(i, stages), start + i
            tile, inputs = lax.div(unit, depth), pl.ds(lax.rem(unit, depth) * DEPTH, DEPTH)

            @pl.when(i >= stages)
            def _wait():
                plgpu.barrier_wait(consumed.at[slot])

            plgpu.copy_gmem_to_smem(
                stack_gmem.at[layer, pl.ds(tile * width, width), inputs], w_smem.at[slot], arrived.at[slot]
            )
            plgpu.copy_gmem_to_smem(x_gmem.at[:, inputs], x_smem.at[slot, pl.ds(0, rows)], arrived.at[slot])

        lax.fori_loop(0, count, step, None)

    @pl.when(warpgroup == 0)
    def _compute():
        def step(i, total):
            slot, unit = lax.rem(i, stages), start + i
            plgpu.barrier_wait(arrived.at[slot])

            def product(ref):
                plgpu.wgmma(ref, x_smem.at[slot], w_smem.at[slot].T)
                return ref[...]

            begins = (i == 0) | (lax.rem(unit, depth) == 0)
            kept = jnp.where(begins, 0.0, 1.0)  # of what the last unit left
            total = total * kept + pl.run_scoped(product, plgpu.ACC((ROWS, width), jnp.float32))
            plgpu.barrier_arrive(consumed.at[slot])

            @pl.when((i + 1 == count) | (lax.rem(unit + 1, depth) == 0))
            def _store_part():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[...] = total
                plgpu.commit_smem()
                part = lax.div(unit, depth) + block
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, rows)], out_gmem.at[part])

            return total

        zero = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        lax.fori_loop(0, count, step, zero)
        plgpu.wait_smem_to_gmem(0)

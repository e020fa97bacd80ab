"""The dense part of a layer for few rows on NVIDIA Hopper: one kernel that reads weights almost without a pause.

How this works. With few rows a matmul takes the time of reading its weights. Four of them and the norms between them,
as kernels of their own, each lose the time in which a kernel starts, waits for its first bytes and ends. Here one CUDA
block a multiprocessor works through all of it. A warpgroup of it fetches weights by TMA through a ring of buffers. It
waits for nothing but a free buffer, since weights depend on nothing, and so the ring is full by the time that the rows
for the next matmul are ready. Another warpgroup fetches these rows, and a third computes.

Rows pass from block to block through memory. A counter there says how far all of them are: who is done with a step
adds one, and who needs the rows of all waits for the sum. This works because all blocks are on the card at once: there
are no more of them than multiprocessors, and any other kernel that holds one ends sometime.

Few columns would not occupy all multiprocessors, so most matmuls are also cut along their inputs. What results are
*parts*, added up in a fixed order by a step that also adds the residual and multiplies by the weights of the norm. The
norm's own factor, one a row, is known only when all columns are; it is applied to the sums of the matmul that follows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.dense_layer import grid_sync
from jaxserve.pallas_kernels.dense_layer.block import PIECE, ROW_STAGES, STAGES, Block, Matmul
from jaxserve.pallas_kernels.dense_layer.cuts import BLOCK, MAX_ROWS, VECTOR, WIDTHS, Cut, chunk, cut, fits_rows
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS, SWIZZLED, over
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import num_multiprocessors

FETCH_WEIGHTS, FETCH_ROWS, COMPUTE = range(3)  # warpgroups
ROW_FACTORS = plgpu.Layout.WGMMA.reduce(1)


class Cuts(NamedTuple):
    o: Cut
    gate_up: Cut
    down: Cut
    qkv: Cut


def cuts_of(weights: Any, workers: int) -> Cuts | None:
    """How the four matmuls are cut; None if one cannot be."""
    (D, inputs), F, qkv = weights.o.shape[1:], weights.down.shape[2], weights.qkv.shape[1]
    o, gate_up = cut(inputs, D, workers), cut(D, F, workers, gated=True)
    down, heads = cut(F, D, workers), cut(D, qkv, workers)
    if not (o and gate_up and down and heads) or D % VECTOR or qkv % VECTOR:
        return None
    return Cuts(o=o, gate_up=gate_up, down=down, qkv=heads)


def unsupported(weights: Any, num_rows: int) -> str | None:
    """Why the kernel cannot serve this call; None if it can."""
    if not fits_rows(num_rows):
        return f"rows must be a multiple of 8 up to {MAX_ROWS}, got {num_rows}"
    for name, leaf in weights._asdict().items():
        dtype = getattr(leaf, "dtype", "quantised weights")
        if dtype != jnp.bfloat16:
            return f"all weights must be bfloat16, got {dtype} for {name}"
    if cuts_of(weights, num_multiprocessors()) is None:
        shapes = {name: leaf.shape[1:] for name, leaf in weights._asdict().items()}
        return f"inputs must be multiples of {BLOCK} and outputs of the layer and of qkv of {VECTOR}, got {shapes}"
    return None


def dense_layer(
    attended: Array,
    x: Array,
    weights: Any,
    layer: Array,
    progress: Array,
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See the package's `dense_layer`. An interpreter runs one block, which has all the units."""
    (R, D), workers = x.shape, 1 if interpret else num_multiprocessors()
    cuts = cuts_of(weights, num_multiprocessors())
    assert cuts is not None, "not supported"
    QKV, F, size = cuts.qkv.outputs, cuts.gate_up.outputs, chunk(R, D, workers)
    counter = jax.new_ref(progress)
    y, heads, *_ = plgpu.kernel(
        functools.partial(_kernel, cuts=cuts, eps=eps, offset=offset, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((R, D), x.dtype),
            jax.ShapeDtypeStruct((R, QKV), x.dtype),
            jax.ShapeDtypeStruct((max(cuts.o.splits, cuts.down.splits), R, D), jnp.float32),
            jax.ShapeDtypeStruct((R, D), x.dtype),
            jax.ShapeDtypeStruct((D // size, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((R, F), x.dtype),
            jax.ShapeDtypeStruct((cuts.qkv.splits, R, QKV), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((STAGES, 2, WIDTHS[-1], BLOCK), x.dtype, transforms=SWIZZLED),
            plgpu.SMEM((ROW_STAGES, ROWS, PIECE), x.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=ROW_STAGES),
            plgpu.Barrier(num_barriers=ROW_STAGES),
            plgpu.Barrier(),
        ),
        grid=(workers,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="dense_layer",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(
        attended,
        x,
        weights.o,
        weights.post_norm,
        weights.gate_up,
        weights.down,
        weights.input_norm,
        weights.qkv,
        layer.reshape(1),
        counter,
    )
    return y, heads, jax.freeze(counter)


def _kernel(
    attended_gmem,  # [R, N H]
    x_gmem,  # [R, D]
    o_gmem,  # [L, D, N H]
    post_norm_gmem,  # [L, D]
    gate_up_gmem,  # [L, 2 F, D]
    down_gmem,  # [L, D, F]
    input_norm_gmem,  # [L, D]
    qkv_gmem,  # [L, QKV, D]
    layer_gmem,  # i32 [1]
    counter_gmem,  # i32 [2]: steps that blocks have done, and how many those were when this kernel started
    y_gmem,  # [R, D]
    heads_gmem,  # [R, QKV]
    parts_gmem,  # f32 [splits, R, D]
    scaled_gmem,  # [R, D]: the residual stream times the weights of the norm
    squares_gmem,  # f32 [chunks, ROWS]: sums of the squares of the residual stream
    act_gmem,  # [R, F]
    head_parts_gmem,  # f32 [splits, R, QKV]
    w_smem,  # [STAGES, 2, WIDTHS[-1], BLOCK]
    x_smem,  # [ROW_STAGES, ROWS, PIECE]
    w_arrived,  # [STAGES]
    w_consumed,
    x_arrived,  # [ROW_STAGES]
    x_consumed,
    done,  # in place of the counter if there is one block
    *,
    cuts: Cuts,
    eps: float,
    offset: float,
    interpret: bool,
):
    L, D = o_gmem.shape[0], x_gmem.shape[1]
    layer, warpgroup = layer_gmem[0], lax.axis_index("warpgroup")
    next_layer = jnp.minimum(layer + 1, L - 1)
    has_next = jnp.where(layer + 1 < L, 1, 0)
    block = Block(
        index=lax.axis_index("block"),
        count=lax.axis_size("block"),
        counter=counter_gmem,
        start=counter_gmem[1],
        done=done,
        w_smem=w_smem,
        x_smem=x_smem,
        w_arrived=w_arrived,
        w_consumed=w_consumed,
        x_arrived=x_arrived,
        x_consumed=x_consumed,
        interpret=interpret,
    )

    def norm_factors(load: Callable[[Any], Array]) -> Array:
        squares = [load(squares_gmem.at[i]) for i in range(squares_gmem.shape[0])]
        return lax.rsqrt(functools.reduce(jnp.add, squares) / D + eps)

    def factors_of_rows() -> Array:
        return norm_factors(lambda squares: plgpu.load(squares, layout=ROW_FACTORS, optimized=False))

    def activate(tile: Array, split: Array, halves: list[Array], factors: Array) -> None:
        del split
        gate, up = (half * over(factors, half) for half in halves)
        (column, _), width = cuts.gate_up.columns(tile), cuts.gate_up.width
        act = (gate / (1.0 + jnp.exp(-gate)) * up).astype(act_gmem.dtype)
        grid_sync.store_rows(act, act_gmem.at[:, pl.ds(column, width)], act_gmem.shape[0], interpret=interpret)

    def store_parts(parts, cut: Cut, tile: Array, split: Array, halves: list[Array], _: None) -> None:
        for column, half in zip(cut.columns(tile), halves, strict=True):
            some = parts.at[split, :, pl.ds(column, cut.width)]
            grid_sync.store_rows(half, some, parts.shape[1], interpret=interpret)

    def add_residual(splits: int, residual, norm) -> None:
        def add(row: Array, i: Array, some: Any, load: Callable[[Any], Array]) -> None:
            parts = [load(parts_gmem.at[split, row, some]) for split in range(splits)]
            y = functools.reduce(jnp.add, parts, load(residual.at[row, some])).astype(y_gmem.dtype)
            y_gmem[row, some] = y
            y = y.astype(jnp.float32)
            scaled_gmem[row, some] = (y * (offset + load(norm.at[some]))).astype(scaled_gmem.dtype)
            squares_gmem[i, row] = jnp.sum(y * y)

        block.each_chunk(y_gmem.shape, D // squares_gmem.shape[0], add)

    def add_heads() -> None:
        def add(row: Array, i: Array, some: Any, load: Callable[[Any], Array]) -> None:
            del i
            parts = [load(head_parts_gmem.at[split, row, some]) for split in range(cuts.qkv.splits)]
            factor = norm_factors(lambda squares: squares[row])
            heads_gmem[row, some] = (functools.reduce(jnp.add, parts) * factor).astype(heads_gmem.dtype)

        block.each_chunk(heads_gmem.shape, VECTOR, add)

    def matmul(name: str, rows, weights, finish: Callable, prepare: Callable | None = None, times: Any = 1) -> Matmul:
        return Matmul(cut=getattr(cuts, name), rows=rows, weights=weights, finish=finish, prepare=prepare, times=times)

    steps: list[Matmul | Callable[[], None]] = [
        matmul("o", attended_gmem, o_gmem.at[layer], functools.partial(store_parts, parts_gmem, cuts.o)),
        functools.partial(add_residual, cuts.o.splits, x_gmem, post_norm_gmem.at[layer]),
        matmul("gate_up", scaled_gmem, gate_up_gmem.at[layer], activate, factors_of_rows),
        matmul("down", act_gmem, down_gmem.at[layer], functools.partial(store_parts, parts_gmem, cuts.down)),
        functools.partial(add_residual, cuts.down.splits, y_gmem, input_norm_gmem.at[next_layer]),
        matmul(
            "qkv",
            scaled_gmem,
            qkv_gmem.at[next_layer],
            functools.partial(store_parts, head_parts_gmem, cuts.qkv),
            times=has_next,
        ),
        add_heads,
    ]

    @pl.when(warpgroup == FETCH_WEIGHTS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        block.fetch_weights(steps)

    @pl.when(warpgroup == FETCH_ROWS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        block.fetch_rows(steps)

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(232, action="increase")
        block.compute(steps)

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

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.dense_layer import grid_sync
from jaxserve.pallas_kernels.dense_layer.cuts import BLOCK, MAX_ROWS, VECTOR, WIDTHS, Cut, chunk, cut, fits_rows
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS, SWIZZLED, over
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import num_multiprocessors

PIECE = 64  # inputs of the rows that are fetched at a time
STAGES, ROW_STAGES = 6, 4
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

    def matmul(name: str, rows, weights, finish: Callable, prepare: Callable | None = None, times: Any = 1) -> "Matmul":
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """One step of the kernel: rows times weights."""

    cut: Cut
    rows: Any  # [R, inputs]
    weights: Any  # [outputs, inputs], twice the outputs if gated
    finish: Callable[..., None]  # (tile, split, the sums of the two halves, what `prepare` returned)
    prepare: Callable[[], Any] | None  # what of other steps `finish` needs
    times: int | Array  # 0 = the step is left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One CUDA block: its share of each step."""

    index: Array
    count: int
    counter: Any
    start: Array  # what the counter was
    done: Any
    w_smem: Any
    x_smem: Any
    w_arrived: Any
    w_consumed: Any
    x_arrived: Any
    x_consumed: Any
    interpret: bool

    def share(self, total: int) -> Array:
        """How many of so many units are this block's: those whose numbers are its own, and then every `count`-th."""
        return lax.div(total - self.index + (self.count - 1), self.count)

    def each_unit(self, step: Matmul, i: Array, visit: Callable[..., Array]) -> Array:
        """`i = visit(i, tile, split, begin, end)` for each unit of this block and its range of blocks of inputs."""
        cut, blocks = step.cut, step.cut.inputs // BLOCK

        def unit(j: Array, i: Array) -> Array:
            number = self.index + j * self.count
            tile, split = lax.div(number, cut.splits), lax.rem(number, cut.splits)
            return visit(i, tile, split, lax.div(split * blocks, cut.splits), lax.div((split + 1) * blocks, cut.splits))

        return lax.fori_loop(0, step.times * self.share(cut.units), unit, i)

    def turned(self, b: Array, begin: Array, end: Array) -> Array:
        """Another order of the inputs in each block, lest all read the same rows at a time: 4 % of the time."""
        return begin + lax.rem(b - begin + self.index, end - begin)

    def each_chunk(self, shape: tuple[int, int], size: int, visit: Callable[..., None]) -> None:
        """`visit(row, i, columns, load)` for each of this block's chunks of rows; `load` gives one as float32."""
        chunks = shape[1] // size
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=4)

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        def one(j: Array, _: None) -> None:
            number = self.index + j * self.count
            row, i = lax.div(number, chunks), lax.rem(number, chunks)
            visit(row, i, pl.ds(i * size, size), load)

        lax.fori_loop(0, self.share(shape[0] * chunks), one, None)

    # How far the others are

    def signal(self) -> None:
        if self.interpret:
            return plgpu.barrier_arrive(self.done)
        grid_sync.signal(self.counter)

    def wait(self, step: int) -> None:
        """Until all blocks have done the steps before this one."""
        if self.interpret:
            return plgpu.barrier_wait(self.done)
        grid_sync.wait(self.counter, self.start + step * self.count)

    # The warpgroups

    def fetch_weights(self, steps: list) -> None:
        i = jnp.int32(0)
        for step in steps:
            if isinstance(step, Matmul):
                i = self.each_unit(step, i, functools.partial(self.fetch_tile, step))

    def fetch_tile(self, step: Matmul, i: Array, tile: Array, split: Array, begin: Array, end: Array) -> Array:
        del split

        def fetch(b: Array, i: Array) -> Array:
            slot = lax.rem(i, STAGES)
            pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(self.w_consumed.at[slot]))
            inputs = pl.ds(self.turned(b, begin, end) * BLOCK, BLOCK)
            for half, column in enumerate(step.cut.columns(tile)):
                columns = pl.ds(column, step.cut.width)
                target = self.w_smem.at[slot, half, pl.ds(0, step.cut.width)]
                plgpu.copy_gmem_to_smem(step.weights.at[columns, inputs], target, self.w_arrived.at[slot])
            return i + 1

        return lax.fori_loop(begin, end, fetch, i)

    def fetch_rows(self, steps: list) -> None:
        i = jnp.int32(0)
        for number, step in enumerate(steps):
            # A block without a share must not look at the counter late: it might be that of the next kernel already
            share = self.share(step.cut.units) if isinstance(step, Matmul) else 0
            if number > 0:
                pl.when(jnp.logical_or(self.interpret, share > 0))(functools.partial(self.wait, number))
            if isinstance(step, Matmul):
                i = self.each_unit(step, i, functools.partial(self.fetch_inputs, step))

    def fetch_inputs(self, step: Matmul, i: Array, tile: Array, split: Array, begin: Array, end: Array) -> Array:
        del tile, split

        def fetch(b: Array, i: Array) -> Array:
            for piece in range(BLOCK // PIECE):
                slot = lax.rem(i, ROW_STAGES)
                pl.when(i >= ROW_STAGES)(lambda slot=slot: plgpu.barrier_wait(self.x_consumed.at[slot]))
                inputs = pl.ds(self.turned(b, begin, end) * BLOCK + piece * PIECE, PIECE)
                target = self.x_smem.at[slot, pl.ds(0, step.rows.shape[0])]
                plgpu.copy_gmem_to_smem(step.rows.at[:, inputs], target, self.x_arrived.at[slot])
                i = i + 1
            return i

        return lax.fori_loop(begin, end, fetch, i)

    def compute(self, steps: list) -> None:
        i = jnp.int32(0)
        for number, step in enumerate(steps):
            if number > 0 and not self.interpret:
                self.wait(number)
            if isinstance(step, Matmul):
                needed = step.prepare() if step.prepare else None
                i = self.each_unit(step, i, functools.partial(self.multiply, step, needed))
            else:
                step()
            if number + 1 < len(steps):
                self.signal()

        @pl.when(self.index == 0)
        def _():
            self.counter[1] = self.start + (len(steps) - 1) * self.count

    def multiply(
        self, step: Matmul, needed: Any, i: Array, tile: Array, split: Array, begin: Array, end: Array
    ) -> Array:
        """One unit. Rows beyond the last are whatever was in the buffer; nothing is done with their sums."""
        width, pieces = step.cut.width, BLOCK // PIECE

        def sum_up(*halves: Any) -> list[Array]:
            def add(b: Array, _: None) -> None:
                at = i + b - begin
                slot = lax.rem(at, STAGES)
                plgpu.barrier_wait(self.w_arrived.at[slot])
                for piece in range(pieces):
                    row_slot = lax.rem(at * pieces + piece, ROW_STAGES)
                    plgpu.barrier_wait(self.x_arrived.at[row_slot])
                    for half, sums in enumerate(halves):
                        weights = self.w_smem.at[slot, half, pl.ds(0, width), pl.ds(piece * PIECE, PIECE)]
                        plgpu.wgmma(sums, self.x_smem.at[row_slot], weights.T)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(self.x_consumed.at[row_slot])
                plgpu.barrier_arrive(self.w_consumed.at[slot])

            lax.fori_loop(begin, end, add, None)
            return [sums[...] for sums in halves]

        sums = plgpu.WGMMAAccumulatorRef((ROWS, width))
        step.finish(tile, split, pl.run_scoped(sum_up, sums, sums), needed)
        return i + end - begin

"""What one CUDA block does of each step, with each of its warpgroups: see `mosaic_gpu`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.dense_layer import grid_sync
from jaxserve.pallas_kernels.dense_layer.cuts import BLOCK, Cut
from jaxserve.pallas_kernels.paged_attention.hopper import ROWS

PIECE = 64  # inputs of the rows that are fetched at a time
STAGES, ROW_STAGES = 6, 4


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

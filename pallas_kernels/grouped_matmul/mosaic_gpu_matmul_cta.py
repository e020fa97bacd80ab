"""What one CUDA block of a grouped matmul does, with each of its warpgroups: see `mosaic_gpu_matmul`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.work import UNIT
from jaxserve.pallas_kernels.paged_attention.hopper import ROWS

PREFETCHED_BYTES = 128 * 1024  # by each CUDA block, of the next matmul's weights: together what is read in 4 us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    warpgroups: int  # that compute, each 64 rows of a tile
    columns: int  # of a unit
    block: int  # of the summed dimension, in a stage
    stages: int
    multiprocessors: int

    @property
    def tile_rows(self) -> int:
        return ROWS * self.warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    tiling: Tiling
    next_tiling: Tiling | None
    parts: int
    num_experts: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    weights: Array  # expert, counted through all layers
    row: Array  # the first, in `UNIT`s
    num_rows: Array
    run: Array  # of columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cta:
    """One CUDA block as one of its warpgroups sees it."""

    rows_gmem: Any  # [rows, in]
    weights_gmem: Any  # [L E, out, in]
    next_weights_gmem: Any  # [L E, out, in], of another matmul
    expert_gmem: Any  # i32 [tiles]
    row_gmem: Any
    num_rows_gmem: Any
    num_tiles_gmem: Any  # i32 [1]
    layer_gmem: Any  # i32 [1]
    out_gmem: Any  # [rows, out / parts]
    rows_smem: Any  # [stages, tile_rows, block]
    weights_smem: Any  # [stages, parts * columns, block]
    out_smem: Any  # [warpgroups, 2, ROWS, 64 or columns]
    arrived: Any  # [stages]
    consumed: Any  # [stages]
    warpgroup: Array
    options: Options

    @property
    def num_blocks(self) -> int:
        return self.rows_gmem.shape[1] // self.options.tiling.block

    def slot(self, i: Array) -> Array:
        return lax.rem(i, self.options.tiling.stages)

    def each_unit(self, body) -> None:
        """`body(unit, i)` for every unit of this CUDA block; i counts the blocks of those before.

        What is to be known of a unit is loaded during the one before, and of the first beside the number of units.
        """
        multiprocessors, layer = self.options.tiling.multiprocessors, self.layer_gmem[0]
        runs, last_tile = self.out_gmem.shape[1] // self.options.tiling.columns, self.expert_gmem.shape[0] - 1
        first, num_units = lax.axis_index("multiprocessor"), self.num_tiles_gmem[0] * runs

        def unit(i):
            number = first + i * multiprocessors
            tile = jnp.minimum(lax.div(number, runs), last_tile)
            return Unit(
                weights=layer * self.options.num_experts + self.expert_gmem[tile],
                row=self.row_gmem[tile],
                num_rows=self.num_rows_gmem[tile],
                run=lax.rem(number, runs),
            )

        def step(i, this):
            following = unit(i + 1)
            body(this, i * self.num_blocks)
            return following

        count = lax.div(num_units - first + (multiprocessors - 1), multiprocessors)
        lax.fori_loop(0, count, step, unit(0))

    # The warpgroup that fetches

    def fetch(self, unit: Unit, begin: Array) -> None:
        tiling, weights, row = self.options.tiling, self.weights_gmem.at[unit.weights], unit.row * UNIT
        column = unit.run * tiling.columns  # rows and columns are seen to be multiples of what TMA moves

        def step(i, _):
            slot, some = self.slot(begin + i), pl.ds(i * tiling.block, tiling.block)
            arrived = self.arrived.at[slot]

            @pl.when(begin + i >= tiling.stages)
            def _wait():
                plgpu.barrier_wait(self.consumed.at[slot])

            for part in range(self.options.parts):
                there = self.weights_smem.at[slot, pl.ds(part * tiling.columns, tiling.columns)]
                columns = pl.ds(column + part * self.out_gmem.shape[1], tiling.columns)
                plgpu.copy_gmem_to_smem(weights.at[columns, some], there, arrived)
            below = 0
            for size in self.sizes():

                @pl.when((unit.num_rows > below) & (unit.num_rows <= size))
                def _rows(size=size):
                    there = self.rows_smem.at[slot, pl.ds(0, size)]
                    plgpu.copy_gmem_to_smem(self.rows_gmem.at[pl.ds(row, size), some], there, arrived)

                below = size

        lax.fori_loop(0, self.num_blocks, step, None)

    def prefetch(self, tiling: Tiling) -> None:
        """Brings weights that this CUDA block begins the next matmul with to the L2 cache."""
        runs = self.next_weights_gmem.shape[1] // tiling.columns
        number = lax.axis_index("multiprocessor")
        tile = lax.div(number, runs)

        @pl.when(tile < self.num_tiles_gmem[0])
        def _():
            expert = self.layer_gmem[0] * self.options.num_experts + self.expert_gmem[tile]
            prefetch_unit(self.next_weights_gmem.at[expert], lax.rem(number, runs), tiling.columns, parts=1)

    def sizes(self) -> list[int]:
        """Rows that are fetched at once: the fewest of these that hold those of a tile."""
        most = min(self.options.tiling.tile_rows, self.rows_gmem.shape[0])
        return [size for size in (8, 16, 32, 64, 128) if size < most] + [most]

    # The warpgroups that compute

    def compute(self, unit: Unit, begin: Array) -> None:
        num_rows = unit.num_rows - self.warpgroup * ROWS

        @pl.when(num_rows > 0)
        def _():
            tiling = self.options.tiling
            product = functools.partial(self.product, begin)
            acc = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, self.options.parts * tiling.columns)))
            self.store(acc, unit.row * UNIT + self.warpgroup * ROWS, num_rows, unit.run * tiling.columns)

        if self.options.tiling.warpgroups > 1:

            @pl.when(num_rows <= 0)
            def _pass():
                def step(i, _):
                    plgpu.barrier_wait(self.arrived.at[self.slot(begin + i)])
                    plgpu.barrier_arrive(self.consumed.at[self.slot(begin + i)])

                lax.fori_loop(0, self.num_blocks, step, None)

    def product(self, begin: Array, acc_ref: Any) -> Array:
        rows = pl.ds(self.warpgroup * ROWS, ROWS)

        def step(i, _):
            slot = self.slot(begin + i)
            plgpu.barrier_wait(self.arrived.at[slot])
            plgpu.wgmma(acc_ref, self.rows_smem.at[slot, rows], self.weights_smem.at[slot].T)
            plgpu.wgmma_wait(1)

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(self.consumed.at[self.slot(begin + i - 1)])

        lax.fori_loop(0, self.num_blocks, step, None)
        acc = acc_ref[...]
        plgpu.barrier_arrive(self.consumed.at[self.slot(begin + self.num_blocks - 1)])
        return acc

    def store(self, acc: Array, row: Array, num_rows: Array, column: Array) -> None:
        piece = self.out_smem.shape[3]
        for c in range(0, self.options.tiling.columns, piece):
            out = acc[:, c : c + piece]
            if self.options.parts == 2:
                up = acc[:, self.options.tiling.columns + c : self.options.tiling.columns + c + piece]
                out = out / (1.0 + jnp.exp(-out)) * up
            out_smem = self.out_smem.at[self.warpgroup, c // piece % 2]
            # Of the unit before nothing is on its way any more; of this one, what has been stored from the other buffer
            plgpu.wait_smem_to_gmem(min(c, 1), wait_read_only=True)
            out_smem[...] = out.astype(out_smem.dtype)
            plgpu.commit_smem()
            self.store_rows(out_smem, self.out_gmem.at[:, pl.ds(column + c, piece)], row, num_rows)

    def store_rows(self, out_smem: Any, out_gmem: Any, row: Array, num_rows: Array) -> None:
        num_units = lax.div(num_rows + (UNIT - 1), UNIT)

        @pl.when(num_units >= ROWS // UNIT)
        def _all():
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(row, ROWS)])

        @pl.when(num_units < ROWS // UNIT)
        def _some():
            done = jnp.int32(0)
            for count in (4, 2, 1):
                there = (num_units & count) != 0

                @pl.when(there)
                def _(count=count, done=done):
                    some = out_smem.at[pl.ds(done * UNIT, count * UNIT)]
                    plgpu.copy_smem_to_gmem(some, out_gmem.at[pl.ds(row + done * UNIT, count * UNIT)])

                done = done + jnp.where(there, count, 0)


def prefetch_unit(weights_gmem: Any, run: Array, columns: int, parts: int) -> None:
    """Brings the first weights of a unit to the L2 cache, from those of its expert, `[out, in]`."""
    outs, depth = weights_gmem.shape
    end = min(depth, PREFETCHED_BYTES // (2 * parts * columns))
    for part in range(parts):
        some = weights_gmem.at[pl.ds(run * columns + part * (outs // parts), columns)]
        for begin in range(0, end, 256):  # the most that TMA moves in a dimension
            plgpu.async_prefetch(some.at[:, pl.ds(begin, min(256, depth - begin))])

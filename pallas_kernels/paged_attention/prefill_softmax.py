"""The online softmax of one warpgroup over the blocks of one tile: see `mosaic_gpu_prefill`."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import LEAST, ROWS, capped, iota, over, zero_unwritten, zeros
from jaxserve.pallas_kernels.paged_attention.prefill_work import Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileOfWarpgroup:
    """One warpgroup's rows of one tile: the online softmax over its blocks, maxima in units of log 2."""

    cta: Any  # the CUDA block as this warpgroup sees it: `mosaic_gpu_prefill._Cta`
    tile: Tile
    queries: Any  # [ROWS, H], in shared memory
    num_blocks: Array
    k_scale: Any

    def attend(self) -> tuple[Array, Array, Array]:
        """The output, not yet normalised, the maxima of the scores and the sums of the weights."""
        by_row, H = plgpu.Layout.WGMMA.reduce(1), self.queries.shape[1]
        rows, first = zeros((ROWS,), by_row), jnp.int32(0)
        *start, _ = self.softmax(self.scores(first), first, rows + LEAST, rows)
        if self.cta.options.interpret:
            return self.in_turn(*start)
        return pl.run_scoped(functools.partial(self.overlapped, *start), plgpu.WGMMAAccumulatorRef((ROWS, H)))

    def overlapped(self, weights: Array, maximum: Array, total: Array, acc_ref: Any) -> tuple[Array, Array, Array]:
        def step(i, carry):
            def both(scores_ref):
                weights, maximum, total = carry
                self.start_scores(i, scores_ref)
                plgpu.wgmma(acc_ref, weights, self.values(i - 1))
                scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                plgpu.barrier_arrive(self.cta.k_consumed.at[self.slot(i)])
                weights, maximum, total, decay = self.softmax(scores, i, maximum, total)
                acc = acc_ref[...]
                plgpu.barrier_arrive(self.cta.v_consumed.at[self.slot(i - 1)])
                acc_ref[...] = acc * over(decay, acc)
                return weights, maximum, total

            return pl.run_scoped(both, self.scores_type)

        count = self.tile.count
        weights, maximum, total = lax.fori_loop(1, count, step, (weights, maximum, total))
        plgpu.wgmma(acc_ref, weights, self.values(count - 1))
        acc = acc_ref[...]
        plgpu.barrier_arrive(self.cta.v_consumed.at[self.slot(count - 1)])
        return acc, maximum, total

    def in_turn(self, weights: Array, maximum: Array, total: Array) -> tuple[Array, Array, Array]:
        """The same without what interpret mode lacks: weights in registers, and accumulators that live on."""

        def step(i, carry):
            acc, weights, maximum, total = carry
            scores = self.scores(i)
            acc = acc + self.product(weights, i - 1)
            weights, maximum, total, decay = self.softmax(scores, i, maximum, total)
            return acc * over(decay, acc), weights, maximum, total

        count, shape = self.tile.count, (ROWS, self.queries.shape[1])
        start = (zeros(shape, plgpu.Layout.WGMMA), weights, maximum, total)
        acc, weights, maximum, total = lax.fori_loop(1, count, step, start)
        return acc + self.product(weights, count - 1), maximum, total

    def product(self, weights: Array, i: Array) -> Array:
        """Weights times values of the i-th block, by way of shared memory."""
        weights_smem = self.cta.weights_smem.at[self.cta.warpgroup]
        weights_smem[...] = weights
        plgpu.commit_smem()

        def multiply(ref):
            plgpu.wgmma(ref, weights_smem, self.values(i))
            return ref[...]

        out = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, self.queries.shape[1])))
        plgpu.barrier_arrive(self.cta.v_consumed.at[self.slot(i)])
        return out

    def slot(self, i: Array) -> Array:
        return lax.rem(self.num_blocks + i, self.cta.options.tiling.stages)

    @property
    def scores_type(self) -> plgpu.WGMMAAccumulatorRef:
        return plgpu.WGMMAAccumulatorRef((ROWS, self.cta.block))

    def start_scores(self, i: Array, ref: Any) -> None:
        plgpu.barrier_wait(self.cta.k_arrived.at[self.slot(i)])
        plgpu.wgmma(ref, self.queries, self.cta.k_smem.at[self.slot(i)].T)

    def scores(self, i: Array) -> Array:
        def product(ref):
            self.start_scores(i, ref)
            return ref[...]

        scores = pl.run_scoped(product, self.scores_type)
        plgpu.barrier_arrive(self.cta.k_consumed.at[self.slot(i)])
        return scores

    def softmax(self, scores: Array, i: Array, maximum: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """Weights of the i-th block, the new maximum and total, and what the old ones have decayed to."""
        begin, options = self.cta.begin(self.tile, i), self.cta.options
        scores, to_log2 = capped(scores, options.scoring, self.k_scale)
        partial = begin + self.cta.block > jnp.minimum(self.first_row + 1, self.tile.kv_len)
        if options.scoring.sliding_window is not None:
            partial |= begin <= self.first_row + (ROWS - 1) - options.scoring.sliding_window
        scores = lax.cond(partial, self.masked, lambda scores, begin: scores, scores, begin)
        new = jnp.maximum(maximum, scores.max(axis=1) * to_log2)
        decay = jnp.exp2(maximum - new)
        weights = jnp.exp2(scores * to_log2 - over(new, scores))
        return weights.astype(self.queries.dtype), new, total * decay + weights.sum(axis=1), decay

    def masked(self, scores: Array, begin: Array) -> Array:
        position, row = begin + iota(scores.shape, 1), self.first_row + iota(scores.shape, 0)
        seen = (position <= row) & (position < self.tile.kv_len)
        if self.cta.options.scoring.sliding_window is not None:
            seen &= position > row - self.cta.options.scoring.sliding_window
        return jnp.where(seen, scores, -jnp.inf)

    @property
    def first_row(self) -> Array:
        """The position of this warpgroup's first query."""
        return self.tile.position + self.cta.warpgroup * ROWS

    def values(self, i: Array) -> Any:
        """The values of the i-th block, arrived, and zeros where nothing is written yet."""
        plgpu.barrier_wait(self.cta.v_arrived.at[self.slot(i)])
        values_smem = self.cta.v_smem.at[self.slot(i)]
        num_written = self.tile.kv_len - self.cta.begin(self.tile, i)

        @pl.when(num_written < self.cta.block)
        def _():
            zero_unwritten(values_smem, num_written)
            plgpu.commit_smem()

        return values_smem

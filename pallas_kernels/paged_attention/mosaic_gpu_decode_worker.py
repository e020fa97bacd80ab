"""What one worker of decode attention does, with either of its warpgroups: see `mosaic_gpu_decode`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.decode_work import (
    BEGUN,
    CONTINUED,
    PARTS,
    UNREAD,
    Options,
    Unit,
    block_range,
)
from jaxserve.pallas_kernels.paged_attention.hopper import (
    LEAST,
    LOG2_E,
    ROWS,
    capped,
    fetch_block,
    iota,
    over,
    page_ids,
    scale_of,
    widen,
    zero_unwritten,
    zeros,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker: its memory, its barriers, and how it walks over its units."""

    q_gmem: Any  # [B, tiles, rows, H]
    k_gmem: Any  # [L, P, page_size, K, H]
    v_gmem: Any
    k_scale_gmem: Any  # f32 [L, K], or None
    v_scale_gmem: Any
    table_gmem: Any  # i32 [B, max_pages]
    lens_gmem: Any  # i32 [B]
    layer_gmem: Any  # i32 [1]
    out_gmem: Any  # [B, tiles, rows, H]
    lse_gmem: Any  # f32 [B, tiles, rows]
    parts_gmem: Any  # [PARTS * workers, rows, H]
    part_lse_gmem: Any  # f32 [PARTS * workers, rows]
    q_smem: Any  # [ROWS, H]
    k_smem: Any  # [stages, block, H]
    v_smem: Any
    lse_smem: Any  # f32 [ROWS]
    q_arrived: Any
    k_arrived: Any  # slot -> barrier
    v_arrived: Any
    consumed: Any
    k_pages_smem: Any  # [stages, block, H], as fetched; None unless pages are in float8
    v_pages_smem: Any
    k_fetched: Any
    v_fetched: Any
    worker: Array
    tile: Array
    count: Array
    begin: Unit
    options: Options

    @property
    def block(self) -> int:
        return self.options.tiling.block

    def slot(self, i: Array) -> Array:
        return lax.rem(i, self.options.tiling.stages)

    def following(self, unit: Unit) -> Unit:
        """The next unit: the next head, else the next block, else the next sequence."""
        B = self.lens_gmem.shape[0]
        next_block = unit.head + 1 == self.options.shared
        next_sequence = next_block & (unit.at + 1 == unit.last)
        sequence = jnp.minimum(jnp.where(next_sequence, unit.sequence + 1, unit.sequence), B - 1)
        kv_len = self.lens_gmem[sequence]
        first, last = block_range(kv_len, self.options.q_len, self.options.scoring.sliding_window, self.block)
        head = jnp.where(next_block, 0, unit.head + 1)
        at = jnp.where(next_sequence, first, jnp.where(next_block, unit.at + 1, unit.at))
        return Unit(sequence=sequence, head=head, at=at, kv_len=kv_len, first=first, last=last)

    # The warpgroup that fetches

    def fetch(self) -> None:
        layer, page_size = self.layer_gmem[0], self.k_gmem.shape[2]

        def step(i: Array, unit: Unit) -> Unit:
            begin, slot = unit.at * self.block, self.slot(i)
            ids = page_ids(self.table_gmem, unit.sequence, unit.kv_len, begin, self.block, page_size)
            where = (ids, begin, unit.kv_len, self.tile * self.options.shared + unit.head)

            @pl.when(i >= self.options.tiling.stages)
            def _wait():
                plgpu.barrier_wait(self.consumed(slot))

            fetch_block(self.k_gmem.at[layer], *where, self.k_smem.at[slot], self.k_arrived(slot))
            fetch_block(self.v_gmem.at[layer], *where, self.v_smem.at[slot], self.v_arrived(slot))
            return self.following(unit)

        lax.fori_loop(0, self.count, step, self.begin)

    def fetch_and_widen(self) -> None:
        """Fetches units, and turns each into the operands of matmuls as many units later as there are stages."""
        layer, page_size, stages = self.layer_gmem[0], self.k_gmem.shape[2], self.options.tiling.stages

        def step(i: Array, unit: Unit) -> Unit:
            begin, slot = unit.at * self.block, self.slot(i)
            ids = page_ids(self.table_gmem, unit.sequence, unit.kv_len, begin, self.block, page_size)
            where = (ids, begin, unit.kv_len, self.tile * self.options.shared + unit.head)

            @pl.when(i >= 2 * stages)
            def _wait():
                plgpu.barrier_wait(self.consumed(slot))

            for source, pages_smem, fetched, target, arrived in (
                (self.k_gmem, self.k_pages_smem, self.k_fetched, self.k_smem, self.k_arrived),
                (self.v_gmem, self.v_pages_smem, self.v_fetched, self.v_smem, self.v_arrived),
            ):
                pages = pages_smem.at[slot]

                @pl.when(i >= stages)
                def _widen(pages=pages, fetched=fetched, target=target, arrived=arrived):
                    plgpu.barrier_wait(fetched(slot))
                    widen(pages, target.at[slot])
                    plgpu.barrier_arrive(arrived(slot))

                @pl.when(i < self.count)
                def _fetch(source=source, pages=pages, fetched=fetched):
                    fetch_block(source.at[layer], *where, pages, fetched(slot))

            return self.following(unit)

        lax.fori_loop(0, self.count + stages, step, self.begin)

    # The warpgroup that computes

    def compute(self) -> None:
        @pl.when(self.count > 0)
        def _():
            self.fetch_queries(self.begin)

        lax.fori_loop(0, self.count, self.attend_unit, (*self.fresh(), self.begin))
        plgpu.wait_smem_to_gmem(0)

    def fresh(self) -> tuple[list[Array], Array, Array]:
        """Outputs, maxima and totals before the first unit of a tile."""
        H = self.q_smem.shape[1]
        outs = [zeros((ROWS, min(H, 128)), plgpu.Layout.WGMMA)] * (H // min(H, 128))
        rows = zeros((ROWS,), plgpu.Layout.WGMMA.reduce(1))
        return outs, rows + LEAST, rows

    def fetch_queries(self, unit: Unit) -> None:
        there = self.q_smem.at[pl.ds(0, self.q_gmem.shape[2])]
        plgpu.copy_gmem_to_smem(self.q_gmem.at[unit.sequence, self.tile], there, self.q_arrived)

    def attend_unit(self, i: Array, carry: tuple) -> tuple:
        """One step of the online softmax (arXiv 2205.14135); maxima are in units of log 2."""
        outs, maximum, total, unit = carry
        num_before, shared = unit.before(self.options.shared), self.options.shared
        completes = num_before + 1 == unit.of_tile(shared)
        begins, ends = (num_before == 0) | (i == 0), completes | (i + 1 == self.count)
        after, slot = self.following(unit), self.slot(i)

        @pl.when(begins)
        def _wait_for_queries():
            plgpu.barrier_wait(self.q_arrived)

        scores, to_log2 = self.scores(unit, slot)

        # The copy waits for all four warps, which are done with these queries: their scores are in registers
        @pl.when(ends & (i + 1 < self.count))
        def _fetch_the_next_queries():
            self.fetch_queries(after)

        # Chosen, not multiplied by zero: what another sequence left may be NaN
        outs, before, total = jax.tree.map(
            lambda fresh, kept: jnp.where(jnp.broadcast_to(begins, kept.shape), fresh, kept),
            self.fresh(),
            (outs, maximum, total),
        )
        largest = scores.max(axis=1) * to_log2
        maximum = jnp.maximum(before, self.own_rows(unit, largest, LEAST))
        decay = jnp.exp2(before - maximum)
        weights = jnp.exp2(scores * to_log2 - over(self.own_rows(unit, maximum, jnp.inf), scores))
        total = total * decay + weights.sum(axis=1)
        outs = self.outputs(unit, slot, weights, outs, decay)

        @pl.when(ends)
        def _():
            self.store(unit, slot, num_before <= i, completes, outs, maximum, total)

        plgpu.barrier_arrive(self.consumed(slot))
        return outs, maximum, total, after

    def own_rows(self, unit: Unit, values: Array, other: float) -> Array:
        """The values of the rows whose heads share the unit's KV head, for those of other KV heads `other`."""
        if self.options.shared == 1:
            return values
        rows = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA.reduce(1))
        own = lax.div(rows, self.options.group) == unit.head
        return jnp.where(own, values, other)

    def scores(self, unit: Unit, slot: Array) -> tuple[Array, Any]:
        """Scores, -inf where a row does not see, and the factor that turns them into units of log 2."""
        k_scale = scale_of(self.k_scale_gmem, self.layer_gmem[0], self.tile * self.options.shared + unit.head)
        plgpu.barrier_wait(self.k_arrived(slot))

        def product(ref):
            plgpu.wgmma(ref, self.q_smem, self.k_smem.at[slot].T)
            return ref[...]

        scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, self.block)))
        scores, to_log2 = capped(scores, self.options.scoring, k_scale)
        partial = (unit.at + 1) * self.block > unit.kv_len - (self.options.q_len - 1)
        if self.options.scoring.sliding_window is not None:
            partial |= unit.at * self.block < unit.kv_len - self.options.scoring.sliding_window
        return lax.cond(partial, self.masked, lambda scores, unit: scores, scores, unit), to_log2

    def masked(self, scores: Array, unit: Unit) -> Array:
        position, end = unit.at * self.block + iota(scores.shape, 1), unit.kv_len
        if self.options.q_len > 1:
            end = end - (self.options.q_len - 1) + lax.div(iota(scores.shape, 0), self.options.group)
        seen = position < end
        if self.options.scoring.sliding_window is not None:
            seen &= position >= end - self.options.scoring.sliding_window
        return jnp.where(seen, scores, -jnp.inf)

    def outputs(self, unit: Unit, slot: Array, weights: Array, outs: list[Array], decay: Array) -> list[Array]:
        """What the outputs have decayed to, and the values of this unit added."""
        weights_smem = self.k_smem.at[slot, pl.ds(0, ROWS), pl.ds(0, self.block)]  # the keys are done with
        weights_smem[...] = weights.astype(weights_smem.dtype)
        plgpu.barrier_wait(self.v_arrived(slot))

        @pl.when((unit.at + 1) * self.block > unit.kv_len)
        def _():
            zero_unwritten(self.v_smem.at[slot], unit.kv_len - unit.at * self.block)

        plgpu.commit_smem()

        def product(ref, *, columns):
            plgpu.wgmma(ref, weights_smem, self.v_smem.at[slot, :, columns])
            return ref[...]

        width = outs[0].shape[1]
        added = plgpu.WGMMAAccumulatorRef((ROWS, width))
        return [
            out * over(decay, out) + pl.run_scoped(functools.partial(product, columns=pl.ds(c * width, width)), added)
            for c, out in enumerate(outs)
        ]

    def v_scales(self, like: Array) -> Any:
        """The scale of the values of each row's KV head."""
        layer, shared = self.layer_gmem[0], self.options.shared
        scales = [scale_of(self.v_scale_gmem, layer, self.tile * shared + head) for head in range(shared)]
        if self.v_scale_gmem is None or shared == 1:
            return scales[0]
        rows = plgpu.broadcasted_iota(jnp.int32, like.shape, 0, layout=plgpu.Layout.WGMMA.reduce(1))
        by_row = jnp.broadcast_to(scales[0], like.shape)
        for head, scale in enumerate(scales[1:], start=1):
            by_row = jnp.where(lax.div(rows, self.options.group) == head, scale, by_row)
        return by_row

    def store(
        self, unit: Unit, slot: Array, begun: Array, completed: Array, outs: list[Array], maximum: Array, total: Array
    ) -> None:
        """Writes what this worker, which has `begun` or `completed` the tile or both, has found out about it."""
        inverse = jnp.where(total > 0, 1.0 / total, 0.0) * self.v_scales(total)
        out_smem, width = self.k_smem.at[slot, pl.ds(0, ROWS)], outs[0].shape[1]  # keys and weights are done with
        for c, out in enumerate(outs):
            out_smem[:, pl.ds(c * width, width)] = (out * over(inverse, out)).astype(out_smem.dtype)
        self.lse_smem[...] = jnp.where(total > 0, maximum / LOG2_E + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        # Both, whatever will be read: it stays in the L2 cache, and with a branch head_dim 256 spills many registers
        tile, rows = (unit.sequence, self.tile), pl.ds(0, self.q_gmem.shape[2])
        part = PARTS * self.worker + jnp.where(begun & completed, UNREAD, jnp.where(begun, BEGUN, CONTINUED))
        for out_gmem, lse_gmem in (
            (self.out_gmem.at[tile], self.lse_gmem.at[tile]),
            (self.parts_gmem.at[part], self.part_lse_gmem.at[part]),
        ):
            plgpu.copy_smem_to_gmem(out_smem.at[rows], out_gmem)
            plgpu.copy_smem_to_gmem(self.lse_smem.at[rows], lse_gmem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

"""What one worker of decode attention does, with either of its warpgroups: see `mosaic_gpu_decode`."""

import dataclasses
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

# Of scores `[rows, block]`: two rows to a warp, so that it reduces them by itself, and four positions to a thread
ACROSS = plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker: its memory, its barriers, and how it walks over its units."""

    q_gmem: Any  # [B, tiles, rows, H]; of Apart.beside sequences one tile
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
    q_smem: Any  # [rows, H]
    k_smem: Any  # [stages, block, H]
    v_smem: Any
    scores_smem: Any  # f32 [rows, block]
    weights_smem: Any  # [rows, block]
    decay_smem: Any  # f32 [rows]
    inverse_smem: Any  # f32 [rows]
    lse_smem: Any  # f32 [rows]
    wide_smem: Any  # [block, H], None unless pages are in float8
    q_arrived: Any
    k_arrived: Any  # slot -> barrier
    v_arrived: Any
    consumed: Any
    worker: Array
    tile: Array
    count: Array
    begin: Unit
    begin_pages: list[Array]  # of its block
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

    def pages_of(self, unit: Unit) -> list[Array]:
        begin, page_size = unit.at * self.block, self.k_gmem.shape[2]
        return page_ids(self.table_gmem, unit.sequence, unit.kv_len, begin, self.block, page_size)

    def fetch(self) -> None:
        layer = self.layer_gmem[0]

        def step(i: Array, carry: tuple[Unit, list[Array]]) -> tuple[Unit, list[Array]]:
            unit, ids = carry
            head = self.options.kv_head(unit.sequence, self.tile, unit.head)
            where = (ids, unit.at * self.block, unit.kv_len, head)
            slot = self.slot(i)

            @pl.when(i >= self.options.tiling.stages)
            def _wait():
                plgpu.barrier_wait(self.consumed(slot))

            fetch_block(self.k_gmem.at[layer], *where, self.k_smem.at[slot], self.k_arrived(slot))
            fetch_block(self.v_gmem.at[layer], *where, self.v_smem.at[slot], self.v_arrived(slot))
            after = self.following(unit)
            return after, self.pages_of(after)  # read while it waits for room: a read takes as long as much of a unit

        lax.fori_loop(0, self.count, step, (self.begin, self.begin_pages))

    # The warpgroup that computes. Its four warps meet at each `commit_smem`, twice a unit, and nowhere else: behind the
    # first all have the scores of this unit and are done with the matmuls of the one before, behind the second all have
    # written what the next matmul reads. What one thread reads and another writes has one of them in between.

    def compute(self) -> None:
        @pl.when(self.count > 0)
        def _():
            self.fetch_queries(self.begin)

        lax.fori_loop(0, self.count, self.attend_unit, (*self.fresh(), self.begin))
        plgpu.wait_smem_to_gmem(0)

    def fresh(self) -> tuple[Array, Array, Array]:
        """Outputs `[H, rows]`, maxima and totals `[rows]` before the first unit of a tile."""
        rows, H = self.q_smem.shape
        none = zeros((rows,), ACROSS.reduce(1))
        return zeros((H, rows), plgpu.Layout.WGMMA), none + LEAST, none

    def fetch_queries(self, unit: Unit) -> None:
        queries = self.q_gmem.at[self.options.queries_of(unit.sequence), self.tile]
        plgpu.copy_gmem_to_smem(queries, self.q_smem, self.q_arrived)

    def attend_unit(self, i: Array, carry: tuple) -> tuple:
        """One step of the online softmax (arXiv 2205.14135); maxima are in units of log 2."""
        out, maximum, total, unit = carry
        num_before, shared = unit.before(self.options.shared), self.options.shared
        completes = num_before + 1 == unit.of_tile(shared)
        begins, ends = (num_before == 0) | (i == 0), completes | (i + 1 == self.count)
        after, slot = self.following(unit), self.slot(i)

        @pl.when(begins)
        def _wait_for_queries():
            plgpu.barrier_wait(self.q_arrived)

        scores, to_log2 = self.scores(unit, slot)

        @pl.when(ends & (i + 1 < self.count))
        def _fetch_the_next_queries():
            self.fetch_queries(after)

        # Chosen, not multiplied by zero: what another sequence left may be NaN
        out, before, total = jax.tree.map(
            lambda fresh, kept: jnp.where(jnp.broadcast_to(begins, kept.shape), fresh, kept),
            self.fresh(),
            (out, maximum, total),
        )
        largest = scores.max(axis=1) * to_log2
        maximum = jnp.maximum(before, self.own_rows(unit, largest, LEAST))
        decay = jnp.exp2(before - maximum)
        weights = jnp.exp2(scores * to_log2 - over(self.own_rows(unit, maximum, jnp.inf), scores))
        total = total * decay + weights.sum(axis=1)
        out = self.add_values(slot, out, weights, decay)

        @pl.when(ends)
        def _():
            self.store(unit, slot, num_before <= i, completes, out, maximum, total)

        plgpu.barrier_arrive(self.consumed(slot))
        return out, maximum, total, after

    def own_rows(self, unit: Unit, values: Array, other: float) -> Array:
        """The values of the rows whose heads share the unit's KV head, for those of other KV heads `other`."""
        if self.options.shared == 1:
            return values
        return jnp.where(self.head_of_rows(values) == unit.head, values, other)

    def head_of_rows(self, like: Array) -> Array:
        rows = plgpu.broadcasted_iota(jnp.int32, like.shape, 0, layout=ACROSS.reduce(1))
        return lax.div(rows, self.options.group)

    def scores(self, unit: Unit, slot: Array) -> tuple[Array, Any]:
        """Scores `[rows, block]`, -inf where a row does not see, and the factor that turns them into units of log 2."""
        head = self.options.kv_head(unit.sequence, self.tile, unit.head)
        k_scale = scale_of(self.k_scale_gmem, self.layer_gmem[0], head)
        plgpu.barrier_wait(self.k_arrived(slot))

        def product(ref):
            plgpu.wgmma(ref, self.keys(slot), self.q_smem.T)
            return ref[...]

        # By way of shared memory each warp gets whole rows, which are spread over all four here
        by_position = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((self.block, self.q_smem.shape[0])))
        store_transposed(by_position, self.scores_smem)
        plgpu.commit_smem()
        self.prepare_values(unit, slot)
        scores = plgpu.load(self.scores_smem, layout=ACROSS)
        scores, to_log2 = capped(scores, self.options.scoring, k_scale)
        partial = (unit.at + 1) * self.block > unit.kv_len - (self.options.q_len - 1)
        if self.options.scoring.sliding_window is not None:
            partial |= unit.at * self.block < unit.kv_len - self.options.scoring.sliding_window
        return lax.cond(partial, self.masked, lambda scores, unit: scores, scores, unit), to_log2

    def keys(self, slot: Array) -> Any:
        """A left operand, `[block, H]`: in registers, if pages are in float8."""
        keys = self.k_smem.at[slot]
        if self.wide_smem is None:
            return keys
        return plgpu.load(keys, layout=plgpu.Layout.WGMMA).astype(self.q_smem.dtype)

    def values(self, slot: Array) -> Any:
        return self.v_smem.at[slot] if self.wide_smem is None else self.wide_smem

    def prepare_values(self, unit: Unit, slot: Array) -> None:
        """Makes them an operand, `[block, H]`; the threads have to meet before it is used."""
        plgpu.barrier_wait(self.v_arrived(slot))
        if self.wide_smem is not None:
            widen(self.v_smem.at[slot], self.wide_smem, plgpu.Layout.WGMMA)

        @pl.when((unit.at + 1) * self.block > unit.kv_len)
        def _():
            if self.wide_smem is not None:
                plgpu.commit_smem()  # as written by other threads
            zero_unwritten(self.values(slot), unit.kv_len - unit.at * self.block)

    def masked(self, scores: Array, unit: Unit) -> Array:
        position, end = unit.at * self.block + iota(scores.shape, 1, ACROSS), unit.kv_len
        if self.options.q_len > 1:
            end = end - (self.options.q_len - 1) + lax.div(iota(scores.shape, 0, ACROSS), self.options.group)
        seen = position < end
        if self.options.scoring.sliding_window is not None:
            seen &= position >= end - self.options.scoring.sliding_window
        return jnp.where(seen, scores, -jnp.inf)

    def add_values(self, slot: Array, out: Array, weights: Array, decay: Array) -> Array:
        """What the outputs have decayed to, and the values of this unit, weighted."""
        self.weights_smem[...] = weights.astype(self.weights_smem.dtype)
        self.decay_smem[...] = decay
        plgpu.commit_smem()

        def product(ref):
            plgpu.wgmma(ref, self.values(slot).T, self.weights_smem.T)
            decayed = out * down(self.decay_smem, out)  # before the matmul ends
            return decayed + ref[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(self.q_smem.shape[::-1]))

    def v_scales(self, unit: Unit, like: Array) -> Any:
        """The scale of the values of each row's KV head."""
        layer, shared = self.layer_gmem[0], self.options.shared
        heads = [self.options.kv_head(unit.sequence, self.tile, head) for head in range(shared)]
        scales = [scale_of(self.v_scale_gmem, layer, head) for head in heads]
        if self.v_scale_gmem is None or shared == 1:
            return scales[0]
        by_row = jnp.broadcast_to(scales[0], like.shape)
        for head, scale in enumerate(scales[1:], start=1):
            by_row = jnp.where(self.head_of_rows(like) == head, scale, by_row)
        return by_row

    def store(
        self, unit: Unit, slot: Array, begun: Array, completed: Array, out: Array, maximum: Array, total: Array
    ) -> None:
        """Writes what this worker, which has `begun` or `completed` the tile or both, has found out about it."""
        self.inverse_smem[...] = jnp.where(total > 0, 1.0 / total, 0.0) * self.v_scales(unit, total)
        self.lse_smem[...] = jnp.where(total > 0, maximum / LOG2_E + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        out_smem = self.values(slot).at[pl.ds(0, self.q_smem.shape[0])]  # the values are done with
        store_transposed(out * down(self.inverse_smem, out), out_smem)
        plgpu.commit_smem()
        # Both, whatever will be read: it stays in the L2 cache, and with a branch head_dim 256 spills many registers
        tile = (unit.sequence, self.tile)
        part = PARTS * self.worker + jnp.where(begun & completed, UNREAD, jnp.where(begun, BEGUN, CONTINUED))
        for out_gmem, lse_gmem in (
            (self.out_gmem.at[tile], self.lse_gmem.at[tile]),
            (self.parts_gmem.at[part], self.part_lse_gmem.at[part]),
        ):
            plgpu.copy_smem_to_gmem(out_smem, out_gmem)
            plgpu.copy_smem_to_gmem(self.lse_smem, lse_gmem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def down(rows_smem: Any, like: Array) -> Array:
    """One value a row, down the columns of outputs `[H, rows]`."""
    rows = plgpu.load(rows_smem, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(rows, like.shape, [1])


def store_transposed(matrix: Array, target_smem: Any) -> None:
    narrow = matrix.astype(target_smem.dtype)
    target_smem.T[...] = plgpu.layout_cast(narrow, plgpu.Layout.WGMMA_TRANSPOSED)

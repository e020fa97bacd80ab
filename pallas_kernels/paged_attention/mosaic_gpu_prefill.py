"""Paged attention of prefill rows on NVIDIA Hopper.

How this works. The query tokens of each sequence are cut into *tiles*; a CUDA block takes one tile and one query head,
half of the rows in each of two warpgroups, while a third fetches keys and values by TMA, from the last block that the
tile sees to the first. A warpgroup starts the scores of the next block and the output of this one together, and works
on the softmax of the former while the tensor cores finish the latter (FlashAttention-3, arXiv 2407.08608).
Tiles begin at multiples of their size in the kernel's view of the queries, so that a store never touches the rows of
the next sequence; XLA gathers rows into that view and back.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache

ROWS = 64  # of one warpgroup
TILE = 2 * ROWS
LEAST = -1e30  # a running maximum that any score passes, and that can be subtracted from -inf
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    block: int = 128  # positions whose scores are in registers at once
    stages: int = 2  # blocks in shared memory


def plan(batch: AttentionBatch, num_rows: int):
    """Where the tiles are: for each, heaviest first, its number, its sequence and the position of its first row.

    Also, for each row of the tiled view, the query row that it holds, and for each query row its place in the view.
    """
    cu, num_seqs = batch.cu_q_lens, batch.kv_lens.shape[0]
    num_tiles = -(-num_rows // TILE) + num_seqs - 1
    q_lens = cu[1:] - cu[:-1]
    ends = jnp.cumsum(lax.div(q_lens + (TILE - 1), TILE), dtype=jnp.int32)
    starts = ends - lax.div(q_lens + (TILE - 1), TILE)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_seqs - 1).astype(jnp.int32)
    offset = (tile - starts[sequence]) * TILE
    position = jnp.where(tile < ends[-1], (batch.kv_lens - q_lens)[sequence] + offset, -1)
    order = jnp.argsort(-position).astype(jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    of_row = jnp.minimum(jnp.searchsorted(cu[1:], row, side="right", method="compare_all"), num_seqs - 1)
    place = starts[of_row] * TILE + row - cu[of_row]
    view = (cu[:-1][sequence] + offset)[:, None] + jnp.arange(TILE)
    return order, sequence[order], position[order], jnp.minimum(view.reshape(-1), num_rows - 1), place


def paged_attention(
    q: Array,
    kv: KVCache,
    layer,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tiling: Tiling = Tiling(),
    work=None,
    interpretable: bool = False,
) -> tuple[Array, Array]:
    (num_rows, N, H), K = q.shape, kv.k.shape[3]
    order, sequence, position, view, place = work or plan(batch, num_rows)
    num_tiles, block, stages = order.shape[0], tiling.block, tiling.stages
    aligned = batch.kv_lens.shape[0] == 1 and num_rows % TILE == 0
    tiles = q if aligned else q[view]
    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
    size = min(block, kv.page_size)
    out, lse = plgpu.kernel(
        functools.partial(
            _attend,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            tiling=tiling,
            interpretable=interpretable,
        ),
        out_type=(
            jax.ShapeDtypeStruct(tiles.shape, q.dtype),
            jax.ShapeDtypeStruct((N, num_tiles * TILE), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((2, ROWS, H), q.dtype, **swizzled),
            plgpu.SMEM((stages, block, H), kv.k.dtype, **swizzled),
            plgpu.SMEM((stages, block, H), kv.v.dtype, **swizzled),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=block // size, num_barriers=stages),
            plgpu.Barrier(num_arrivals=block // size, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        )
        + ((plgpu.SMEM((2, ROWS, block), q.dtype, **swizzled),) if interpretable else ()),
        grid=(num_tiles, N),
        grid_names=("tile", "head"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(
        tiles,
        kv.k,
        kv.v,
        batch.page_table,
        batch.kv_lens,
        order,
        sequence,
        position,
        jnp.asarray(layer, jnp.int32).reshape(1),
    )
    real = jnp.arange(num_rows) < batch.cu_q_lens[-1]
    out = out if aligned else out[place]
    lse = lse.T if aligned else lse.T[place]
    return jnp.where(real[:, None, None], out, 0).astype(q.dtype), jnp.where(real[:, None], lse, -jnp.inf)


def _attend(
    q_gmem,  # [tiles * TILE, N, H]
    k_gmem,  # [L, P, page_size, K, H]
    v_gmem,
    table_gmem,  # i32 [S, max_pages]
    lens_gmem,  # i32 [S]
    order_gmem,  # i32 [tiles]
    sequence_gmem,  # i32 [tiles]
    position_gmem,  # i32 [tiles], of the tile's first row; -1 = no such tile
    layer_gmem,  # i32 [1]
    out_gmem,  # [tiles * TILE, N, H]
    lse_gmem,  # f32 [N, tiles * TILE]
    q_smem,  # [2, ROWS, H]
    k_smem,  # [stages, block, H]
    v_smem,
    lse_smem,  # f32 [2, ROWS]
    q_arrived,  # [2]
    k_arrived,  # [stages]
    v_arrived,
    k_consumed,
    v_consumed,
    *weights_smem,  # [2, ROWS, block], only to interpret
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tiling: Tiling,
    interpretable: bool,
):
    block, stages = tiling.block, tiling.stages
    N, H = q_gmem.shape[1:]
    page_size, K = k_gmem.shape[2:4]
    warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    at = lax.axis_index("tile")
    tile, sequence, position = order_gmem[at], sequence_gmem[at], position_gmem[at]
    kv_len = lens_gmem[sequence]
    last = lax.div(jnp.minimum(kv_len, position + TILE) + (block - 1), block)
    first = 0 if sliding_window is None else lax.div(jnp.maximum(position - sliding_window + 1, 0), block)
    count = jnp.where(position < 0, 0, last - first)  # blocks, fetched and used from the last to the first

    @pl.when(warpgroup == 2)
    def _fetch():
        plgpu.set_max_registers(40, action="decrease")
        layer, kv_head = layer_gmem[0], lax.div(head, N // K)
        last_page = lax.div(kv_len + (page_size - 1), page_size) - 1
        size = min(block, page_size)

        def step(i, _):
            slot, begin = lax.rem(i, stages), (last - 1 - i) * block
            pages = [
                table_gmem[sequence, jnp.minimum(lax.div(begin, page_size) + j, last_page)]
                for j in range(block // size)
            ]
            there = pl.ds(lax.rem(begin, page_size), size) if size < page_size else slice(None)
            for arrived, consumed, source, target in (
                (k_arrived, k_consumed, k_gmem, k_smem),
                (v_arrived, v_consumed, v_gmem, v_smem),
            ):

                @pl.when(i >= stages)
                def _wait(consumed=consumed):
                    plgpu.barrier_wait(consumed.at[slot])

                for j, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        source.at[layer, page, there, kv_head],
                        target.at[slot, pl.ds(j * size, size)],
                        arrived.at[slot],
                    )

        lax.fori_loop(0, count, step, None)

    @pl.when((warpgroup < 2) & (count > 0))
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        wgmma = plgpu.Layout.WGMMA
        by_row = wgmma.reduce(1)
        rows = pl.ds(tile * TILE + warpgroup * ROWS, ROWS)
        first_row = position + warpgroup * ROWS
        queries = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_gmem.at[rows, head], queries, q_arrived.at[warpgroup])
        plgpu.barrier_wait(q_arrived.at[warpgroup])

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def over(vector, shape):
            return lax.broadcast_in_dim(vector, shape, [0])

        def masked(scores, begin):
            position = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=wgmma)
            row = first_row + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=wgmma)
            seen = (position <= row) & (position < kv_len)
            if sliding_window is not None:
                seen &= position > row - sliding_window
            return jnp.where(seen, scores, -jnp.inf)

        def softmax(scores, i, maximum, total):
            """Weights of block i, the new maximum and total, and what the old ones have decayed to."""
            begin = (last - 1 - i) * block
            if soft_cap is None:
                factor = scale * LOG2_E
            else:  # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1)
                doubled = jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap))
                scores, factor = soft_cap - (2 * soft_cap) / (doubled + 1.0), LOG2_E
            partial = begin + block > jnp.minimum(first_row + 1, kv_len)
            if sliding_window is not None:
                partial |= begin <= first_row + (ROWS - 1) - sliding_window
            scores = lax.cond(partial, masked, lambda scores, begin: scores, scores, begin)
            new = jnp.maximum(maximum, scores.max(axis=1) * factor)
            decay = jnp.exp2(maximum - new)
            weights = jnp.exp2(scores * factor - over(new, scores.shape))
            return weights.astype(q_smem.dtype), new, total * decay + weights.sum(axis=1), decay

        def wait_for_values(i):
            slot, begin = lax.rem(i, stages), (last - 1 - i) * block
            plgpu.barrier_wait(v_arrived.at[slot])

            @pl.when(begin + block > kv_len)
            def _zero_unwritten_values():  # a zero weight does not silence a NaN
                row = plgpu.broadcasted_iota(jnp.int32, (block, 64), 0, layout=wgmma)
                for c in range(0, H, 64):
                    values_smem = v_smem.at[slot, :, pl.ds(c, 64)]
                    values = plgpu.load(values_smem, layout=wgmma)
                    values_smem[...] = jnp.where(row < kv_len - begin, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            return v_smem.at[slot]

        def scores_of(i, ref):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(k_arrived.at[slot])
            plgpu.wgmma(ref, queries, k_smem.at[slot].T)

        def release(consumed, i):
            plgpu.barrier_arrive(consumed.at[lax.rem(i, stages)])

        def first_scores(ref):
            scores_of(0, ref)
            return ref[...]

        zero = full((ROWS,), 0, by_row)
        scores_type = plgpu.ACC((ROWS, block), jnp.float32)
        scores = pl.run_scoped(first_scores, scores_type)
        release(k_consumed, 0)
        weights, maximum, total, _ = softmax(scores, 0, full((ROWS,), LEAST, by_row), zero)

        def overlapped(acc_ref):
            def step(i, carry):
                def both(scores_ref):
                    weights, maximum, total = carry
                    scores_of(i, scores_ref)
                    plgpu.wgmma(acc_ref, weights, wait_for_values(i - 1))
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    release(k_consumed, i)
                    weights, maximum, total, decay = softmax(scores, i, maximum, total)
                    acc = acc_ref[...]
                    release(v_consumed, i - 1)
                    acc_ref[...] = acc * over(decay, acc.shape)
                    return weights, maximum, total

                return pl.run_scoped(both, scores_type)

            weights_, maximum_, total_ = lax.fori_loop(1, count, step, (weights, maximum, total))
            plgpu.wgmma(acc_ref, weights_, wait_for_values(count - 1))
            return acc_ref[...], maximum_, total_

        def in_turn():
            """The same without what interpret mode lacks: weights in registers, and accumulators that live on."""

            def add(acc, weights, i):
                weights_smem[0][warpgroup] = weights
                plgpu.commit_smem()

                def product(ref):
                    plgpu.wgmma(ref, weights_smem[0].at[warpgroup], wait_for_values(i))
                    return ref[...]

                return acc + pl.run_scoped(product, plgpu.ACC((ROWS, H), jnp.float32))

            def step(i, carry):
                acc, weights, maximum, total = carry

                def scores_now(ref):
                    scores_of(i, ref)
                    return ref[...]

                scores = pl.run_scoped(scores_now, scores_type)
                acc = add(acc, weights, i - 1)
                release(k_consumed, i)
                weights, maximum, total, decay = softmax(scores, i, maximum, total)
                release(v_consumed, i - 1)
                return acc * over(decay, acc.shape), weights, maximum, total

            start = (full((ROWS, H), 0, wgmma), weights, maximum, total)
            acc, weights_, maximum_, total_ = lax.fori_loop(1, count, step, start)
            return add(acc, weights_, count - 1), maximum_, total_

        if interpretable:
            acc, maximum, total = in_turn()
        else:
            acc, maximum, total = pl.run_scoped(overlapped, plgpu.ACC((ROWS, H), jnp.float32))
        queries[...] = (acc * over(1.0 / total, acc.shape)).astype(q_smem.dtype)
        lse_smem[warpgroup] = maximum / LOG2_E + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, out_gmem.at[rows, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_gmem.at[head, rows])
        plgpu.wait_smem_to_gmem(0)

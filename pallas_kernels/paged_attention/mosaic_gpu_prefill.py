"""Paged attention of prefill rows on NVIDIA Hopper.

How this works. The query tokens of each sequence are cut into *tiles*. A CUDA block, one a multiprocessor, takes one
tile and one query head after another, heavy ones first: half of the rows in each of two warpgroups, while a third
fetches keys and values by TMA, from the last block that the tile sees to the first, and on into the next tile. A warpgroup starts the scores of the next block and the output of this one together, and works
on the softmax of the former while the tensor cores finish the latter (FlashAttention-3, arXiv 2407.08608).
TMA with a swizzle moves whole units of eight rows, so XLA gathers the queries into a view where each sequence begins
at a multiple of that; and output tiles begin at multiples of their size, so that a store never touches the rows of
another sequence, whence XLA gathers them back. A lone sequence is in place already.
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
UNIT = 8  # rows of a swizzle
LEAST = -1e30  # a running maximum that any score passes, and that can be subtracted from -inf
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    block: int = 128  # positions whose scores are in registers at once
    stages: int = 2  # blocks in shared memory
    multiprocessors: int = 132


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Where the tiles are, heaviest first: the same for every layer."""

    tile: Array  # i32 [tiles], its place in the output
    sequence: Array  # i32 [tiles]
    row: Array  # i32 [tiles], where the kernel's view of the queries has its first row, in units of UNIT
    position: Array  # i32 [tiles], of that row
    num_rows: Array  # i32 [tiles], that are its sequence's; 0 = no such tile
    num_tiles: Array  # i32 [1], that there are
    view: Array  # i32 [T + UNIT * S + TILE or so], the query row in each row of the view
    place: Array  # i32 [T], where the output has each query row


def plan(batch: AttentionBatch, num_rows: int) -> Work:
    """Cuts each sequence's query tokens into tiles; `num_rows` is T."""
    cu_q_lens, num_seqs = batch.cu_q_lens, batch.kv_lens.shape[0]
    assert cu_q_lens is not None
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    counts = lax.div(q_lens + (TILE - 1), TILE)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(-(-num_rows // TILE) + num_seqs - 1, dtype=jnp.int32)
    sequence = _interval(ends, tile)
    offset = (tile - (ends - counts)[sequence]) * TILE
    position = (batch.kv_lens - q_lens)[sequence] + offset
    live = tile < ends[-1]
    order = jnp.argsort(jnp.where(live, -position, 1)).astype(jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    row_sequence = _interval(cu_q_lens[1:], row)
    place = (ends - counts)[row_sequence] * TILE + row - cu_q_lens[row_sequence]
    unit_ends = jnp.cumsum(lax.div(q_lens + (UNIT - 1), UNIT), dtype=jnp.int32)
    unit_starts = unit_ends - lax.div(q_lens + (UNIT - 1), UNIT)
    view = jnp.arange(-(-(num_rows + (UNIT - 1) * num_seqs + TILE) // UNIT) * UNIT, dtype=jnp.int32)
    view_sequence = _interval(unit_ends * UNIT, view)
    return Work(
        tile=order,
        sequence=sequence[order],
        row=(unit_starts[sequence] + lax.div(offset, UNIT))[order],
        position=position[order],
        num_rows=jnp.where(live, jnp.minimum(q_lens[sequence] - offset, TILE), 0)[order],
        num_tiles=ends[-1:],
        view=jnp.minimum((cu_q_lens[:-1] - unit_starts * UNIT)[view_sequence] + view, num_rows - 1),
        place=jnp.minimum(place, tile.size * TILE - 1),
    )


def _interval(ends: Array, x: Array) -> Array:
    """The first interval whose end lies beyond each x; the last where there is none."""
    found = jnp.searchsorted(ends, x, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(found, ends.shape[0] - 1)


def paged_attention(
    q: Array,
    kv: KVCache,
    layer,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tiling: Tiling,
    work: Work,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Output `[T, N, H]` in q.dtype and float32 log-sum-exp `[T, N]`; see the package's docstring."""
    (num_rows, N, H), num_tiles = q.shape, work.tile.shape[0]
    block, stages = tiling.block, tiling.stages
    aligned = num_tiles * TILE == num_rows  # one sequence: the output has its rows in place
    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
    arrivals = block // min(block, kv.page_size)
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    out, lse = plgpu.kernel(
        functools.partial(_attend, tiling=tiling, clear=aligned, interpret=interpret, **options),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles * TILE, N, H), q.dtype),
            jax.ShapeDtypeStruct((N, num_tiles * TILE), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((2, ROWS, H), q.dtype, **swizzled),
            plgpu.SMEM((stages, block, H), kv.k.dtype, **swizzled),
            plgpu.SMEM((stages, block, H), kv.v.dtype, **swizzled),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        )
        + ((plgpu.SMEM((2, ROWS, block), q.dtype, **swizzled),) if interpret else ()),
        grid=(tiling.multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(
        q if aligned else q[work.view],
        kv.k,
        kv.v,
        batch.page_table,
        batch.kv_lens,
        work.tile,
        work.sequence,
        work.row,
        work.position,
        work.num_rows,
        work.num_tiles,
        jnp.asarray(layer, jnp.int32).reshape(1),
    )
    if aligned:
        return out, lse.T
    assert batch.cu_q_lens is not None
    real = jnp.arange(num_rows) < batch.cu_q_lens[-1]
    out, lse = out[work.place], lse.T[work.place]
    return jnp.where(real[:, None, None], out, jnp.zeros_like(out)), jnp.where(real[:, None], lse, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile of one head; all scalars. Its blocks are used from the last to the first."""

    tile: Array
    head: Array
    sequence: Array
    row: Array
    position: Array
    num_rows: Array
    kv_len: Array
    last: Array  # block, exclusive
    count: Array  # blocks

    def begin(self, i: Array, block: int) -> Array:
        """The first position of the i-th block that is used."""
        return (self.last - 1 - i) * block


def _attend(
    q_gmem,  # [rows of the view, N, H]
    k_gmem,  # [L, P, page_size, K, H]
    v_gmem,
    table_gmem,  # i32 [S, max_pages]
    lens_gmem,  # i32 [S]
    tile_gmem,  # i32 [tiles], as the next five: see Work
    sequence_gmem,
    row_gmem,
    position_gmem,
    num_rows_gmem,
    num_tiles_gmem,  # i32 [1]
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
    clear: bool,
    interpret: bool,
):
    block, stages = tiling.block, tiling.stages
    _, N, H = q_gmem.shape
    page_size, K = k_gmem.shape[2:4]
    warpgroup = lax.axis_index("warpgroup")
    num_tiles = tile_gmem.shape[0] if clear else num_tiles_gmem[0]

    def each_tile(body):
        """`num_blocks = body(tile, num_blocks)` for the tiles of this CUDA block; counts blocks across tiles."""
        first = lax.axis_index("multiprocessor")

        def step(i, num_blocks):
            item = first + i * tiling.multiprocessors
            at = lax.div(item, N)
            sequence, position, num_rows = sequence_gmem[at], position_gmem[at], num_rows_gmem[at]
            kv_len = lens_gmem[sequence]
            last = lax.div(jnp.minimum(kv_len, position + TILE) + (block - 1), block)
            skipped = 0
            if sliding_window is not None:
                skipped = lax.div(jnp.maximum(position - sliding_window + 1, 0), block)
            tile = Tile(
                tile=tile_gmem[at],
                head=lax.rem(item, N),
                sequence=sequence,
                row=row_gmem[at],
                position=position,
                num_rows=num_rows,
                kv_len=kv_len,
                last=last,
                count=jnp.where(num_rows == 0, 0, last - skipped),
            )
            body(tile, num_blocks)
            return num_blocks + tile.count

        num_items = lax.div(num_tiles * N - first + (tiling.multiprocessors - 1), tiling.multiprocessors)
        lax.fori_loop(0, num_items, step, jnp.int32(0))

    def fetch(tile, num_blocks):
        layer, kv_head = layer_gmem[0], lax.div(tile.head, N // K)
        last_page = lax.div(tile.kv_len + (page_size - 1), page_size) - 1
        size = min(block, page_size)

        def step(i, _):
            slot, begin = lax.rem(num_blocks + i, stages), tile.begin(i, block)
            pages = [
                table_gmem[tile.sequence, jnp.minimum(lax.div(begin, page_size) + j, last_page)]
                for j in range(block // size)
            ]
            there = pl.ds(lax.rem(begin, page_size), size) if size < page_size else slice(None)
            for arrived, consumed, source, target in (
                (k_arrived, k_consumed, k_gmem, k_smem),
                (v_arrived, v_consumed, v_gmem, v_smem),
            ):

                @pl.when(num_blocks + i >= stages)
                def _wait(consumed=consumed):
                    plgpu.barrier_wait(consumed.at[slot])

                for j, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        source.at[layer, page, there, kv_head],
                        target.at[slot, pl.ds(j * size, size)],
                        arrived.at[slot],
                    )

        lax.fori_loop(0, tile.count, step, None)

    wgmma = plgpu.Layout.WGMMA
    by_row = wgmma.reduce(1)

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def over(vector, shape):
        return lax.broadcast_in_dim(vector, shape, [0])

    def compute(tile, num_blocks):
        queries = q_smem.at[warpgroup]

        @pl.when(tile.count > 0)
        def _attend():
            rows = pl.ds(tile.row * UNIT + warpgroup * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_gmem.at[rows, tile.head], queries, q_arrived.at[warpgroup])
            plgpu.barrier_wait(q_arrived.at[warpgroup])
            out, maximum, total = attend(tile, num_blocks)
            store(tile, out * over(1.0 / total, out.shape), maximum / LOG2_E + jnp.log(total))

        if clear:

            @pl.when(tile.count == 0)
            def _no_queries():
                store(tile, full((ROWS, H), 0, wgmma), full((ROWS,), 0, by_row))

    def store(tile, out, lse):
        """Stores this warpgroup's rows; those without a query as zeros where nobody else clears them."""
        if clear:
            num_live = tile.num_rows - warpgroup * ROWS
            out = jnp.where(plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=wgmma) < num_live, out, 0.0)
            lse = jnp.where(plgpu.broadcasted_iota(jnp.int32, lse.shape, 0, layout=by_row) < num_live, lse, -jnp.inf)
        rows = pl.ds(tile.tile * TILE + warpgroup * ROWS, ROWS)
        out_smem = q_smem.at[warpgroup]
        out_smem[...] = out.astype(q_smem.dtype)
        lse_smem[warpgroup] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[rows, tile.head])
        plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_gmem.at[tile.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def attend(tile, num_blocks):
        """This warpgroup's output, not yet normalised, the maxima of its scores and the sums of its weights."""
        first_row = tile.position + warpgroup * ROWS
        scores_type = plgpu.ACC((ROWS, block), jnp.float32)

        def slot(i):
            return lax.rem(num_blocks + i, stages)

        def masked(scores, begin):
            position = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=wgmma)
            row = first_row + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=wgmma)
            seen = (position <= row) & (position < tile.kv_len)
            if sliding_window is not None:
                seen &= position > row - sliding_window
            return jnp.where(seen, scores, -jnp.inf)

        def softmax(scores, i, maximum, total):
            """Weights of block i, the new maximum and total, and what the old ones have decayed to."""
            begin, factor = tile.begin(i, block), scale * LOG2_E
            if soft_cap is not None:  # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1)
                doubled = jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap))
                scores, factor = soft_cap - (2 * soft_cap) / (doubled + 1.0), LOG2_E
            partial = begin + block > jnp.minimum(first_row + 1, tile.kv_len)
            if sliding_window is not None:
                partial |= begin <= first_row + (ROWS - 1) - sliding_window
            scores = lax.cond(partial, masked, lambda scores, begin: scores, scores, begin)
            new = jnp.maximum(maximum, scores.max(axis=1) * factor)
            decay = jnp.exp2(maximum - new)
            weights = jnp.exp2(scores * factor - over(new, scores.shape))
            return weights.astype(q_smem.dtype), new, total * decay + weights.sum(axis=1), decay

        def values(i):
            plgpu.barrier_wait(v_arrived.at[slot(i)])
            num_written = tile.kv_len - tile.begin(i, block)

            @pl.when(num_written < block)
            def _zero_unwritten_values():  # a zero weight does not silence a NaN
                row = plgpu.broadcasted_iota(jnp.int32, (block, 64), 0, layout=wgmma)
                for c in range(0, H, 64):
                    values_smem = v_smem.at[slot(i), :, pl.ds(c, 64)]
                    values = plgpu.load(values_smem, layout=wgmma)
                    values_smem[...] = jnp.where(row < num_written, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            return v_smem.at[slot(i)]

        def start_scores(i, ref):
            plgpu.barrier_wait(k_arrived.at[slot(i)])
            plgpu.wgmma(ref, q_smem.at[warpgroup], k_smem.at[slot(i)].T)

        def scores_of(i):
            def product(ref):
                start_scores(i, ref)
                return ref[...]

            scores = pl.run_scoped(product, scores_type)
            plgpu.barrier_arrive(k_consumed.at[slot(i)])
            return scores

        def overlapped(acc_ref):
            def step(i, carry):
                def both(scores_ref):
                    weights, maximum, total = carry
                    start_scores(i, scores_ref)
                    plgpu.wgmma(acc_ref, weights, values(i - 1))
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    plgpu.barrier_arrive(k_consumed.at[slot(i)])
                    weights, maximum, total, decay = softmax(scores, i, maximum, total)
                    acc = acc_ref[...]
                    plgpu.barrier_arrive(v_consumed.at[slot(i - 1)])
                    acc_ref[...] = acc * over(decay, acc.shape)
                    return weights, maximum, total

                return pl.run_scoped(both, scores_type)

            weights, maximum, total = lax.fori_loop(1, tile.count, step, start)
            plgpu.wgmma(acc_ref, weights, values(tile.count - 1))
            acc = acc_ref[...]
            plgpu.barrier_arrive(v_consumed.at[slot(tile.count - 1)])
            return acc, maximum, total

        def in_turn():
            """The same without what interpret mode lacks: weights in registers, and accumulators that live on."""

            def add(acc, weights, i):
                weights_smem[0][warpgroup] = weights
                plgpu.commit_smem()

                def product(ref):
                    plgpu.wgmma(ref, weights_smem[0].at[warpgroup], values(i))
                    return ref[...]

                acc = acc + pl.run_scoped(product, plgpu.ACC((ROWS, H), jnp.float32))
                plgpu.barrier_arrive(v_consumed.at[slot(i)])
                return acc

            def step(i, carry):
                acc, weights, maximum, total = carry
                scores = scores_of(i)
                acc = add(acc, weights, i - 1)
                weights, maximum, total, decay = softmax(scores, i, maximum, total)
                return acc * over(decay, acc.shape), weights, maximum, total

            acc, weights, maximum, total = lax.fori_loop(1, tile.count, step, (full((ROWS, H), 0, wgmma), *start))
            return add(acc, weights, tile.count - 1), maximum, total

        *start, _ = softmax(scores_of(0), 0, full((ROWS,), LEAST, by_row), full((ROWS,), 0, by_row))
        start = tuple(start)
        if interpret:
            return in_turn()
        return pl.run_scoped(overlapped, plgpu.ACC((ROWS, H), jnp.float32))

    @pl.when(warpgroup == 2)
    def _fetch():
        plgpu.set_max_registers(32, action="decrease")
        each_tile(fetch)

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        each_tile(compute)

"""Paged attention of decode rows on NVIDIA Hopper.

How this works. The keys of one sequence, one KV head and `BLOCK` positions are a *unit* of work, numbered sequence by
sequence, then head, then block; the units of one (sequence, head) are a *tile*. Every worker (a CUDA block; a few run
on each multiprocessor) takes an equal run of consecutive units, whatever the lengths, so no multiprocessor idles
(LeanAttention, arXiv 2405.10480). Pages arrive by TMA, a few units ahead, across the borders of tiles. The query heads
that share a KV head are the rows of both matmuls. What a worker finds out about one tile is a *part*, an output
normalised by itself and the logarithm of its denominator. Worker w's part of tile t has the index t + w: consecutive
for one tile, unique over all. `merge` then adds the parts of each tile, weighted by their denominators.
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

ROWS = 64  # of a matmul of one warpgroup; the query rows of a tile fill the first of them
LEAST = -1e30  # a running maximum that any score passes, and that can be subtracted from -inf
EVERYTHING = 2**30  # a window that nothing is out of
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    block: int = 64  # positions in a unit
    stages: int = 3  # units of a worker in shared memory
    pairs: int = 2  # workers in a CUDA block, each a warpgroup that computes and one that fetches
    blocks: int = 132  # CUDA blocks

    @property
    def workers(self) -> int:
        return self.blocks * self.pairs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit of work: scalars in a kernel, one value a worker in a plan."""

    sequence: Array
    head: Array
    at: Array  # block
    kv_len: Array
    first: Array  # block of the sequence that its rows see
    last: Array  # exclusive


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """How the units are shared out: the same for every layer of a kind."""

    ends: Array  # i32 [B], units of the sequences up to and with this one
    count: Array  # i32 [workers], units of each worker
    begin: Unit  # i32 [workers], the first of them


def plan(batch: AttentionBatch, num_kv_heads: int, sliding_window: int | None, tiling: Tiling) -> Work:
    """Equal runs of units for all workers."""
    kv_lens, K = batch.kv_lens, num_kv_heads
    first, last = block_range(kv_lens, batch.max_q_len, sliding_window, tiling.block)
    size = last - first
    ends = K * jnp.cumsum(size, dtype=jnp.int32)
    starts = first_unit(jnp.arange(tiling.workers + 1, dtype=jnp.int32), *_split(ends[-1], tiling.workers))
    sequence = jnp.searchsorted(ends, starts[:-1], side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)  # beyond: a worker without work
    offset = starts[:-1] - (ends - K * size)[sequence]
    begin = Unit(
        sequence=sequence,
        head=lax.div(offset, size[sequence]),
        at=first[sequence] + lax.rem(offset, size[sequence]),
        kv_len=kv_lens[sequence],
        first=first[sequence],
        last=last[sequence],
    )
    return Work(ends=ends, count=starts[1:] - starts[:-1], begin=begin)


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
    """Output `[B * q_len, N, H]` in q.dtype and float32 log-sum-exp `[B * q_len, N]`; see the package's docstring."""
    (_, N, H), K = q.shape, kv.k.shape[3]
    B, q_len = batch.kv_lens.shape[0], batch.max_q_len
    group = padded_group(N // K, H)
    rows = -(-q_len * group // 8) * 8
    tiles = q.reshape(B, q_len, K, N // K, H).transpose(0, 2, 1, 3, 4)
    tiles = jnp.pad(tiles, ((0, 0),) * 3 + ((0, group - N // K), (0, 0))).reshape(B, K, q_len * group, H)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, rows - q_len * group), (0, 0)))
    kernel = functools.partial(
        _attend, q_len=q_len, group=group, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, tiling=tiling
    )
    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
    interpreter = plgpu.InterpretGPUParams() if interpret else None
    pages_a_unit = max(1, tiling.block // kv.page_size)
    pairs, stages = tiling.pairs, tiling.stages
    parts, part_lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B * K + tiling.workers, rows, H), q.dtype),
            jax.ShapeDtypeStruct((B * K + tiling.workers, ROWS), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((pairs, ROWS, H), q.dtype, **swizzled),
            plgpu.SMEM((pairs, stages, tiling.block, H), kv.k.dtype, **swizzled),
            plgpu.SMEM((pairs, stages, tiling.block, H), kv.v.dtype, **swizzled),
            plgpu.SMEM((pairs, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=pairs),
            plgpu.Barrier(num_arrivals=pages_a_unit, num_barriers=pairs * stages),
            plgpu.Barrier(num_arrivals=pages_a_unit, num_barriers=pairs * stages),
            plgpu.Barrier(num_barriers=pairs * stages),
        ),
        grid=(tiling.blocks,),
        grid_names=("block",),
        num_threads=2 * pairs,
        thread_name="warpgroup",
        kernel_name="paged_attention_decode",
        interpret=interpreter,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(tiles, kv.k, kv.v, batch.page_table, batch.kv_lens, work.count, *jax.tree.leaves(work.begin), jnp.asarray(layer, jnp.int32).reshape(1))
    out, lse = plgpu.kernel(
        functools.partial(
            _merge, q_len=q_len, group=group, sliding_window=sliding_window, tiling=tiling, chunk=8 if B * K < 132 else 2
        ),
        out_type=(
            jax.ShapeDtypeStruct((B * q_len, K * group, H), q.dtype),
            jax.ShapeDtypeStruct((B * q_len, K * group), jnp.float32),
        ),
        grid=(B * K, q_len),
        grid_names=("tile", "q"),
        kernel_name="paged_attention_merge",
        interpret=interpreter,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(parts, part_lse, batch.kv_lens, work.ends)
    if group == N // K:
        return out, lse
    out = out.reshape(B * q_len, K, group, H)[:, :, : N // K].reshape(q.shape)
    return out, lse.reshape(B * q_len, K, group)[:, :, : N // K].reshape(q.shape[:2])


def padded_group(group: int, head_dim: int) -> int:
    """Query heads of a KV head as the kernels see them: a vector of one warpgroup is at least 128 long."""
    return group + group % 2 if head_dim < 128 else group


def block_range(kv_lens, q_len: int, sliding_window: int | None, block: int):
    """Blocks `[first, last)` that the rows of a sequence see; an empty sequence has one, of the null page."""
    window = EVERYTHING if sliding_window is None else sliding_window
    first = lax.div(jnp.maximum(kv_lens - q_len + 1 - window, 0), block)
    return first, jnp.maximum(lax.div(kv_lens + (block - 1), block), first + 1)


def _split(total: Array, workers: int) -> tuple[Array, Array]:
    return lax.div(total, workers), lax.rem(total, workers)


def first_unit(worker: Array, share: Array, rest: Array) -> Array:
    """The first of `rest` workers take `share + 1` units, the others `share`."""
    return worker * share + jnp.minimum(worker, rest)


def worker_of(unit: Array, share: Array, rest: Array) -> Array:
    large = rest * (share + 1)
    return jnp.where(unit < large, lax.div(unit, share + 1), rest + lax.div(unit - large, jnp.maximum(share, 1)))


def _attend(
    q_gmem,  # [B, K, rows, H]
    k_gmem,  # [L, P, page_size, K, H]
    v_gmem,
    table_gmem,  # i32 [B, max_pages]
    lens_gmem,  # i32 [B]
    count_gmem,  # i32 [workers]
    sequence_gmem,  # i32 [workers], as the next five: Work.begin
    head_gmem,
    at_gmem,
    kv_len_gmem,
    first_gmem,
    last_gmem,
    layer_gmem,  # i32 [1]
    out_gmem,  # [B * K + workers, rows, H]
    lse_gmem,  # f32 [B * K + workers, ROWS]
    q_smem,  # [pairs, ROWS, H]
    k_smem,  # [pairs, stages, block, H]
    v_smem,
    lse_smem,  # f32 [pairs, ROWS]
    q_arrived,  # [pairs]
    k_arrived,  # [pairs * stages]
    v_arrived,
    consumed,
    *,
    q_len: int,
    group: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tiling: Tiling,
):
    block, stages, pairs = tiling.block, tiling.stages, tiling.pairs
    _, K, rows, H = q_gmem.shape
    B, page_size = lens_gmem.shape[0], k_gmem.shape[2]
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.rem(warpgroup, pairs)
    worker = lax.axis_index("block") * pairs + pair
    count = count_gmem[worker]
    begin = Unit(
        sequence=sequence_gmem[worker],
        head=head_gmem[worker],
        at=at_gmem[worker],
        kv_len=kv_len_gmem[worker],
        first=first_gmem[worker],
        last=last_gmem[worker],
    )

    def following(unit):
        next_head = unit.at + 1 == unit.last
        next_sequence = next_head & (unit.head + 1 == K)
        sequence = jnp.minimum(jnp.where(next_sequence, unit.sequence + 1, unit.sequence), B - 1)
        kv_len = lens_gmem[sequence]
        first, last = block_range(kv_len, q_len, sliding_window, block)
        head = jnp.where(next_sequence, 0, jnp.where(next_head, unit.head + 1, unit.head))
        at = jnp.where(next_head, first, unit.at + 1)
        return Unit(sequence=sequence, head=head, at=at, kv_len=kv_len, first=first, last=last)

    @pl.when(warpgroup >= pairs)
    def _fetch():
        if pairs > 1:
            plgpu.set_max_registers(40, action="decrease")
        layer = layer_gmem[0]

        def step(i, unit):
            slot = lax.rem(i, stages)
            last_page = jnp.maximum(lax.div(unit.kv_len + (page_size - 1), page_size) - 1, 0)
            size = min(block, page_size)
            pages = []
            for j in range(block // size):
                index = jnp.minimum(lax.div(unit.at * block, page_size) + j, last_page)
                pages.append(jnp.where(unit.kv_len > 0, table_gmem[unit.sequence, index], 0))

            @pl.when(i >= stages)
            def _wait():
                plgpu.barrier_wait(consumed.at[pair * stages + slot])

            for arrived, source, target in ((k_arrived, k_gmem, k_smem), (v_arrived, v_gmem, v_smem)):
                for j, page in enumerate(pages):
                    there = pl.ds(lax.rem(unit.at * block, page_size), size) if size < page_size else slice(None)
                    plgpu.copy_gmem_to_smem(
                        source.at[layer, page, there, unit.head],
                        target.at[pair, slot, pl.ds(j * size, size)],
                        arrived.at[pair * stages + slot],
                    )
            return following(unit)

        lax.fori_loop(0, count, step, begin)

    @pl.when(warpgroup < pairs)
    def _compute():
        if pairs > 1:
            plgpu.set_max_registers(208, action="increase")
        wgmma = plgpu.Layout.WGMMA
        by_row = wgmma.reduce(1)
        width = min(H, 128)  # of the output that one accumulator holds
        columns = [pl.ds(c, width) for c in range(0, H, width)]

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def masked(scores, unit):
            position = unit.at * block + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=wgmma)
            end = unit.kv_len
            if q_len > 1:
                row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=wgmma)
                end = end - (q_len - 1) + lax.div(row, group)
            seen = position < end
            if sliding_window is not None:
                seen &= position >= end - sliding_window
            return jnp.where(seen, scores, -jnp.inf)

        def fetch_queries(unit):
            there = q_smem.at[pair, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(q_gmem.at[unit.sequence, unit.head], there, q_arrived.at[pair])

        def step(i, carry):
            outs, maximum, total, unit = carry
            begins = (unit.at == unit.first) | (i == 0)
            ends = (unit.at + 1 == unit.last) | (i + 1 == count)
            after = following(unit)
            slot = lax.rem(i, stages)
            arrival = pair * stages + slot

            @pl.when(begins)
            def _wait_for_queries():
                plgpu.barrier_wait(q_arrived.at[pair])

            plgpu.barrier_wait(k_arrived.at[arrival])

            def scores_of(ref):
                plgpu.wgmma(ref, q_smem.at[pair], k_smem.at[pair, slot].T)
                return ref[...]

            scores = pl.run_scoped(scores_of, plgpu.ACC((ROWS, block), jnp.float32))

            @pl.when(ends & (i + 1 < count))
            def _():
                fetch_queries(after)

            if soft_cap is None:
                scores = scores * (scale * LOG2_E)
            else:  # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1)
                doubled = jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap))
                scores = LOG2_E * soft_cap - (2 * LOG2_E * soft_cap) / (doubled + 1.0)
            at_end = (unit.at + 1) * block > unit.kv_len - (q_len - 1)
            if sliding_window is not None:
                at_end |= unit.at * block < unit.kv_len - sliding_window
            scores = lax.cond(at_end, masked, lambda scores, unit: scores, scores, unit)
            kept = jnp.where(begins, 0.0, 1.0)  # of what the last unit left
            before = maximum * kept + jnp.where(begins, LEAST, 0.0)
            maximum = jnp.maximum(before, scores.max(axis=1))
            decay = jnp.exp2(before - maximum) * kept
            weights = jnp.exp2(scores - lax.broadcast_in_dim(maximum, scores.shape, [0]))
            total = total * decay + weights.sum(axis=1)
            weights_smem = k_smem.at[pair, slot, pl.ds(0, ROWS), pl.ds(0, block)]  # the keys are done with
            weights_smem[...] = weights.astype(weights_smem.dtype)
            plgpu.barrier_wait(v_arrived.at[arrival])

            @pl.when((unit.at + 1) * block > unit.kv_len)
            def _zero_unwritten_values():  # a zero weight does not silence a NaN
                row = plgpu.broadcasted_iota(jnp.int32, (block, 64), 0, layout=wgmma)
                for c in range(0, H, 64):
                    values_smem = v_smem.at[pair, slot, :, pl.ds(c, 64)]
                    values = plgpu.load(values_smem, layout=wgmma)
                    written = row < unit.kv_len - unit.at * block
                    values_smem[...] = jnp.where(written, values, jnp.zeros_like(values))

            plgpu.commit_smem()

            def output_of(ref, *, columns):
                plgpu.wgmma(ref, weights_smem, v_smem.at[pair, slot, :, columns])
                return ref[...]

            outs = [
                out * lax.broadcast_in_dim(decay, out.shape, [0])
                + pl.run_scoped(functools.partial(output_of, columns=there), plgpu.ACC(out.shape, jnp.float32))
                for out, there in zip(outs, columns, strict=True)
            ]

            @pl.when(ends)
            def _store_part():
                part = unit.sequence * K + unit.head + worker
                some = total > 0
                inverse = jnp.where(some, 1.0 / total, 0.0)
                out_smem = k_smem.at[pair, slot, pl.ds(0, ROWS)]  # keys and weights are done with
                for out, there in zip(outs, columns, strict=True):
                    out = out * lax.broadcast_in_dim(inverse, out.shape, [0])
                    out_smem[:, there] = out.astype(out_smem.dtype)
                lse_smem[pair] = jnp.where(some, maximum / LOG2_E + jnp.log(total), -jnp.inf)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, rows)], out_gmem.at[part])
                plgpu.copy_smem_to_gmem(lse_smem.at[pair], lse_gmem.at[part])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            plgpu.barrier_arrive(consumed.at[arrival])
            return outs, maximum, total, after

        @pl.when(count > 0)
        def _():
            fetch_queries(begin)

        outs = [full((ROWS, width), 0, wgmma) for _ in columns]
        zeros = full((ROWS,), 0, by_row)
        lax.fori_loop(0, count, step, (outs, zeros, zeros, begin))
        plgpu.wait_smem_to_gmem(0)


def _merge(
    parts_gmem,  # [B * K + workers, rows, H]
    part_lse_gmem,  # f32 [B * K + workers, ROWS]
    lens_gmem,  # i32 [B]
    ends_gmem,  # i32 [B]
    out_gmem,  # [B * q_len, N, H]
    lse_gmem,  # f32 [B * q_len, N]
    *,
    q_len: int,
    group: int,
    sliding_window: int | None,
    tiling: Tiling,
    chunk: int,
):
    """Adds the parts of the heads of one query token and one KV head, `chunk` parts at a time."""
    K, H = out_gmem.shape[1] // group, out_gmem.shape[2]
    rows = group
    tile, row = lax.axis_index("tile"), lax.axis_index("q") * rows
    sequence, head = lax.div(tile, K), lax.rem(tile, K)
    first, last = block_range(lens_gmem[sequence], q_len, sliding_window, tiling.block)
    begin = ends_gmem[sequence] - (K - head) * (last - first)
    share, rest = _split(ends_gmem[lens_gmem.shape[0] - 1], tiling.workers)
    first_part = tile + worker_of(begin, share, rest)
    num_parts = tile + worker_of(begin + (last - first) - 1, share, rest) + 1 - first_part
    layout = plgpu.Layout.WG_STRIDED((rows, H), vec_size=rows * H // 128)
    row_ids = plgpu.broadcasted_iota(jnp.int32, (rows, H), 0, layout=layout)

    def by_row(values):
        full = jnp.full((rows, H), values[0], jnp.float32)
        for r in range(1, rows):
            full = jnp.where(row_ids == r, values[r], full)
        return full

    def step(i, carry):
        acc, maxima, totals = carry
        at = [first_part + jnp.minimum(i * chunk + c, num_parts - 1) for c in range(chunk)]
        outs = [plgpu.load(parts_gmem.at[part, pl.ds(row, rows)], layout=layout, optimized=False) for part in at]
        lses = [[part_lse_gmem[part, row + r] * LOG2_E for part in at] for r in range(rows)]
        new = [functools.reduce(jnp.maximum, lses[r], maxima[r]) for r in range(rows)]
        decay = [jnp.exp2(maxima[r] - new[r]) for r in range(rows)]
        acc, totals = acc * by_row(decay), [totals[r] * decay[r] for r in range(rows)]
        for c in range(chunk):
            there = jnp.where(i * chunk + c < num_parts, 1.0, 0.0)
            weights = [jnp.exp2(lses[r][c] - new[r]) * there for r in range(rows)]
            acc = acc + by_row(weights) * outs[c].astype(jnp.float32)
            totals = [totals[r] + weights[r] for r in range(rows)]
        return acc, new, totals

    zero = jnp.float32(0)
    acc0 = plgpu.layout_cast(jnp.zeros((rows, H), jnp.float32), layout)
    acc, maxima, totals = lax.fori_loop(
        0, lax.div(num_parts + (chunk - 1), chunk), step, (acc0, [jnp.float32(LEAST)] * rows, [zero] * rows)
    )
    inverse = [jnp.where(total > 0, 1.0 / total, 0.0) for total in totals]
    out_row, out_head = sequence * q_len + lax.axis_index("q"), head * group
    out_gmem[out_row, pl.ds(out_head, rows)] = (acc * by_row(inverse)).astype(out_gmem.dtype)
    for r in range(rows):
        lse_gmem[out_row, out_head + r] = jnp.where(
            totals[r] > 0, maxima[r] / LOG2_E + jnp.log(totals[r]), -jnp.inf
        )

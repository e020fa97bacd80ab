"""Paged attention of decode rows on NVIDIA Hopper.

How this works. The keys and values of one sequence, one KV head and `block` positions are a *unit* of work. Positions
and head_dim are the rows of its matmuls, of which there are 64 at least. The query heads that share a KV head are the
columns, of which eight do: so a softmax over few heads costs little. The heads of several KV heads are the columns of
one *tile* if together they are eight, and each unit of it leaves those of the other KV heads as they were. The units of
one tile of each sequence, sequence by sequence, then block, then head, are cut into *slices* of equal length, whatever
the sequences' lengths, so that no multiprocessor idles (LeanAttention, arXiv 2405.10480). Each slice is cut for all
tiles alike, one worker each: neighbours read the same pages at the same time, which lie together in memory. A worker is
a pair of warpgroups: one fetches pages by TMA, a few units ahead and across the borders of tiles, the other computes.
It widens pages in float8: keys into registers, values into shared memory, whence the matmuls take them.

What a worker finds out about a tile is an output, normalised by itself, and the logarithm of its denominator. It writes
them where those of the tile belong and, for a tile that it has not whole, into one of its own *parts*. A worker has at
most two such tiles, the first, which another one began, and the last, which another one completes. A second, small
kernel adds the parts of each tile that was split, weighted by their denominators, and writes over what was there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.decode_work import (
    PARTS,
    Apart,
    Options,
    Tiling,
    Unit,
    Work,
    by_sequence,
    heads_of_tile,
    rows_of_tile,
)
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, SCORES, SWIZZLED, Scoring, pages_type
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_worker import Worker
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_merge import merge_parts
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache

REGISTERS = 65_536  # of a multiprocessor


def paged_attention(
    q: Array,
    kv: KVCache,
    layer: int | Array,
    batch: AttentionBatch,
    scoring: Scoring,
    tiling: Tiling,
    work: Work,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Output `[B * q_len, N, H]` in q.dtype and float32 log-sum-exp `[B * q_len, N]`; see the package's docstring."""
    (_, N, H), K, q_len = q.shape, kv.k.shape[3], batch.max_q_len
    assert work.prepared_for == ((N, K), scoring.sliding_window, tiling), "prepared for other layers"
    shared, as_they_are = heads_of_tile(N, K, q_len)
    apart = Apart(num_kv_heads=K, beside=shared) if batch.by_kv_head else None
    options = Options(
        q_len=q_len,
        group=N // K,
        shared=1 if apart else shared,
        num_tiles=1 if apart else K // shared,
        as_they_are=as_they_are,
        apart=apart,
        scoring=scoring,
        tiling=tiling,
    )
    batch = by_sequence(batch)
    out, lse, parts, part_lse = _attend(_tiles(q, K, options), kv, layer, batch, work, options, interpret)
    out, lse = merge_parts(out, lse, parts, part_lse, batch, work, options, interpret)
    return _heads(out, options).reshape(-1, N, H), _heads(lse, options).reshape(-1, N)


def _tiles(q: Array, K: int, options: Options) -> Array:
    """Queries by tile, `[B, tiles, rows, H]`: rows are (query token, head of the group), in whole swizzles of eight."""
    (num_rows, _, H), q_len = q.shape, options.q_len
    if options.as_they_are:
        return q.reshape(-1, options.num_tiles, rows_of_tile(K * options.group, K, q_len), H)
    tiles = q.reshape(num_rows // q_len, q_len, K, options.group, H).swapaxes(1, 2)
    tiles = tiles.reshape(num_rows // q_len, K, q_len * options.group, H)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, -tiles.shape[2] % 8), (0, 0)))
    return tiles.reshape(-1, options.num_tiles, *tiles.shape[2:])


def _heads(tiles: Array, options: Options) -> Array:
    """What `_tiles` has put into tiles, in the order that it was in."""
    if options.apart is not None:
        tiles = _own_rows(tiles, options.apart, options.group)
    if options.as_they_are:
        return tiles
    (B, K, _, *rest), q_len, group = tiles.shape, options.q_len, options.group
    return tiles[:, :, : q_len * group].reshape(B, K, q_len, group, *rest).swapaxes(1, 2)


def _own_rows(tiles: Array, apart: Apart, group: int) -> Array:
    """Of tiles `[B * K, 1, rows, ..]`, one of each KV head, the rows of that one and padding: `[B, K, rows, ..]`."""
    count, (rows, *rest) = apart.beside, tiles.shape[2:]
    if count == 1:
        return tiles.reshape(-1, apart.num_kv_heads, rows, *rest)
    tiles = tiles.reshape(-1, apart.num_kv_heads // count, count, count, group, *rest)
    own = jnp.stack([tiles[:, :, head, head] for head in range(count)], axis=2)
    return own.reshape(-1, apart.num_kv_heads, group, *rest)


def _attend(
    tiles: Array,
    kv: KVCache,
    layer: int | Array,
    batch: AttentionBatch,
    work: Work,
    options: Options,
    interpret: bool,
) -> tuple[Array, Array, Array, Array]:
    """Outputs of the tiles that are whole and the logarithms of their denominators, and those of all parts."""
    (*_, num_tiles, rows, H), tiling = tiles.shape, options.tiling
    out = (batch.kv_lens.shape[0], num_tiles, rows, H)
    pairs, stages, block, workers = tiling.pairs, tiling.stages, tiling.block, tiling.workers
    wide = plgpu.SMEM((pairs, block, H), tiles.dtype, transforms=SWIZZLED)
    narrow = pages_type((pairs, stages, block, H), kv.k.dtype)
    pages = narrow or plgpu.SMEM((pairs, stages, block, H), tiles.dtype, transforms=SWIZZLED)
    arrived = plgpu.Barrier(num_arrivals=max(1, block // kv.page_size), num_barriers=pairs * stages)
    return plgpu.kernel(
        functools.partial(_attend_kernel, options=options),
        out_type=(
            jax.ShapeDtypeStruct(out, tiles.dtype),
            jax.ShapeDtypeStruct(out[:3], jnp.float32),
            jax.ShapeDtypeStruct((PARTS * workers, rows, H), tiles.dtype),
            jax.ShapeDtypeStruct((PARTS * workers, rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((pairs, rows, H), tiles.dtype, transforms=SWIZZLED),
            pages,
            pages,
            plgpu.SMEM((pairs, rows, block), jnp.float32, transforms=SCORES),
            plgpu.SMEM((pairs, rows, block), tiles.dtype, transforms=SWIZZLED),
            *3 * [plgpu.SMEM((pairs, rows), jnp.float32)],
            wide if narrow else None,
            plgpu.Barrier(num_barriers=pairs),
            arrived,
            arrived,
            plgpu.Barrier(num_barriers=pairs * stages),
        ),
        grid=(tiling.blocks,),
        grid_names=("block",),
        num_threads=2 * pairs,
        thread_name="warpgroup",
        kernel_name="paged_attention_decode",
        interpret=INTERPRETER if interpret else None,
        # The worker has the barriers that it needs: see there
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(
        tiles,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        batch.page_table,
        batch.kv_lens,
        work.start,
        work.begin.sequence,
        work.begin.head,
        work.begin.at,
        work.begin.kv_len,
        work.begin.first,
        work.begin.last,
        work.begin_pages,
        jnp.asarray(layer, jnp.int32).reshape(1),
    )


def _attend_kernel(
    q_gmem,
    k_gmem,
    v_gmem,
    k_scale_gmem,
    v_scale_gmem,
    table_gmem,
    lens_gmem,
    start_gmem,  # i32 [slices + 1]
    sequence_gmem,  # i32 [slices], as the next five: Work.begin
    head_gmem,
    at_gmem,
    kv_len_gmem,
    first_gmem,
    last_gmem,
    begin_pages_gmem,  # i32 [slices, pages of a block]
    layer_gmem,
    out_gmem,
    lse_gmem,
    parts_gmem,
    part_lse_gmem,
    q_smem,  # [pairs, rows, H]
    k_smem,  # [pairs, stages, block, H]
    v_smem,
    scores_smem,  # f32 [pairs, rows, block]
    weights_smem,  # [pairs, rows, block]
    decay_smem,  # f32 [pairs, rows]
    inverse_smem,
    lse_smem,
    wide_smem,  # [pairs, block, H]; None unless pages are in float8
    q_arrived,  # [pairs]
    k_arrived,  # [pairs * stages]
    v_arrived,
    consumed,
    *,
    options: Options,
):
    pairs, stages = options.tiling.pairs, options.tiling.stages
    warpgroup = lax.axis_index("warpgroup")

    def this() -> Worker:
        """This worker. Either warpgroup reads its scalars by itself: before they part, they have few registers."""
        pair = lax.rem(warpgroup, pairs)
        worker = lax.axis_index("block") * pairs + pair
        number = jnp.minimum(lax.div(worker, options.num_tiles), options.slices - 1)
        works = worker < options.slices * options.num_tiles  # a few may be left over
        return Worker(
            q_gmem=q_gmem,
            k_gmem=k_gmem,
            v_gmem=v_gmem,
            k_scale_gmem=k_scale_gmem,
            v_scale_gmem=v_scale_gmem,
            table_gmem=table_gmem,
            lens_gmem=lens_gmem,
            layer_gmem=layer_gmem,
            out_gmem=out_gmem,
            lse_gmem=lse_gmem,
            parts_gmem=parts_gmem,
            part_lse_gmem=part_lse_gmem,
            q_smem=q_smem.at[pair],
            k_smem=k_smem.at[pair],
            v_smem=v_smem.at[pair],
            scores_smem=scores_smem.at[pair],
            weights_smem=weights_smem.at[pair],
            decay_smem=decay_smem.at[pair],
            inverse_smem=inverse_smem.at[pair],
            lse_smem=lse_smem.at[pair],
            wide_smem=None if wide_smem is None else wide_smem.at[pair],
            q_arrived=q_arrived.at[pair],
            k_arrived=lambda slot: k_arrived.at[pair * stages + slot],
            v_arrived=lambda slot: v_arrived.at[pair * stages + slot],
            consumed=lambda slot: consumed.at[pair * stages + slot],
            worker=worker,
            tile=lax.rem(worker, options.num_tiles),
            count=jnp.where(works, start_gmem[number + 1] - start_gmem[number], 0),
            begin=Unit(
                sequence=sequence_gmem[number],
                head=head_gmem[number],
                at=at_gmem[number],
                kv_len=kv_len_gmem[number],
                first=first_gmem[number],
                last=last_gmem[number],
            ),
            begin_pages=[begin_pages_gmem[number, j] for j in range(begin_pages_gmem.shape[1])],
            options=options,
        )

    fetching = 32  # registers
    computing = 2 * (REGISTERS // (2 * pairs * 128) // 8 * 8) - fetching

    @pl.when(warpgroup >= pairs)
    def _fetch():
        if pairs > 1:
            plgpu.set_max_registers(fetching, action="decrease")
        this().fetch()

    @pl.when(warpgroup < pairs)
    def _compute():
        if pairs > 1:
            plgpu.set_max_registers(computing, action="increase")
        this().compute()

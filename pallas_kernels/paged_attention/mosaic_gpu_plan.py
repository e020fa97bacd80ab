"""The plan of `decode_work` in one kernel, for KV heads that have tables of their own.

They are planned in each layer, where the launches of what XLA makes of it cost more than attention to some pages. A
CUDA block plans one slice: each warp has all lengths, and finds the first unit by bisection over sums of them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.decode_work import (
    Tiling,
    Unit,
    Work,
    block_range,
    by_sequence,
    first_unit,
)
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, page_ids
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch

LANES = 32
# Every warp has all, so that it adds them up by itself
IN_EACH_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((LANES,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)


def plan(batch: AttentionBatch, heads: tuple[int, int], page_size: int, tiling: Tiling, *, interpret: bool) -> Work:
    """As `decode_work.plan`, of a region with a table for each KV head. Slices without units have any first unit."""
    batch = by_sequence(batch)
    B, slices = batch.kv_lens.shape[0], tiling.workers
    of_slices = jax.ShapeDtypeStruct((slices,), jnp.int32)
    num_pages = max(1, tiling.block // page_size)
    ends, share, rest, start, *begin, pages = plgpu.kernel(
        functools.partial(_plan, tiling=tiling, page_size=page_size),
        out_type=(
            jax.ShapeDtypeStruct((B,), jnp.int32),
            *2 * [jax.ShapeDtypeStruct((1,), jnp.int32)],
            jax.ShapeDtypeStruct((slices + 1,), jnp.int32),
            *6 * [of_slices],
            jax.ShapeDtypeStruct((slices, num_pages), jnp.int32),
        ),
        grid=(slices,),
        grid_names=("slice",),
        kernel_name="paged_attention_plan",
        interpret=INTERPRETER if interpret else None,
    )(batch.page_table, jnp.pad(batch.kv_lens, (0, -B % LANES)))
    sequence, head, at, kv_len, first, last = begin
    unit = Unit(sequence=sequence, head=head, at=at, kv_len=kv_len, first=first, last=last)
    return Work(
        ends=ends,
        share=(share, rest),
        start=start,
        begin=unit,
        begin_pages=pages,
        prepared_for=(heads, None, tiling),
    )


def _plan(
    table_gmem,  # i32 [B, max_pages]
    lens_gmem,  # i32 [B, in whole warps]
    ends_gmem,  # i32 [B]
    share_gmem,  # i32 [1], as the next: Work.share
    rest_gmem,
    start_gmem,  # i32 [slices + 1]
    sequence_gmem,  # i32 [slices], as the next five: Work.begin
    head_gmem,
    at_gmem,
    kv_len_gmem,
    first_gmem,
    last_gmem,
    pages_gmem,  # i32 [slices, pages of a block]
    *,
    tiling: Tiling,
    page_size: int,
):
    B, slices, number = ends_gmem.shape[0], tiling.workers, lax.axis_index("slice")
    lens = plgpu.load(lens_gmem, layout=IN_EACH_WARP, optimized=False)
    index = plgpu.broadcasted_iota(jnp.int32, lens.shape, 0, layout=IN_EACH_WARP)
    first, last = block_range(lens, 1, None, tiling.block)
    last_used = jnp.where(lens > 0, index, -1).astype(jnp.float32).max().astype(jnp.int32)
    sizes = jnp.where(index <= last_used, last - first, 0).astype(jnp.float32)

    def units_before(sequence: Array | int) -> Array:
        return jnp.where(index < sequence, sizes, 0.0).sum().astype(jnp.int32)

    num_units = units_before(B)
    share, rest = lax.div(num_units, slices), lax.rem(num_units, slices)
    begin = first_unit(number, share, rest)

    def bit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sequence, before = carry  # of these all units come before the first one
        more = sequence + lax.shift_left(jnp.int32(1), B.bit_length() - 1 - i)
        units = units_before(more)
        fits = (more <= B) & (units <= begin)
        return jnp.where(fits, more, sequence), jnp.where(fits, units, before)

    sequence, before = lax.fori_loop(0, B.bit_length(), bit, (jnp.int32(0), jnp.int32(0)))
    sequence = jnp.minimum(sequence, B - 1)  # beyond: a slice without work
    kv_len = lens_gmem[sequence]
    first, last = block_range(kv_len, 1, None, tiling.block)
    at = jnp.minimum(first + begin - before, last - 1)
    share_gmem[0], rest_gmem[0] = share, rest
    start_gmem[number] = begin
    start_gmem[slices] = num_units
    fields = (sequence_gmem, head_gmem, at_gmem, kv_len_gmem, first_gmem, last_gmem)
    for field, value in zip(fields, (sequence, 0, at, kv_len, first, last), strict=True):
        field[number] = value
    ids = page_ids(table_gmem, sequence, kv_len, at * tiling.block, tiling.block, page_size)
    for j, page in enumerate(ids):
        pages_gmem[number, j] = page

    def end(i: Array, _) -> None:
        sequence = number + i * slices
        ends_gmem[sequence] = units_before(sequence + 1)

    lax.fori_loop(0, lax.div(B - number + (slices - 1), slices), end, None)

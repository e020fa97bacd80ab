"""Adds up the parts of the tiles that decode attention has split, and clears the outputs of empty sequences.

The second kernel of `mosaic_gpu_decode`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.decode_work import (
    BEGUN,
    CONTINUED,
    PARTS,
    Options,
    Unit,
    Work,
    block_range,
    slices_of_begun_tile,
    slices_of_tile,
)
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, LEAST, LOG2_E, zeros
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch

ROW_ELEMENTS = 256  # of the rows that a CUDA block takes: as much as the widest head_dim
MAX_AHEAD = 72  # rows of parts that are loaded at once and fit the registers
CLEARED = 4  # tiles whose sequences' lengths are loaded at once


def merge_parts(
    out: Array,
    lse: Array,
    parts: Array,
    part_lse: Array,
    batch: AttentionBatch,
    work: Work,
    options: Options,
    interpret: bool,
) -> tuple[Array, Array]:
    """The outputs and the logarithms of their denominators, with those that the first kernel left out, in place."""
    B, num_tiles, rows, H = out.shape
    count = ROW_ELEMENTS // H
    by_tile = options.slices > B or options.slices == 1  # one slice splits nothing
    chunk = min(MAX_AHEAD // count, options.slices // B + 2)  # all parts of a tile if tiles are equally long
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        functools.partial(_merge_kernel, options=options, chunk=chunk, by_tile=by_tile),
        out_type=(),
        grid=((B if by_tile else options.slices - 1) * num_tiles, rows // count),
        grid_names=("tile", "rows"),
        kernel_name="paged_attention_merge",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        parts,
        part_lse,
        batch.kv_lens,
        work.ends,
        *work.share,
        work.start,
        work.begin.sequence,
        work.begin.head,
        work.begin.at,
        work.begin.kv_len,
        work.begin.first,
        work.begin.last,
        out_ref,
        lse_ref,
    )
    return jax.freeze(out_ref), jax.freeze(lse_ref)


def _merge_kernel(
    parts_gmem,  # [PARTS * workers, rows, H]
    part_lse_gmem,  # f32 [PARTS * workers, rows]
    lens_gmem,  # i32 [B]
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
    out_gmem,  # [B, tiles, rows, H]
    lse_gmem,  # f32 [B, tiles, rows]
    *,
    options: Options,
    chunk: int,
    by_tile: bool,
):
    """Clears some rows of each tile of an empty sequence, and adds the parts of some rows of one tile, if it is split.

    One of few tiles is looked up by its index. Of many, it is the one in which the next slice than this one begins.
    """
    (B, num_tiles), share = out_gmem.shape[:2], (share_gmem[0], rest_gmem[0])
    index, num_blocks = lax.axis_index("tile"), (B if by_tile else options.slices - 1) * num_tiles
    tile = lax.rem(index, num_tiles)

    def clear(i: Array, _) -> None:
        for j in range(CLEARED):
            number = index + (CLEARED * i + j) * num_blocks
            sequence = jnp.minimum(lax.div(number, num_tiles), B - 1)
            empty = (lens_gmem[sequence] == 0) & (number < B * num_tiles)
            pl.when(empty)(functools.partial(_clear, sequence, lax.rem(number, num_tiles), out_gmem, lse_gmem))

    lax.fori_loop(0, -(-B * num_tiles // (CLEARED * num_blocks)), clear, None)
    if by_tile:
        sequence = lax.div(index, num_tiles)
        kv_len = lens_gmem[sequence]
        first, last = block_range(kv_len, options.q_len, options.scoring.sliding_window, options.tiling.block)
        number, num_parts = slices_of_tile(ends_gmem[sequence], last - first, share, options.shared)
    else:
        number = lax.div(index, num_tiles)
        fields = (sequence_gmem, head_gmem, at_gmem, kv_len_gmem, first_gmem, last_gmem)
        sequence, head, at, kv_len, first, last = (field[number + 1] for field in fields)
        after = Unit(sequence=sequence, head=head, at=at, kv_len=kv_len, first=first, last=last)
        num_parts = slices_of_begun_tile(number, start_gmem[number + 1], after, share, options.shared)

    @pl.when((num_parts > 1) & (kv_len > 0))
    def _():
        at = (sequence, tile)
        workers = number * num_tiles + tile, num_tiles
        _merge(parts_gmem, part_lse_gmem, workers, num_parts, out_gmem.at[at], lse_gmem.at[at], chunk)


def _clear(sequence: Array, tile: Array, out_gmem, lse_gmem) -> None:
    H = out_gmem.shape[3]
    count = ROW_ELEMENTS // H
    first_row = lax.axis_index("rows") * count
    layout = plgpu.Layout.WG_STRIDED((count, H), vec_size=2)
    out_gmem[sequence, tile, pl.ds(first_row, count)] = zeros((count, H), layout).astype(out_gmem.dtype)
    for row in range(count):
        lse_gmem[sequence, tile, first_row + row] = jnp.float32(-jnp.inf)


def _merge(
    parts_gmem, part_lse_gmem, workers: tuple[Array, int], num_parts: Array, out_gmem, lse_gmem, chunk: int
) -> None:
    """The sum of a tile's parts, `chunk` at a time; `workers` are the first that has one and the step to the next."""
    worker, step_to_next = workers
    H = out_gmem.shape[1]
    count = ROW_ELEMENTS // H
    first_row = lax.axis_index("rows") * count
    rows = pl.ds(first_row, count)
    layout = plgpu.Layout.WG_STRIDED((count, H), vec_size=2)
    row_ids = plgpu.broadcasted_iota(jnp.int32, (count, H), 0, layout=layout)

    def by_row(values: list[Array]) -> Array:
        full = jnp.full((count, H), values[0], jnp.float32)
        for row in range(1, count):
            full = jnp.where(row_ids == row, values[row], full)
        return full

    def step(i, carry):
        acc, maxima, totals = carry
        at = [jnp.minimum(i * chunk + c, num_parts - 1) for c in range(chunk)]
        at = [PARTS * (worker + j * step_to_next) + jnp.where(j == 0, BEGUN, CONTINUED) for j in at]
        outs = [plgpu.load(parts_gmem.at[part, rows], layout=layout, optimized=False) for part in at]
        lses = [[part_lse_gmem[part, first_row + row] * LOG2_E for part in at] for row in range(count)]
        new = [functools.reduce(jnp.maximum, lse, maximum) for lse, maximum in zip(lses, maxima, strict=True)]
        decay = [jnp.exp2(maximum - larger) for maximum, larger in zip(maxima, new, strict=True)]
        acc, totals = acc * by_row(decay), [total * factor for total, factor in zip(totals, decay, strict=True)]
        for c in range(chunk):
            there = jnp.where(i * chunk + c < num_parts, 1.0, 0.0)
            weights = [jnp.exp2(lse[c] - larger) * there for lse, larger in zip(lses, new, strict=True)]
            acc = acc + by_row(weights) * outs[c].astype(jnp.float32)
            totals = [total + weight for total, weight in zip(totals, weights, strict=True)]
        return acc, new, totals

    start = (zeros((count, H), layout), [jnp.float32(LEAST)] * count, [jnp.float32(0)] * count)
    acc, maxima, totals = lax.fori_loop(0, lax.div(num_parts + (chunk - 1), chunk), step, start)
    inverse = [jnp.where(total > 0, 1.0 / total, 0.0) for total in totals]
    out_gmem[rows] = (acc * by_row(inverse)).astype(out_gmem.dtype)
    for row, (maximum, total) in enumerate(zip(maxima, totals, strict=True)):
        lse_gmem[first_row + row] = jnp.where(total > 0, maximum / LOG2_E + jnp.log(total), -jnp.inf)

"""Adds up the parts of decode attention: the second kernel of `mosaic_gpu_decode`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.decode_work import Options, Work, block_range, worker_of
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, LEAST, LOG2_E, zeros
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch


def merge_parts(
    parts: Array, part_lse: Array, batch: AttentionBatch, work: Work, options: Options, interpret: bool
) -> tuple[Array, Array]:
    """The sums of the parts of each tile: `[B * q_len, K * group, H]` and `[B * q_len, K * group]`."""
    B, H, q_len = batch.kv_lens.shape[0], parts.shape[2], options.q_len
    num_tiles = parts.shape[0] - options.tiling.workers
    heads = num_tiles // B * options.group
    chunk = 8 if num_tiles < options.tiling.blocks else 2  # few tiles have many parts each
    return plgpu.kernel(
        functools.partial(_merge_kernel, options=options, chunk=chunk),
        out_type=(
            jax.ShapeDtypeStruct((B * q_len, heads, H), parts.dtype),
            jax.ShapeDtypeStruct((B * q_len, heads), jnp.float32),
        ),
        grid=(num_tiles, q_len),
        grid_names=("tile", "q"),
        kernel_name="paged_attention_merge",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(parts, part_lse, batch.kv_lens, work.ends)


def _merge_kernel(
    parts_gmem,  # [B * K + workers, rows, H]
    part_lse_gmem,  # f32 [B * K + workers, ROWS]
    lens_gmem,  # i32 [B]
    ends_gmem,  # i32 [B]
    out_gmem,  # [B * q_len, K * group, H]
    lse_gmem,  # f32 [B * q_len, K * group]
    *,
    options: Options,
    chunk: int,
):
    """Adds the parts of the heads of one query token and one KV head, `chunk` parts at a time."""
    group, (_, heads, H) = options.group, out_gmem.shape
    tile, token = lax.axis_index("tile"), lax.axis_index("q")
    first_part, num_parts = _parts_of(tile, heads // group, lens_gmem, ends_gmem, options)
    layout = plgpu.Layout.WG_STRIDED((group, H), vec_size=group * H // 128)
    head_ids = plgpu.broadcasted_iota(jnp.int32, (group, H), 0, layout=layout)
    begin = (lax.rem(lax.rem(tile, heads // group), options.shared) + token) * group  # row of the first head

    def by_head(values: list[Array]) -> Array:
        full = jnp.full((group, H), values[0], jnp.float32)
        for head in range(1, group):
            full = jnp.where(head_ids == head, values[head], full)
        return full

    def step(i, carry):
        acc, maxima, totals = carry
        at = [first_part + jnp.minimum(i * chunk + c, num_parts - 1) for c in range(chunk)]
        outs = [plgpu.load(parts_gmem.at[part, pl.ds(begin, group)], layout=layout, optimized=False) for part in at]
        lses = [[part_lse_gmem[part, begin + head] * LOG2_E for part in at] for head in range(group)]
        new = [functools.reduce(jnp.maximum, lse, maximum) for lse, maximum in zip(lses, maxima, strict=True)]
        decay = [jnp.exp2(maximum - larger) for maximum, larger in zip(maxima, new, strict=True)]
        acc, totals = acc * by_head(decay), [total * factor for total, factor in zip(totals, decay, strict=True)]
        for c in range(chunk):
            there = jnp.where(i * chunk + c < num_parts, 1.0, 0.0)
            weights = [jnp.exp2(lse[c] - larger) * there for lse, larger in zip(lses, new, strict=True)]
            acc = acc + by_head(weights) * outs[c].astype(jnp.float32)
            totals = [total + weight for total, weight in zip(totals, weights, strict=True)]
        return acc, new, totals

    start = (zeros((group, H), layout), [jnp.float32(LEAST)] * group, [jnp.float32(0)] * group)
    acc, maxima, totals = lax.fori_loop(0, lax.div(num_parts + (chunk - 1), chunk), step, start)
    inverse = [jnp.where(total > 0, 1.0 / total, 0.0) for total in totals]
    row = lax.div(tile, heads // group) * options.q_len + token
    head = lax.rem(tile, heads // group) * group
    out_gmem[row, pl.ds(head, group)] = (acc * by_head(inverse)).astype(out_gmem.dtype)
    for i, (maximum, total) in enumerate(zip(maxima, totals, strict=True)):
        lse_gmem[row, head + i] = jnp.where(total > 0, maximum / LOG2_E + jnp.log(total), -jnp.inf)


def _parts_of(tile: Array, K: int, lens_gmem: Any, ends_gmem: Any, options: Options) -> tuple[Array, Array]:
    """The first part of a tile and how many it has."""
    sequence, head, workers = lax.div(tile, K), lax.rem(tile, K), options.tiling.workers
    first, last = block_range(lens_gmem[sequence], options.q_len, options.scoring.sliding_window, options.tiling.block)
    begin = ends_gmem[sequence] - (K - head) * (last - first)
    num_units = ends_gmem[ends_gmem.shape[0] - 1]
    share, rest = lax.div(num_units, workers), lax.rem(num_units, workers)
    first_worker = worker_of(begin, share, rest)
    return tile + first_worker, worker_of(begin + (last - first) - 1, share, rest) + 1 - first_worker

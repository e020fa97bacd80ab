"""Scores of pages on NVIDIA Hopper.

How this works. A CUDA block takes some pages of one row at a time: it starts the copies of all of them into shared
memory, by TMA, and waits. So many CUDA blocks share a multiprocessor that memory is busy while some compute. The
metadata of a page and KV head, or of a part of the page, are a row; a warp multiplies and adds up two of eight rows at
a time, whatever the page and head.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import num_multiprocessors

ROWS = 8  # that are multiplied at a time
BLOCKS = 6  # CUDA blocks that a multiprocessor has at once
BLOCK_BYTES = 32 * 1024  # of metadata that a CUDA block loads at once
MOST_PAGES = 32  # at once
MAX_BOX = 256  # numbers in a row of a copy


def unsupported(probe: Array, meta: Array) -> str | None:
    """Why the kernel cannot serve this call; None if it can."""
    (_, K, width), M = probe.shape, meta.shape[3]
    if meta.dtype not in ("bfloat16", "float16"):
        return f"metadata of pages must be bfloat16 or float16, got {meta.dtype}"
    if width not in (64, 128, 256) and width % MAX_BOX:
        return f"metadata must be 64, 128 or a multiple of 256 numbers a part of a page, got {width}"
    if math.lcm(ROWS, K) * width > 32 * MAX_BOX or math.lcm(ROWS, K) * M * 2 > 3 * BLOCK_BYTES:
        return f"{K} KV heads with {M} numbers each are too many to be multiplied at once"
    return None


def page_scores(
    probe: Array, meta: Array, layer: int | Array, page_table: Array, num_pages: Array, *, interpret: bool = False
) -> Array:
    """As the package's `page_scores`; scores beyond a sequence's pages may be anything.

    Raises:
        NotImplementedError: see `unsupported`.
    """
    if reason := unsupported(probe, meta):
        raise NotImplementedError(f"page_scores: implementation 'mosaic_gpu': {reason}")
    (L, P, K, M), (T, max_pages), width = meta.shape, page_table.shape, probe.shape[2]
    rows, pieces = math.lcm(ROWS, K), -(-width // MAX_BOX)
    fewest = rows // K  # pages whose rows are whole eights
    count = fewest * max(1, min(MOST_PAGES, BLOCK_BYTES // (K * M * 2)) // fewest)
    chunks = -(-max_pages // count)
    blocks = min(chunks, -(-BLOCKS * num_multiprocessors() // T))
    probe = jnp.tile(probe.astype(jnp.float32), (1, fewest, 1))
    scores = plgpu.kernel(
        functools.partial(_score, count=count, blocks=blocks),
        out_type=jax.ShapeDtypeStruct((T, chunks, count * K // ROWS, ROWS), jnp.float32),
        scratch_types=(
            plgpu.SMEM((M // width, pieces, count * K, width // pieces), meta.dtype),
            plgpu.SMEM((count * K // ROWS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=count * (M // width) * pieces),
        ),
        grid=(T, blocks),
        grid_names=("row", "block"),
        kernel_name="page_scores",
        interpret=INTERPRETER if interpret else None,
    )(
        probe.reshape(T, rows, pieces, width // pieces),
        meta.reshape(L, P, K, M // width, pieces, width // pieces),
        page_table,
        num_pages.astype(jnp.int32),
        jnp.asarray(layer, jnp.int32).reshape(1),
    )
    scores = scores.reshape(T, chunks * count, K)[:, :max_pages].swapaxes(1, 2)
    return jnp.where(page_table[:, None] >= 0, scores, 0.0)


def _score(
    probe_gmem,  # f32 [T, rows, pieces, width / pieces], of each head, repeated to whole eights
    meta_gmem,  # [L, P, K, parts, pieces, width / pieces]
    table_gmem,  # i32 [T, max_pages]
    num_pages_gmem,  # i32 [T]
    layer_gmem,  # i32 [1]
    scores_gmem,  # f32 [T, chunks, count * K / ROWS, ROWS]
    meta_smem,  # [parts, pieces, count * K, width / pieces]
    scores_smem,  # f32 [count * K / ROWS, ROWS]
    arrived,
    *,
    count: int,
    blocks: int,
):
    """Each of the `blocks` of a row takes every so many'th chunk of `count` of its pages."""
    row, first = lax.axis_index("row"), lax.axis_index("block")
    num_pages = jnp.minimum(num_pages_gmem[row], table_gmem.shape[1])
    here = meta_gmem.at[layer_gmem[0]]
    P, K, parts, pieces, size = here.shape
    layout = by_row(size)
    num_groups = probe_gmem.shape[1] // ROWS
    probes = [
        [
            plgpu.load(probe_gmem.at[row, pl.ds(group * ROWS, ROWS), piece], layout=layout, optimized=False)
            for piece in range(pieces)
        ]
        for group in range(num_groups)
    ]

    def step(i: Array, _) -> None:
        chunk = first + i * blocks
        ids = [table_gmem[row, jnp.minimum(chunk * count + j, num_pages - 1)] for j in range(count)]
        for j, page in enumerate(ids):
            for part in range(parts):
                for piece in range(pieces):
                    source = here.at[jnp.clip(page, 0, P - 1), :, part, piece]
                    plgpu.copy_gmem_to_smem(source, meta_smem.at[part, piece, pl.ds(j * K, K)], arrived)
        plgpu.barrier_wait(arrived)
        for group, of_heads in enumerate(probes):

            def eight(turn: Array, _, group=group, of_heads=of_heads) -> None:
                at = turn * num_groups + group
                some = pl.ds(pl.multiple_of(at * ROWS, ROWS), ROWS)
                score = None
                for part in range(parts):
                    found = [plgpu.load(meta_smem.at[part, piece, some], layout=layout) for piece in range(pieces)]
                    products = [(x.astype(jnp.float32) * y).sum(axis=1) for x, y in zip(found, of_heads, strict=True)]
                    total = functools.reduce(jnp.add, products)
                    score = total if score is None else jnp.maximum(score, total)
                scores_smem[at] = score

            lax.fori_loop(0, count * K // ROWS // num_groups, eight, None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scores_smem, scores_gmem.at[row, chunk])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    num_chunks = lax.div(num_pages + (count - 1), count)
    lax.fori_loop(0, lax.div(num_chunks - first + (blocks - 1), blocks), step, None)


def by_row(width: int) -> Any:
    """Of `[ROWS, width]`: two rows to a warp, which reduces them by itself, and the neighbours' lanes side by side."""
    vector = min(8, width // 16)
    tiling = plgpu.Tiling(((ROWS, 16 * vector), (2, 16 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

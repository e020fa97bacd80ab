"""Rotates queries and keys and writes keys and values into their pages, in place, on NVIDIA Hopper.

How this works. A CUDA block takes up to eight heads of one row at a time, of the queries or of the keys; with those of
the keys go the values of the same heads. The cache is passed as a mutable reference, so the kernel writes the donated
buffer itself. In XLA the same takes three kernels, and at few rows each costs little but its launch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, unsupported_dtypes
from jaxserve.pallas_kernels.paged_attention.types import FP8, FP8_MAX, KVCache

MAX_HEADS = 8  # that a CUDA block takes at a time
MAX_BLOCKS = 1024  # rows that are in work at once


def heads_at_a_time(num_kv_heads: int) -> int:
    """The most that divide the keys evenly, and with them the queries."""
    return next(c for c in range(MAX_HEADS, 0, -1) if num_kv_heads % c == 0)


def for_heads(rotation: tuple[Array, Array], kv: KVCache) -> tuple[Array, Array]:
    """Cosines and sines `[T, 1, H / 2]`, repeated for each of the heads that a block takes: all operands of a rotation
    have one layout. For all layers with this rotation at once.
    """
    cos, sin = (jnp.repeat(x, heads_at_a_time(kv.k.shape[3]), axis=1) for x in rotation)
    return cos, sin


def unsupported(heads: Array, kv: KVCache) -> str | None:
    """Why the kernel cannot serve this call; None if it can."""
    H, K = heads.shape[2], kv.k.shape[3]
    if reason := unsupported_dtypes("heads", heads.dtype, kv):
        return reason
    return unsupported_heads(K, H)


def unsupported_heads(num_kv_heads: int, head_dim: int) -> str | None:
    """Why the kernel cannot serve such heads; None if it can."""
    count = heads_at_a_time(num_kv_heads)
    if count * head_dim // 2 % 128:
        return f"{count} heads at a time of {head_dim} dimensions do not fill the vectors of a warpgroup"
    return None


def rope_kv_write(
    heads: Array,
    rotation: tuple[Array, Array],
    kv: KVCache,
    layer: int | Array,
    page_ids: Array,
    page_offsets: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, KVCache]:
    """Rotated queries `[T, N, H]`, and the cache with the rotated keys and the values in `layer`.

    Args:
        heads: `[T, N + 2 K, H]`, queries, keys and values of each row.
        rotation: as `for_heads` returned it; the pair `(x[i], x[i + H/2])` of a row's queries and keys turns by it.
        kv: written in place when it was donated.
        page_ids, page_offsets: i32 `[T]`, where each row's key and value go.
    """
    (T, total, H), K = heads.shape, kv.k.shape[3]
    N = total - 2 * K
    cos, sin = rotation
    count = cos.shape[1]
    k, v = jax.new_ref(kv.k), jax.new_ref(kv.v)
    (q,) = plgpu.kernel(
        functools.partial(_rotate_and_write, count=count),
        out_type=(jax.ShapeDtypeStruct((T, N, H), heads.dtype),),
        grid=(min(T, MAX_BLOCKS), (N + K) // count),
        grid_names=("row", "part"),
        kernel_name="rope_kv_write",
        interpret=INTERPRETER if interpret else None,
    )(
        heads,
        cos,
        sin,
        page_ids,
        page_offsets,
        jnp.asarray(layer, jnp.int32).reshape(1),
        kv.k_scale,
        kv.v_scale,
        k,
        v,
    )
    return q, dataclasses.replace(kv, k=jax.freeze(k), v=jax.freeze(v))


def _rotate_and_write(
    heads_gmem,  # [T, N + 2 K, H]
    cos_gmem,  # f32 [T, count, H / 2]
    sin_gmem,
    page_ids_gmem,  # i32 [T]
    page_offsets_gmem,  # i32 [T]
    layer_gmem,  # i32 [1]
    k_scale_gmem,  # f32 [L, K]; None: keys and values are written as they are
    v_scale_gmem,
    k_gmem,  # [L, P, page_size, K, H]
    v_gmem,
    q_gmem,  # [T, N, H]
    *,
    count: int,
):
    (T, N, H), K = q_gmem.shape, k_gmem.shape[3]
    num_blocks, part = min(T, MAX_BLOCKS), lax.axis_index("part")
    low, high = pl.ds(0, H // 2), pl.ds(H // 2, H // 2)
    first = lax.axis_index("row")

    def rotated(row):
        some = pl.ds(part * count, count)
        a, b = (heads_gmem[row, some, half].astype(jnp.float32) for half in (low, high))
        cos, sin = cos_gmem[row], sin_gmem[row]
        return (a * cos - b * sin).astype(q_gmem.dtype), (b * cos + a * sin).astype(q_gmem.dtype)

    def scaled(x, scale_gmem, begin):
        if scale_gmem is None:
            return x
        scales = _by_head([scale_gmem[layer_gmem[0], begin + i] for i in range(count)], x.shape)
        return jnp.clip(x.astype(jnp.float32) / scales, -FP8_MAX, FP8_MAX).astype(FP8)

    def step(i, _):
        row = first + i * num_blocks

        @pl.when(part < N // count)
        def _queries():
            some = pl.ds(part * count, count)
            q_gmem[row, some, low], q_gmem[row, some, high] = rotated(row)

        @pl.when(part >= N // count)
        def _keys_and_values():
            begin = part * count - N
            some, there = pl.ds(begin, count), (layer_gmem[0], page_ids_gmem[row], page_offsets_gmem[row])
            k_gmem[*there, some, low], k_gmem[*there, some, high] = (
                scaled(x, k_scale_gmem, begin) for x in rotated(row)
            )
            v_gmem[*there, some] = scaled(heads_gmem[row, pl.ds(N + K + begin, count)], v_scale_gmem, begin)

    lax.fori_loop(0, lax.div(T - first + (num_blocks - 1), num_blocks), step, None)


def _by_head(values: list[Array], shape: tuple[int, int]) -> Array:
    """The i-th value in row i of `shape`."""
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=min(4, shape[0] * shape[1] // 128))
    head = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    full = jnp.full(shape, values[0], jnp.float32)
    for i, value in enumerate(values[1:], start=1):
        full = jnp.where(head == i, value, full)
    return full

"""What the two kernels of paged attention for NVIDIA Hopper share."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.types import FP8, KVCache

ROWS = 64  # of a matmul of one warpgroup
SHARED_MEMORY_BYTES = 232_448 - 2048  # of a CUDA block, less what barriers and scratch take
LEAST = -1e30  # a running maximum that any score passes, and that can be subtracted from -inf
LOG2_E = math.log2(math.e)
SWIZZLED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
SCORES: Any = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
INTERPRETER = plgpu.InterpretGPUParams()
WIDE = jnp.float16  # what pages in float8 are turned into for the matmuls: exact, and one instruction for two values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How scores become weights: see the package's `paged_attention`."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def unsupported_dtypes(name: str, dtype: Any, kv: KVCache) -> str | None:
    """Why the kernels do not take queries, called `name`, of this dtype with this cache; None if they do."""
    if dtype in ("bfloat16", "float16") and (kv.k.dtype == dtype or (kv.k.dtype == FP8 and kv.k_scale is not None)):
        return None
    return (
        f"{name} and cache must both be bfloat16 or both float16, got {dtype} and {kv.k.dtype}; beside either {name} "
        "the cache may be float8_e4m3fn with scales"
    )


def page_ids(table: Any, sequence: Array, kv_len: Array, begin: Array, block: int, page_size: int) -> list[Array]:
    """Ids of the pages of positions `[begin, begin + block)` of a sequence, from a table `[S, max_pages]`.

    Beyond the sequence it is its last page again, and for an empty one the null page.
    """
    first = lax.div(begin, page_size)
    last = jnp.maximum(lax.div(kv_len + (page_size - 1), page_size) - 1, 0)
    indices = [jnp.minimum(first + j, last) for j in range(max(1, block // page_size))]
    return [jnp.where(kv_len > 0, table[sequence, index], 0) for index in indices]


def fetch_block(
    pages: Any, ids: list[Array], begin: Array, kv_len: Array, head: Array, target: Any, arrived: Any
) -> None:
    """Starts the copies of one head of a block, from pages `[P, page_size, K, H]` to `[block, H]`.

    A block of one page is fetched by half if the sequence, of length `kv_len`, ends there.
    """
    block, page_size = target.shape[0], pages.shape[1]
    size = min(block, page_size)
    offset = lax.rem(begin, page_size) if size < page_size else 0

    def fetch(num_rows: int) -> None:
        for j, page in enumerate(ids):
            rows = pages.at[page, pl.ds(offset, num_rows), head]
            plgpu.copy_gmem_to_smem(rows, target.at[pl.ds(j * size, num_rows)], arrived)

    if size < block:
        return fetch(size)
    is_half = kv_len - begin <= size // 2
    pl.when(is_half)(lambda: fetch(size // 2))
    pl.when(jnp.logical_not(is_half))(lambda: fetch(size))


def pages_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for pages as they are fetched, `[..., H]`; None where they need none of their own."""
    if dtype != FP8:
        return None
    width = min(128, shape[-1])
    transforms: Any = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, FP8, transforms=transforms)


def widen(pages_smem: Any, wide_smem: Any, layout: Any) -> None:
    """Turns pages in float8 `[block, H]` into `WIDE`, still without their scale, for matmuls.

    With the layout WGMMA a thread has two values side by side: more loads, and stores without conflicts. With
    WGMMA_UPCAST_2X it has four, which takes fewer registers.
    """

    def some_rows(i: Array, _) -> None:
        some = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        wide_smem[some] = plgpu.load(pages_smem.at[some], layout=layout).astype(WIDE)

    lax.fori_loop(0, pages_smem.shape[0] // ROWS, some_rows, None)


def scale_of(scale_gmem: Any, layer: Array, head: Array) -> Any:
    """The scale of a KV head's keys or values, which are in `[L, K]`; 1 if there are none."""
    return 1.0 if scale_gmem is None else scale_gmem[layer, head]


def capped(scores: Array, scoring: Scoring, k_scale: Any) -> tuple[Array, Any]:
    """Scores, scaled and capped, but for a factor that turns them into units of log 2.

    The factor is left to the caller, who can multiply and subtract a maximum in one instruction. The hyperbolic tangent
    is `tanh(x) = 1 - 2 / (exp(2 x) + 1)`: the card's own is good to eleven bits only.
    """
    scale, soft_cap = scoring.scale * k_scale, scoring.soft_cap
    if soft_cap is None:
        return scores, scale * LOG2_E
    doubled = jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap))
    return soft_cap - (2 * soft_cap) / (doubled + 1.0), LOG2_E


def zero_unwritten(values_smem: Any, num_written: Array) -> None:
    """Clears the rows of values `[block, H]` from `num_written` on: a weight of zero does not silence a NaN.

    Two warpgroups may do this to the same block: what the second writes is what is there already.
    """
    for c in range(0, values_smem.shape[1], 64):
        some = values_smem.at[:, pl.ds(c, 64)]
        values = plgpu.load(some, layout=plgpu.Layout.WGMMA)
        some[...] = jnp.where(iota(values.shape, 0) < num_written, values, jnp.zeros_like(values))


def zeros(shape: tuple[int, ...], layout: Any) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def iota(shape: tuple[int, ...], dimension: int, layout: Any = plgpu.Layout.WGMMA) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def over(rows: Array, matrix: Array) -> Array:
    return lax.broadcast_in_dim(rows, matrix.shape, [0])

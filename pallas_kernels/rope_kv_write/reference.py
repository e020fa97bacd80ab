"""The definition, one row at a time, in float32. Slow; the truth that tests compare with."""

import numpy as np
from jax import Array

from jaxserve.pallas_kernels.paged_attention.types import KVCache


def rope_kv_write(
    heads: Array,  # [T, N + 2 K, H]
    angles: Array,  # f32 [T, H / 2]
    kv: KVCache,
    layer: int,
    page_ids: Array,
    page_offsets: Array,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotated queries `[T, N, H]`, and the caches with the rotated keys and the values in them.

    The pair `(x[i], x[i + H/2])` of each head of q and k turns by `angles[i]`. Where the cache has scales, keys and
    values are divided by them and kept within what float8_e4m3fn can hold, but not rounded. Source: arXiv 2104.09864.
    """
    x, K = np.asarray(heads).astype(np.float32), kv.k.shape[3]
    k, v = np.asarray(kv.k).astype(np.float32), np.asarray(kv.v).astype(np.float32)
    half, first_key = x.shape[2] // 2, x.shape[1] - 2 * K
    for row, (page, offset) in enumerate(zip(np.asarray(page_ids), np.asarray(page_offsets), strict=True)):
        turn = np.exp(1j * np.asarray(angles)[row].astype(np.float64))
        turned = (x[row, :-K, :half] + 1j * x[row, :-K, half:]) * turn
        x[row, :-K] = np.concatenate([turned.real, turned.imag], axis=-1)
        k[layer, page, offset] = _scaled(x[row, first_key:-K], kv.k_scale, layer)
        v[layer, page, offset] = _scaled(x[row, -K:], kv.v_scale, layer)
    return x[:, :first_key], k, v


def _scaled(x: np.ndarray, scale: Array | None, layer: int) -> np.ndarray:
    return x if scale is None else np.clip(x / np.asarray(scale)[layer][:, None], -448, 448)

"""The dense part of a layer in float32, written from its definition."""

from typing import Any

import numpy as np


def dense_layer(attended: Any, x: Any, weights: Any, layer: int, *, eps: float, offset: float):
    """The residual stream after `layer`, and the projection of the next layer; see the package's `dense_layer`."""
    w = type(weights)(*(np.asarray(leaf, np.float32) for leaf in weights))
    attended, x = np.asarray(attended, np.float32), np.asarray(x, np.float32)

    def norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps) * (offset + weight)

    h = x + attended @ w.o[layer].T
    gate, up = np.split(norm(h, w.post_norm[layer]) @ w.gate_up[layer].T, 2, axis=1)
    y = h + (gate / (1 + np.exp(-gate)) * up) @ w.down[layer].T
    return y, norm(y, w.input_norm[layer + 1]) @ w.qkv[layer + 1].T

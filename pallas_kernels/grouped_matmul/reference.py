"""The definition, one token and one expert at a time, in float32. Slow; the truth that tests compare with."""

import numpy as np
from jax import Array


def fused_moe(
    x: Array,  # [T, D]
    logits: Array,  # f32 [T, E]
    gate_up: Array,  # [L, E, 2 F, D]
    down: Array,  # [L, E, D, F]
    layer: int,
    *,
    top_k: int,
    normalize: bool,
) -> np.ndarray:
    """`sum over the top_k experts e of p_e * down_e (silu(gate_e x) * (up_e x))` for each token, `[T, D]`.

    `p` is the softmax of all logits; with `normalize`, divided by the sum over those experts.
    """
    out = np.zeros(x.shape, np.float32)
    for t, (token, scores) in enumerate(zip(np.asarray(x, np.float32), np.asarray(logits, np.float32), strict=True)):
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[:top_k]
        share = probs[chosen] / (probs[chosen].sum() if normalize else 1.0)
        for p, e in zip(share, chosen, strict=True):
            gate, up = np.split(np.asarray(gate_up[layer, e], np.float32) @ token, 2)
            out[t] += p * (np.asarray(down[layer, e], np.float32) @ (gate / (1.0 + np.exp(-gate)) * up))
    return out

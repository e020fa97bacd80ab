"""Rotary position embedding (arXiv 2104.09864), in the half-split form of Hugging Face checkpoints."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

Rotation = tuple[Float[Array, "T 1 H2"], Float[Array, "T 1 H2"]]  # cosines and sines of each row's angles, float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are stretched beyond the trained context.

    linear: all are divided by `factor`. llama3: those whose wavelength is over
    `original_max_position / low_freq_factor` are divided by `factor`, those under
    `original_max_position / high_freq_factor` stay, and between the two they are blended.

    Raises:
        ValueError: the numbers make no sense.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"rope scaling: factor must be at least 1, got {self.factor}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling: high_freq_factor must exceed low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )


@functools.cache
def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each pair of dimensions, float32 `[H/2]`: `theta ** (-2 i / H)`, then scaled."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # rotations within the trained context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (frequencies * (keep + (1.0 - keep) / scaling.factor)).astype(np.float32)


def rotation(positions: Int[Array, " T"], frequencies: np.ndarray) -> Rotation:
    """Cosines and sines of the angles `positions * frequencies`, once for all layers that share them."""
    angle = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))  # else XLA works them out for every head


def apply_rope(x: Float[Array, "T N H"], turn: Rotation) -> Float[Array, "T N H"]:
    """Rotates each pair `(x[i], x[i + H/2])` by the angle that `turn` is of, in float32; returns x.dtype."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

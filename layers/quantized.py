"""Weights in 8 bits: integers with one scale for each output, and their product with activations quantised on the fly.

How it works ("w8a8"): a row r of the weight is held as `scale[r] * q[r]` with q in [-127, 127]. The activations of each
token are rounded to 8 bits the same way, just before the product, so that it runs in the processor's 8-bit units with
an exact 32-bit sum; both scales are applied to the sum. Weights that stay 8 bits wide in memory but are multiplied in
floating point would save no time on CPU: XLA writes the converted weights to memory first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int8

from jaxserve.layers.contract import contract

TINY = 1e-30  # rows of zeros keep a finite scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Weight:
    """A weight `scale[:, None] * q`. Stands where a float weight [out, in] would."""

    q: Array  # i8 [out, in]; experts [E, out, in]
    scale: Array  # f32 [out]; experts [E, out]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape


def quantize_rows(x: Float[Array, "*rows in"]) -> tuple[Int8[Array, "*rows in"], Float[Array, "*rows"]]:
    """`q, scale` with `scale * q` within half a scale of x: the largest magnitude of a row becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), TINY) * (1.0 / 127.0)
    return jnp.round(x * (1.0 / scale)[..., None]).astype(jnp.int8), scale


@jax.jit
def quantize_int8(w: Float[Array, "*experts out in"]) -> Int8Weight:
    """The nearest 8-bit weight, each output with a scale of its own."""
    q, scale = quantize_rows(w)
    return Int8Weight(q=q, scale=scale)


def int8_linear(x: Float[Array, "T in"], w: Int8Weight) -> Float[Array, "T out"]:
    """`x @ w.T` in float32, x rounded to 8 bits for each row."""
    q, scale = quantize_rows(x)
    return contract(q, w.q, jnp.int32).astype(jnp.float32) * scale[:, None] * w.scale[None, :]

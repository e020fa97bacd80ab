"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def rms_norm(
    x: Float[Array, "*rows D"], w: Float[Array, "*last D"], eps: float, *, offset: float = 0.0
) -> Float[Array, "*rows D"]:
    """`x / sqrt(mean(x^2) + eps) * (offset + w)` over the last axis, in float32, rounded once to x.dtype.

    Gemma stores its weights less one: `offset=1`. Source: arXiv 1910.07467.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(offset + w.astype(jnp.float32), range(x.ndim - w.ndim))
    return (x32 * scale * weight).astype(x.dtype)

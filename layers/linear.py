"""Matrix products with weights in the checkpoint's orientation, and the initialiser of every weight."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Key

from jaxserve.layers.contract import contract
from jaxserve.layers.quantized import Int8Weight, int8_linear

Weight = Any  # Float[Array, "out in"], or an Int8Weight that stands for one


def linear(
    x: Float[Array, "T in"], w: Weight, bias: Float[Array, " out"] | None = None, *, out_dtype: DTypeLike | None = None
) -> Float[Array, "T out"]:
    """`x @ w.T + bias`, accumulated in float32 and rounded once, to `out_dtype` or else to x.dtype.

    Every matmul of a model with its weights passes here: this is where a quantised `w` is recognised.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    sums = out_dtype if bias is None else jnp.float32
    y = int8_linear(x, w) if isinstance(w, Int8Weight) else contract(x, w, sums)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(out_dtype)


def param(
    init: Callable[..., Array], shape: Sequence[int], axes: Sequence[str | None], *, rngs: nnx.Rngs, dtype: DTypeLike
) -> nnx.Param:
    """A parameter of a Flax module; `axes` are the logical names of its dimensions, for `sharding/`."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(init(rngs.params(), tuple(shape), dtype), axes=tuple(axes))


def fan_in(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zero mean and variance 1 / shape[-1], so that `linear` keeps the scale of its input.

    Each value is a 32-bit hash of its index (the finaliser of MurmurHash3): random enough for weights that are
    never trained, and an order of magnitude cheaper on CPU than a random generator, which matters at 8 B of them.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    h = (index ^ jax.random.bits(key)) * jnp.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    uniform = (h ^ (h >> 16)).astype(jnp.float32) * 2.0**-32 - 0.5  # variance 1/12
    return (uniform * (12.0 / shape[-1]) ** 0.5).astype(dtype)


def ones(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    del key
    return jnp.ones(shape, dtype)


def zeros(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    del key
    return jnp.zeros(shape, dtype)

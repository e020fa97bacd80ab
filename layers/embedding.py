"""Token ids to vectors, and vectors to logits."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.linear import Weight, linear


def embed(token_ids: Int[Array, " T"], table: Weight, scale: float = 1.0) -> Float[Array, "T D"]:
    """Rows of `table` [V, D], times `scale`, which is first rounded to the table's dtype as Hugging Face does."""
    x = jnp.take(table, token_ids, axis=0, mode="clip")
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`; x itself when cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def unembed(x: Float[Array, "R D"], table: Weight, cap: float | None = None) -> Float[Array, "R V"]:
    """Logits in float32, soft-capped when the model asks for it."""
    return soft_cap(linear(x, table, out_dtype=jnp.float32), cap)

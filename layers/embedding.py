"""Token ids to vectors, and vectors to logits."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.linear import Weight, linear
from jaxserve.sharding.collectives import all_reduce, first_of_rank, num_ranks


def embed(token_ids: Int[Array, " T"], table: Weight, scale: float = 1.0) -> Float[Array, "T D"]:
    """Rows of `table` [V, D], times `scale`, which is first rounded to the table's dtype as Hugging Face does."""
    x = all_reduce(_rows_of_rank(table, token_ids))
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def _rows_of_rank(table: Weight, token_ids: Array) -> Array:
    """Rows of this rank's part of the table; zeros for the tokens of other ranks."""
    if num_ranks() == 1:
        return jnp.take(table, token_ids, axis=0, mode="clip")
    local = token_ids - first_of_rank(table.shape[0])
    x = jnp.take(table, local, axis=0, mode="clip")
    return jnp.where(((local >= 0) & (local < table.shape[0]))[:, None], x, jnp.zeros((), x.dtype))


def soft_cap(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`; x itself when cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def unembed(x: Float[Array, "R D"], table: Weight, cap: float | None = None) -> Float[Array, "R V"]:
    """Logits in float32, soft-capped when the model asks for it; on a mesh those of this rank's part of the table."""
    return soft_cap(linear(x, table, out_dtype=jnp.float32), cap)

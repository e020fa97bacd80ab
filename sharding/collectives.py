"""The collectives of a step. Without a mesh each of them is the identity, and costs nothing."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.sharding.mesh import FLAT


def axis_size(axis: str) -> int:
    """Ranks along an axis of the mesh that this function runs on; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def num_ranks() -> int:
    return axis_size("kv") * axis_size("tp")


def first_of_rank(size: int) -> int | Array:
    """Index of this rank's first element along an axis of which each rank has `size`."""
    return 0 if num_ranks() == 1 else jax.lax.axis_index(FLAT) * size


def all_reduce(x: Array) -> Array:
    """The sum of all ranks' `x`, on all of them."""
    return x if num_ranks() == 1 else jax.lax.psum(x, FLAT)


def all_gather_rows(x: Array) -> Array:
    """All ranks' rows, one rank's after the other's, on all of them. For small arrays."""
    return x if num_ranks() == 1 else jax.lax.all_gather(x, FLAT, axis=0, tiled=True)


def exchange_columns_for_rows(x: Array) -> Array:
    """All columns of this rank's share of the rows, given this rank's columns of all rows: x [R, C] -> [R / n, n * C].

    R must be a multiple of the n ranks.
    """
    return x if num_ranks() == 1 else jax.lax.all_to_all(x, FLAT, split_axis=0, concat_axis=1, tiled=True)


def rows_of_rank(x: Array) -> Array:
    """This rank's share of rows that all ranks have: what `all_gather_rows` undoes."""
    size = x.shape[0] // num_ranks()
    return x if num_ranks() == 1 else jax.lax.dynamic_slice_in_dim(x, first_of_rank(size), size)


def first_largest(x: Array, column: int | Array) -> Array:
    """Index of the first largest entry of each row over all ranks' columns, i32 [R].

    Args:
        x: f32 [R, C]. column: index of this rank's first one among all.
    """
    top = jnp.max(x, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    best = jnp.min(jnp.where(x == top, ids, x.shape[1] - 1), axis=-1)  # XLA's argmax is 6 times slower on CPU
    if num_ranks() == 1:
        return best
    found = jnp.stack([jax.lax.bitcast_convert_type(top[:, 0], jnp.int32), best + column], axis=-1)
    tops, places = jnp.moveaxis(jax.lax.all_gather(found, FLAT), -1, 0)  # [n, R] each
    tops = jax.lax.bitcast_convert_type(tops, jnp.float32)
    return jnp.min(jnp.where(tops == jnp.max(tops, axis=0), places, jnp.iinfo(jnp.int32).max), axis=0)

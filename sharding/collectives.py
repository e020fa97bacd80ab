"""The collectives of a step. Without a mesh each of them is the identity, and costs nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Num, Shaped

from jaxserve.sharding.mesh import FLAT


def axis_size(axis: str) -> int:
    """Ranks along an axis of the mesh that this function runs on; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def num_ranks() -> int:
    """Ranks of the mesh that this function runs on, over all axes; 1 without a mesh."""
    return axis_size("kv") * axis_size("tp")


def first_of_rank(size: int) -> int | Int[Array, ""]:
    """Index of this rank's first element along an axis of which each rank has `size`."""
    return 0 if num_ranks() == 1 else jax.lax.axis_index(FLAT) * size


def all_reduce(x: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """The sum of all ranks' `x`, on all of them."""
    return x if num_ranks() == 1 else jax.lax.psum(x, FLAT)


def share_rows(
    function: Callable[..., Any], columns: Num[Array, "R C"], num_columns: int, *rows: Shaped[Array, "R ..."]
) -> Any:
    """`function(columns, *rows)`, for which each rank computes its share of the rows: one all_to_all of `columns`.

    Args:
        columns: those that this rank has of `num_columns`.
        rows: what all ranks have.
    """
    if num_ranks() == 1:
        return function(columns, *rows)
    num_rows, missing = columns.shape[0], -columns.shape[0] % num_ranks()

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))

    def mine(x: Array) -> Array:
        size = x.shape[0] // num_ranks()
        return jax.lax.dynamic_slice_in_dim(x, first_of_rank(size), size)

    whole = jax.lax.all_to_all(padded(columns), FLAT, split_axis=0, concat_axis=1, tiled=True)[:, :num_columns]
    found = function(whole, *(mine(padded(x)) for x in rows))
    return jax.tree.map(lambda x: jax.lax.all_gather(x, FLAT, axis=0, tiled=True)[:num_rows], found)


def best_of_ranks(values: Float[Array, " R"], ids: Int[Array, " R"], nan_id: int) -> Int[Array, " R"]:
    """Among one id of each rank that with the largest value, the smallest such id; `nan_id` if a value is NaN."""
    if num_ranks() == 1:
        return ids
    mine = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), ids])
    bits, ids = jnp.moveaxis(jax.lax.all_gather(mine, FLAT), 1, 0)  # [n, R] each
    values = jax.lax.bitcast_convert_type(bits, jnp.float32)
    is_best = values == jnp.max(values, axis=0, keepdims=True)
    return jnp.min(jnp.where(is_best, ids, nan_id), axis=0)

"""How a parameter gets its place on the mesh: rows in the order of the ranks, padded with zeros where counts do not
divide, each rank's part straight onto its device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxserve.sharding.heads import NONE, HeadLayout, rows_of_heads
from jaxserve.sharding.mesh import bytes_per_device, put
from jaxserve.sharding.rules import Axes, spec_of


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a leaf goes, and the order of its rows there."""

    sharding: Sharding | None = None  # None = the default device
    order: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)  # dimension -> its rows, NONE = zeros

    def shape(self, leaf: Any) -> tuple[int, ...]:
        """That a leaf of this shape has on all its devices together, padding included."""
        return tuple(len(self.order[i]) if i in self.order else size for i, size in enumerate(leaf.shape))

    def bytes_per_device(self, leaf: Any) -> int:
        """What a leaf of this shape and dtype takes on each device."""
        return bytes_per_device(self.shape(leaf), leaf.dtype, self.sharding)

    def put(self, leaf: Any) -> jax.Array:
        """The leaf on its devices; it may keep the memory of a numpy array."""
        take = _take_numpy if isinstance(leaf, np.ndarray) else _take
        for axis, rows in self.order.items():
            leaf = take(leaf, rows, axis)
        return put(leaf, self.sharding)


def _take_numpy(leaf: Any, rows: np.ndarray, axis: int) -> np.ndarray:
    out = np.take(leaf, np.maximum(rows, 0), axis)
    np.moveaxis(out, axis, 0)[rows == NONE] = 0
    return out


def _take(leaf: Any, rows: np.ndarray, axis: int) -> jax.Array:
    return jnp.take(leaf, np.where(rows == NONE, leaf.shape[axis], rows), axis, mode="fill", fill_value=0)


def placement(
    shape: tuple[int, ...], axes: Axes, mesh: Mesh | AbstractMesh, heads: HeadLayout, head_dim: int
) -> Placement:
    """The place of a leaf of this shape, with these logical axes."""
    order = {}
    for dimension, (size, name) in enumerate(zip(shape, axes, strict=True)):
        rows = _order(name, size, mesh, heads, head_dim)
        if rows is not None and not np.array_equal(rows, np.arange(size)):
            order[dimension] = rows
    return Placement(NamedSharding(mesh, spec_of(axes)), order)


def _order(
    name: str | None, size: int, mesh: Mesh | AbstractMesh, heads: HeadLayout, head_dim: int
) -> np.ndarray | None:
    """All rows of a dimension, rank by rank; None where the dimension is not split."""
    shards = mesh.size
    if name in ("vocab", "mlp", "experts"):
        return _padded(size, shards)
    if name == "gate_up":
        gate = _padded(size // 2, shards).reshape(shards, -1)
        return np.concatenate([gate, np.where(gate == NONE, NONE, gate + size // 2)], axis=1).reshape(-1)
    if name == "heads":
        return rows_of_heads(heads.queries.reshape(-1), head_dim)
    if name == "qkv":
        num_kvs = heads.kvs.max() + 1
        q, kv = size - 2 * num_kvs * head_dim, num_kvs * head_dim
        queries = heads.queries.reshape(heads.queries.shape[0], -1)
        starts = ((queries, 0), (heads.kvs, q), (heads.kvs, q + kv))
        return np.concatenate([rows_of_heads(ids, head_dim, first) for ids, first in starts], axis=1).reshape(-1)
    return None


def _padded(size: int, shards: int) -> np.ndarray:
    rows = np.arange(-(-size // shards) * shards)
    return np.where(rows < size, rows, NONE)

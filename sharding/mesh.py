"""The device mesh, and how a function is run on all of its ranks.

Axes: `"kv"` splits the pages of each sequence, `"tp"` the heads; everything else is split over both. Between the two
programs of a step (forward and sample) nothing is split that is not a parameter or a page.

How this works: a step function runs once on every rank under `jax.shard_map`, and sees that rank's part of each array.
Kernels are custom calls, which XLA cannot split by itself; and this way a step holds the collectives that its code
names (`jaxserve.sharding.collectives`) and no others.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

AXES = ("kv", "tp")
FLAT = ("tp", "kv")  # both as one: heads are split over tp first, then within kv
EVERYWHERE = PartitionSpec()


def make_mesh(kv_parallel_size: int, tensor_parallel_size: int, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The first `kv_parallel_size * tensor_parallel_size` devices as a mesh; None for one device, which needs none.

    Args:
        devices: None = those that there are.

    Raises:
        ValueError: there are not as many devices, or those of several processes are more.
    """
    size, devices = kv_parallel_size * tensor_parallel_size, devices or jax.devices()
    if size > len(devices):
        raise ValueError(
            f"kv_parallel_size {kv_parallel_size} x tensor_parallel_size {tensor_parallel_size} needs {size} devices, "
            f"got {len(devices)} ({devices[0].platform}); lower one of them (on CPU "
            f"JAX_NUM_CPU_DEVICES={size} makes as many)"
        )
    if size < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"kv_parallel_size {kv_parallel_size} x tensor_parallel_size {tensor_parallel_size} must be the number of "
            f"devices of all {jax.process_count()} processes, {len(devices)}, got {size}"
        )
    if size == 1:
        return None
    return Mesh(np.array(devices[:size]).reshape(kv_parallel_size, tensor_parallel_size), AXES)


def abstract_mesh(kv_parallel_size: int, tensor_parallel_size: int) -> AbstractMesh | None:
    """What `make_mesh` gives, without devices: for where parameters would go."""
    sizes = (kv_parallel_size, tensor_parallel_size)
    return None if sizes == (1, 1) else AbstractMesh(sizes, AXES)


def replicated(mesh: Mesh | None) -> Sharding | None:
    """The place of what all ranks have; None (the default device) without a mesh."""
    return None if mesh is None else NamedSharding(mesh, EVERYWHERE)


def put(tree: Any, place: Sharding | None) -> Any:
    """The leaves on their devices; they may keep the memory of numpy arrays. Each process puts what is on its own."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(tree, place, may_alias=True)
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, place, lambda index: leaf[index]), tree)


def placed(shapes: Any, specs: Any, mesh: Mesh | None) -> Any:
    """The shapes with their places on the mesh; without one, that is the default device."""
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def bytes_per_device(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None) -> int:
    """What an array of this shape and dtype, padding included, takes on each device; None = it is on one device."""
    return math.prod(shape if sharding is None else sharding.shard_shape(shape)) * dtype.itemsize


def on_ranks(mesh: Mesh | None, function: Callable, specs: Callable[[], tuple[Any, Any]]) -> Callable:
    """`function` run by every rank on its parts of the arguments; `function` itself without a mesh.

    `specs` gives where the arguments and the results are.
    """
    if mesh is None:
        return function
    in_specs, out_specs = specs()
    # Results that every rank computes alike are not checked: kernels say nothing about that
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

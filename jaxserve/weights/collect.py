"""Leaves, as they arrive on their devices, into the form in which a backend runs the layers."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.weights.checkpoint import LeafPath


def as_tuple(leaves: Iterable[tuple[LeafPath, Any]], num_layers: int) -> dict[str, Any]:
    """Parameters whose layers are a tuple with one dict a layer."""
    params: dict[str, Any] = {"layers": tuple({} for _ in range(num_layers))}
    for path, leaf in leaves:
        owner = params["layers"][path[1]] if len(path) == 3 else params
        owner[path[-1]] = leaf
    return params


def as_stacks(leaves: Iterable[tuple[LeafPath, Any]], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Parameters whose layers are stacks `[L_kind, ...]`, sharded as the leaves are. Each stack is allocated once and
    filled in place, so that the device holds the model and one leaf."""
    params: dict[str, Any] = {"layers": {kind: {} for kind in dict.fromkeys(kinds)}}
    for path, leaf in leaves:
        if len(path) == 1:
            params[path[0]] = leaf
            continue
        kind = kinds[path[1]]
        stacks, index = params["layers"][kind], kinds[: path[1]].count(kind)
        stack = stacks.pop(path[2], None)
        if stack is None:
            stack = jax.tree.map(functools.partial(_empty_stack, depth=kinds.count(kind)), leaf)
        stacks[path[2]] = jax.tree.map(functools.partial(_set_layer, index=index), stack, leaf)
    return params


def _empty_stack(part: jax.Array, depth: int) -> jax.Array:
    sharding = part.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jnp.zeros((depth, *part.shape), part.dtype, device=sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, leaf: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, leaf, index, 0)

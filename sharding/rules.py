"""From the logical names of a parameter's dimensions to its place on the mesh: the one table."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxserve.sharding.mesh import FLAT

Axes = Sequence[str | None]  # one name a dimension; None = not split

RULES: Mapping[str | None, tuple[str, ...]] = {
    None: (),
    "embed": (),
    "qkv": ("tp",),  # rows of q, k and v by head
    "heads": FLAT,  # query heads, after attention
    "gate_up": FLAT,  # rows of gate, then those of up
    "mlp": FLAT,
    "experts": FLAT,
    "vocab": FLAT,
    "pages": ("kv",),
    "kv_heads": ("tp",),
}


def spec_of(axes: Axes) -> PartitionSpec:
    """Where each dimension goes.

    Raises:
        ValueError: a name without a rule, or two dimensions that would be split over the same axis of the mesh.
    """
    unknown = [name for name in axes if name not in RULES]
    if unknown:
        raise ValueError(f"logical axes must be among {[name for name in RULES if name]}, got {unknown}")
    places = [RULES[name] for name in axes]
    taken = [axis for place in places for axis in place]
    if len(taken) != len(set(taken)):
        raise ValueError(f"logical axes {tuple(axes)} collide: they ask for mesh axes {taken}; name one of them None")
    return PartitionSpec(*(place or None for place in places))


def param_specs(params: Any, axes: Mapping[str, Axes]) -> Any:
    """The specs of parameters in any form: one dict a layer or stacks, floats or 8 bits. `axes` by a leaf's name."""

    def spec(path: tuple, leaf: jax.Array) -> PartitionSpec:
        name = next(key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey))
        named = list(axes[name])
        if path[-1] == jax.tree_util.GetAttrKey("scale"):  # of an Int8Weight: one for each output
            named.pop()
        return spec_of([None] * (leaf.ndim - len(named)) + named)

    return jax.tree_util.tree_map_with_path(spec, params)


def kv_specs(kv: Any) -> Any:
    """The specs of KV caches, by the names of their fields: k and v [L, P, page_size, K, H], meta [L, P, K, M], mass
    [L, P, K, page_size], carry [L, Z, K, C], and scales [L, K].
    """
    pages, heads = (None, "pages", None, "kv_heads", None), (None, "kv_heads")
    beside = (None, "pages", "kv_heads", None)
    own = {"k": pages, "v": pages, "meta": beside, "mass": beside, "carry": (None, None, "kv_heads", None)}
    return jax.tree_util.tree_map_with_path(lambda path, _: spec_of(own.get(path[-1].name, heads)), kv)

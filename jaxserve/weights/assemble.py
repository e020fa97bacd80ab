"""Checkpoint tensors into the model's fused parameters, one leaf at a time.

A leaf (say layer 3's qkv) gets a host buffer, its parts are read into place, and it goes to its device at once: the
host never holds more than the leaf in hand. Names and shapes are all checked before anything is read.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.exceptions import WeightsError
from jaxserve.models import Model, Target
from jaxserve.weights.progress import Progress, no_progress
from jaxserve.weights.source import Source, listed

Path = tuple[Any, ...]  # of a leaf: ("layers", 3, "qkv") or ("embed",)
Quantize = Callable[[Path, jax.Array], Any]
_ALIGNMENT_BYTES = 64  # XLA's on CPU: an aligned host buffer becomes an array without a copy


def assemble(
    source: Source,
    model: Model,
    dtype: DTypeLike,
    *,
    stacked: bool = False,
    shardings: Any = None,
    quantize: Quantize | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """The model's parameters on device.

    Args:
      stacked: layers as one stack a leaf for each layer kind (filled in place), else a tuple of dicts.
      shardings: a tree like `model.abstract_params`, of shardings; None = the default device.
      quantize: (path of a leaf, array on device) -> what to keep in its place.
      progress: wraps the iteration over leaves.

    Raises:
      WeightsError: tensors missing, extra or misshapen, by name.
    """
    abstract = leaves_of(model.abstract_params(dtype))
    places = leaves_of(shardings) if shardings is not None else dict.fromkeys(abstract)
    parts = _match(source, model, abstract)
    sink: _Tuple | _Stacks = _Stacks(model) if stacked else _Tuple(model)
    for path in progress(list(abstract), total_bytes=sum(map(_num_bytes, abstract.values()))):
        host = _aligned(abstract[path].shape, dtype)
        for target, name in parts[path]:
            source.read_into(name, host[target.index(model.config)])
        array = jax.device_put(host, places[path], may_alias=True)
        del host
        sink.put(path, array if quantize is None else quantize(path, array), places[path])
    return sink.params


def leaves_of(params: Any) -> dict[Path, Any]:
    """path -> leaf of parameters in per-layer form, in the model's order."""
    outer = {(name,): leaf for name, leaf in params.items() if name != "layers"}
    layers = enumerate(params["layers"])
    return outer | {("layers", i, name): leaf for i, layer in layers for name, leaf in layer.items()}


def _match(source: Source, model: Model, abstract: dict[Path, Any]) -> dict[Path, list[tuple[Target, str]]]:
    """The tensors that make up each leaf, all of the right shape and none left over."""
    parts: dict[Path, list[tuple[Target, str]]] = {path: [] for path in abstract}
    extra, misshapen = [], []
    for name, shape in source.shapes.items():
        try:
            target = model.translate(name)
        except KeyError:
            extra.append(name)
            continue
        if target is None:
            continue
        if target.path not in parts:
            extra.append(name)
            continue
        expected = _part_shape(abstract[target.path].shape, target, model)
        if shape != expected:
            misshapen.append(f"{name} must have shape {expected}, got {shape}")
        parts[target.path].append((target, name))
    if misshapen:
        raise WeightsError(f"{source.name}: {listed(misshapen)}; config and weights do not belong together")
    missing = _missing(parts, abstract, model)
    if missing:
        raise WeightsError(f"{source.name}: missing tensors: {listed(missing)}; the checkpoint is incomplete")
    if extra:
        architecture = model.config.architecture
        raise WeightsError(f"{source.name}: tensors that {architecture} does not have: {listed(extra)}")
    return parts


def _part_shape(leaf: tuple[int, ...], target: Target, model: Model) -> tuple[int, ...]:
    return np.broadcast_to(np.int8(0), leaf)[target.index(model.config)].shape


def _missing(parts: dict[Path, list], abstract: dict[Path, Any], model: Model) -> list[str]:
    """Names of what leaves lack. A name is taken from another layer that has it, else it is the leaf's own path."""
    templates: dict[tuple, str] = {}  # (leaf name, part) -> name with {} for the layer
    for path, found in parts.items():
        for target, name in found:
            templates.setdefault((path[-1], target.part), name.replace(f".{path[1]}.", ".{}.", 1) if path[1:] else name)
    missing = []
    for path, leaf in abstract.items():
        present = {target.part: _part_shape(leaf.shape, target, model) for target, _ in parts[path]}
        if sum(map(math.prod, present.values())) == math.prod(leaf.shape):
            continue
        lacking = [
            name for (leaf_name, part), name in templates.items() if leaf_name == path[-1] and part not in present
        ]
        missing += [name.format(path[1]) for name in lacking] or [f"parts of {'.'.join(map(str, path))}"]
    return missing


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


class _Tuple:
    """Collects leaves as a tuple with one dict a layer."""

    def __init__(self, model: Model):
        self.params: dict[str, Any] = {"layers": tuple({} for _ in range(model.config.num_layers))}

    def put(self, path: Path, leaf: Any, sharding: Any) -> None:
        layer = self.params["layers"][path[1]] if len(path) == 3 else self.params
        layer[path[-1]] = leaf


class _Stacks:
    """Collects leaves as stacks `[L_kind, ...]`, each allocated once and filled in place."""

    def __init__(self, model: Model):
        self._kinds = model.layer_kinds
        self.params: dict[str, Any] = {"layers": {kind: {} for kind in dict.fromkeys(self._kinds)}}

    def put(self, path: Path, leaf: Any, sharding: Any) -> None:
        if len(path) == 1:
            self.params[path[0]] = leaf
            return
        kind = self._kinds[path[1]]
        index = self._kinds[: path[1]].count(kind)
        stacks, name = self.params["layers"][kind], path[2]
        if name not in stacks:
            depth = self._kinds.count(kind)
            stacks[name] = jax.tree.map(lambda part: _empty_stack(part, depth, sharding), leaf)
        stacks[name] = jax.tree.map(lambda stack, part: _set_layer(stack, part, index), stacks[name], leaf)


def _empty_stack(leaf: jax.Array, depth: int, sharding: Any) -> jax.Array:
    over_layers = sharding
    if isinstance(sharding, NamedSharding):
        over_layers = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jnp.zeros((depth, *leaf.shape), leaf.dtype, device=over_layers)


@jax.jit(donate_argnums=0)
def _set_layer(stack: jax.Array, leaf: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, leaf, index, 0)

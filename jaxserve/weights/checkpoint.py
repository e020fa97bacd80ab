"""What every checkpoint format offers, and what those with named tensors share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.exceptions import WeightsError
from jaxserve.json_file import read_json as read_json
from jaxserve.models import Model, Target
from jaxserve.sharding.placement import Placement
from jaxserve.tokenizer import Tokenizer

LeafPath = tuple[Any, ...]  # ("embed",) or ("layers", 3, "qkv")
_ALIGNMENT_BYTES = 64  # XLA's on CPU: an aligned host buffer becomes an array without a copy


class Checkpoint(ABC):
    """An opened checkpoint; opening reads headers only.

    `config` is a Hugging Face config.json as a dict, `generation_config` the like (may be empty), `name` is for people.
    """

    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None where a model does without (dummies)."""

    @abstractmethod
    def leaves(
        self, model: Model, dtype: DTypeLike, places: dict[LeafPath, Placement]
    ) -> Iterator[tuple[LeafPath, jax.Array]]:
        """The parameters' leaves one after the other, each on its device, in the model's order.

        Args:
          places: path -> where the leaf goes.

        Raises:
          WeightsError: tensors missing, extra or misshapen, by name, before any is read.
        """


class TensorCheckpoint(Checkpoint):
    """A checkpoint of tensors under their Hugging Face names: `shapes` maps names to shapes.

    A leaf (say layer 3's qkv) gets a host buffer, its parts are read into place, and it goes to its device at once: the
    host never holds more than the leaf in hand.
    """

    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fills `out`, contiguous, of the tensor's shape and any float dtype."""

    def leaves(
        self, model: Model, dtype: DTypeLike, places: dict[LeafPath, Placement]
    ) -> Iterator[tuple[LeafPath, jax.Array]]:
        abstract = leaves_of(model.abstract_params(dtype))
        parts = _match(self, model, abstract)
        for path, leaf in abstract.items():
            host = _aligned(leaf.shape, dtype)
            for target, name in parts[path]:
                self.read_into(name, host[target.index(model.config)])
            yield path, places[path].put(host)
            del host  # before the next is made


def leaves_of(params: Any) -> dict[LeafPath, Any]:
    """path -> leaf of parameters in per-layer form, in the model's order."""
    outer = {(name,): leaf for name, leaf in params.items() if name != "layers"}
    layers = enumerate(params["layers"])
    return outer | {("layers", i, name): leaf for i, layer in layers for name, leaf in layer.items()}


def num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def listed(names: Iterable[str], limit: int = 6) -> str:
    """`a, b, c and 12 more`."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


Parts = dict[LeafPath, list[tuple[Target, str]]]  # the tensors that make up each leaf


def _match(checkpoint: TensorCheckpoint, model: Model, abstract: dict[LeafPath, Any]) -> Parts:
    """Every tensor in its place, all of the right shape and none left over."""
    parts: Parts = {path: [] for path in abstract}
    extra, misshapen = [], []
    for name, shape in checkpoint.shapes.items():
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
        raise WeightsError(f"{checkpoint.name}: {listed(misshapen)}; config and weights do not belong together")
    if missing := _missing(parts, abstract, model):
        raise WeightsError(f"{checkpoint.name}: missing tensors: {listed(missing)}; the checkpoint is incomplete")
    if extra:
        architecture = model.config.architecture
        raise WeightsError(f"{checkpoint.name}: tensors that {architecture} does not have: {listed(extra)}")
    return parts


def _part_shape(leaf: tuple[int, ...], target: Target, model: Model) -> tuple[int, ...]:
    return np.broadcast_to(np.int8(0), leaf)[target.index(model.config)].shape


def _missing(parts: Parts, abstract: dict[LeafPath, Any], model: Model) -> list[str]:
    """What leaves lack, by the name that the same part has in another layer, else by the path of the leaf."""
    names: dict[tuple[str, Any], str] = {}  # (leaf, part) -> name with {} for the layer
    for path, found in parts.items():
        for target, name in found if len(path) == 3 else ():
            names.setdefault((path[2], target.part), name.replace(f".{path[1]}.", ".{}.", 1))
    missing = []
    for path, leaf in abstract.items():
        present = {target.part: math.prod(_part_shape(leaf.shape, target, model)) for target, _ in parts[path]}
        if sum(present.values()) == math.prod(leaf.shape):
            continue
        lacking = [name for (leaf_name, part), name in names.items() if leaf_name == path[-1] and part not in present]
        missing += [name.format(path[1]) for name in lacking] or [f"those of {'.'.join(map(str, path))}"]
    return missing


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[start : start + size].view(dtype).reshape(shape)

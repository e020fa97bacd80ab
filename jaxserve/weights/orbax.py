"""Orbax checkpoints: what `jaxserve convert` writes, restored straight into their final sharding.

A folder holds config.json, generation_config.json, the tokenizer's files, and `params`, one Orbax checkpoint of the
fused parameters: {"embed", "final_norm", "lm_head", "layers": {"0": {"qkv", ...}, ...}}. It is restored layer by layer,
so that the host holds a layer beyond what is on the devices.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxserve.exceptions import WeightsError
from jaxserve.models import Model
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.checkpoint import Checkpoint, LeafPath, leaves_of, listed, read_json

_PARAMS = "params"


def is_orbax(folder: Path) -> bool:
    return (folder / _PARAMS).is_dir()


class OrbaxCheckpoint(Checkpoint):
    """A folder that `save` wrote.

    Raises:
      WeightsError: no config.json.
    """

    def __init__(self, folder: Path):
        self._folder, self.name = folder.absolute(), folder.name
        self.config = read_json(folder / "config.json", required=True)
        self.generation_config = read_json(folder / "generation_config.json")

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_dir(self._folder) if (self._folder / "tokenizer.json").is_file() else None

    def leaves(
        self, model: Model, dtype: DTypeLike, places: dict[LeafPath, Any]
    ) -> Iterator[tuple[LeafPath, jax.Array]]:
        abstract = leaves_of(model.abstract_params(dtype))
        with _checkpointer() as checkpointer:
            self._check(checkpointer, abstract)
            groups: dict[LeafPath, dict[LeafPath, Any]] = {}
            for path, leaf in abstract.items():
                groups.setdefault(path[:2], {})[path] = leaf
            for group in groups.values():
                yield from self._restore(checkpointer, group, places)

    def _check(self, checkpointer: Any, abstract: dict[LeafPath, Any]) -> None:
        """Names and shapes, before anything is read."""
        try:
            stored = _flat(checkpointer.metadata(self._folder / _PARAMS).item_metadata.tree)
        except (ValueError, OSError, KeyError) as error:
            raise WeightsError(f"{self._folder / _PARAMS} is damaged or truncated: {error}") from error
        expected = {_key(path): tuple(leaf.shape) for path, leaf in abstract.items()}
        if missing := [name for name in expected if name not in stored]:
            raise WeightsError(f"{self.name}: missing tensors: {listed(missing)}; the checkpoint is incomplete")
        if extra := [name for name in stored if name not in expected]:
            raise WeightsError(f"{self.name}: tensors that the model does not have: {listed(extra)}")
        wrong = [f"{n} must have shape {s}, got {stored[n]}" for n, s in expected.items() if stored[n] != s]
        if wrong:
            raise WeightsError(f"{self.name}: {listed(wrong)}; config and weights do not belong together")

    def _restore(
        self, checkpointer: Any, group: dict[LeafPath, Any], places: dict[LeafPath, Any]
    ) -> Iterator[tuple[LeafPath, jax.Array]]:
        import orbax.checkpoint as ocp

        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        item, how = {}, {}
        for path, leaf in group.items():
            sharding = places[path] or default
            _set(item, path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
            _set(how, path, ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=sharding, global_shape=leaf.shape))
        args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        try:
            restored = checkpointer.restore(self._folder / _PARAMS, args=args)
        except (ValueError, OSError) as error:
            raise WeightsError(f"{self._folder / _PARAMS} is damaged or truncated: {error}") from error
        for path in group:
            yield path, _pop(restored, path)


def save(params: dict[str, Any], checkpoint: Checkpoint, path: Path) -> None:
    """Writes `params` (per-layer form) as an Orbax checkpoint, with the configuration and tokenizer of `checkpoint`.

    Raises:
      WeightsError: `path` exists.
    """
    import orbax.checkpoint as ocp

    if path.exists():
        raise WeightsError(f"{path} exists; convert into a new folder")
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(checkpoint.config, indent=2))
    if checkpoint.generation_config:
        (path / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2))
    if (tokenizer := checkpoint.tokenizer()) is not None:
        tokenizer.save(path)
    layers = {str(i): layer for i, layer in enumerate(params["layers"])}
    with _checkpointer() as checkpointer:
        checkpointer.save(path.absolute() / _PARAMS, args=ocp.args.PyTreeSave({**params, "layers": layers}))


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # here, as the import takes seconds

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(save_concurrent_gb=1, restore_concurrent_gb=1))


def _key(path: LeafPath) -> str:
    return ".".join(map(str, path))


def _flat(tree: Any, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """ "layers.3.qkv" -> shape."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = tuple(value.shape)
    return found


def _set(tree: dict, path: LeafPath, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(str(name), {})
    tree[path[-1]] = value


def _pop(tree: dict, path: LeafPath) -> Any:
    for name in path[:-1]:
        tree = tree[str(name)]
    return tree.pop(path[-1])

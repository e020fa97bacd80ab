"""Orbax checkpoints: what `jaxserve convert` writes, restored straight into their final sharding.

A folder holds config.json, generation_config.json, the tokenizer's files, and under `params` one Orbax PyTree
checkpoint a layer (`layer_0`, ...) and one for what is outside the layers (`outer`), with our names of the leaves.
They are written layer by layer: Orbax keeps copies of all that it writes until the end, so that one checkpoint of
everything would take the host memory of two models. They are read leaf by leaf.
"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxserve.exceptions import WeightsError
from jaxserve.models import Model
from jaxserve.sharding.placement import Placement
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
        self, model: Model, dtype: DTypeLike, places: dict[LeafPath, Placement]
    ) -> Iterator[tuple[LeafPath, jax.Array]]:
        abstract = leaves_of(model.abstract_params(dtype))
        with _checkpointer() as checkpointer:
            self._check(checkpointer, _grouped(abstract.items()))
            for path, leaf in abstract.items():
                yield path, self._restore(checkpointer, path, leaf, places[path])

    def _check(self, checkpointer: Any, groups: "_Groups") -> None:
        """Names and shapes, before anything is read."""
        stored, expected = {}, {}
        for name, group in groups.items():
            expected |= {f"{name}.{path[-1]}": tuple(leaf.shape) for path, leaf in group.items()}
            stored |= {f"{name}.{leaf}": shape for leaf, shape in self._shapes(checkpointer, name).items()}
        if missing := [name for name in expected if name not in stored]:
            raise WeightsError(f"{self.name}: missing tensors: {listed(missing)}; the checkpoint is incomplete")
        if extra := [name for name in stored if name not in expected]:
            raise WeightsError(f"{self.name}: tensors that the model does not have: {listed(extra)}")
        wrong = [f"{n} must have shape {s}, got {stored[n]}" for n, s in expected.items() if stored[n] != s]
        if wrong:
            raise WeightsError(f"{self.name}: {listed(wrong)}; config and weights do not belong together")

    def _shapes(self, checkpointer: Any, name: str) -> dict[str, tuple[int, ...]]:
        folder = self._folder / _PARAMS / name
        if not folder.is_dir():
            return {}
        with _damage_named(folder):
            tree = checkpointer.metadata(folder).item_metadata.tree
            return {leaf: tuple(value.shape) for leaf, value in tree.items()}

    def _restore(self, checkpointer: Any, path: LeafPath, leaf: jax.ShapeDtypeStruct, place: Placement) -> jax.Array:
        """One leaf at a time: after an error Orbax leaves the reads of its siblings behind, unfinished.

        Where each device needs rows that lie apart in the file, the leaf goes through the host.
        """
        import orbax.checkpoint as ocp

        sharding = place.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        how = ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=sharding, global_shape=leaf.shape)
        if place.order:
            how = ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        args = ocp.args.PyTreeRestore({path[-1]: leaf}, restore_args={path[-1]: how}, partial_restore=True)
        folder = self._folder / _PARAMS / _group_name(path)
        with _damage_named(folder):
            restored = checkpointer.restore(folder, args=args)[path[-1]]
        return place.put(restored) if place.order else restored


def save(leaves: Iterable[tuple[LeafPath, jax.Array]], checkpoint: Checkpoint, path: Path) -> None:
    """Writes leaves, in the model's order, as an Orbax checkpoint, with configuration and tokenizer of `checkpoint`.

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
    with _checkpointer() as checkpointer:
        for name, group in itertools.groupby(leaves, key=lambda leaf: _group_name(leaf[0])):
            tree = {path[-1]: leaf for path, leaf in group}
            checkpointer.save(path.absolute() / _PARAMS / name, args=ocp.args.PyTreeSave(tree))


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # here, as the import takes seconds

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


_Groups = dict[str, dict[LeafPath, Any]]  # "outer", "layer_0", ... -> its leaves


def _group_name(path: LeafPath) -> str:
    return "outer" if len(path) == 1 else f"layer_{path[1]}"


def _grouped(leaves: Iterable[tuple[LeafPath, Any]]) -> _Groups:
    groups: _Groups = {}
    for path, leaf in leaves:
        groups.setdefault(_group_name(path), {})[path] = leaf
    return groups


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises plain Exception, with a page of text
        raise WeightsError(f"{folder} is damaged or truncated: {str(error).partition('\n')[0][:300]}") from error

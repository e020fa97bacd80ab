"""Hugging Face folders: config.json, one or many safetensors files, generation_config.json, tokenizer."""

from pathlib import Path

import numpy as np
import safetensors

from jaxserve.exceptions import WeightsError
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.checkpoint import TensorCheckpoint, listed, read_json

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint(TensorCheckpoint):
    """A folder as `save_pretrained` writes it.

    Raises:
      WeightsError: no config.json, no safetensors, a damaged or truncated file, tensors that are not floats.
    """

    def __init__(self, folder: Path, *, name: str | None = None):
        self._folder = folder
        self.name = name or folder.name
        self.config = read_json(folder / "config.json", required=True)
        self.generation_config = read_json(folder / "generation_config.json")
        self._files, self._owners, self.shapes = {}, {}, {}
        for file_name in _weight_files(folder):
            self._add(folder / file_name)

    def _add(self, path: Path) -> None:
        try:
            self._files[path] = safetensors.safe_open(path, framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged or truncated ({error}); download it again") from error
        for name in self._files[path].keys():  # noqa: SIM118
            view = self._files[path].get_slice(name)
            if view.get_dtype() not in _FLOATS:
                raise WeightsError(
                    f"{path}: tensor {name} is {view.get_dtype()}; jaxserve reads {', '.join(_FLOATS)}. Use a "
                    "checkpoint that is not quantised"
                )
            self._owners[name] = path
            self.shapes[name] = tuple(view.get_shape())

    def read_into(self, name: str, out: np.ndarray) -> None:
        out[...] = self._files[self._owners[name]].get_tensor(name)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_dir(self._folder)


def _indexed_files(folder: Path) -> list[str]:
    """The files that the index names; all lie in the folder itself."""
    weight_map = read_json(folder / _INDEX).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{folder / _INDEX}: weight_map must be an object, got {weight_map!r:.80}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise WeightsError(
                f"{folder / _INDEX}: weight_map must give a file of the same folder for {tensor:.80}, got {name!r:.80}"
            )
    return sorted(set(weight_map.values()))


def _weight_files(folder: Path) -> list[str]:
    """Names of the folder's safetensors files: those of the index, else model*.safetensors."""
    names = _indexed_files(folder) or sorted(path.name for path in folder.glob("model*.safetensors"))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise WeightsError(f"{folder}: files that {_INDEX} names are absent: {listed(absent)}; download them again")
    if names:
        return names
    pickles = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt*")])
    if pickles:
        raise WeightsError(
            f"{folder} holds pickled weights ({listed(pickles)}), which can run code when read; save the model as "
            "safetensors (save_pretrained does)"
        )
    raise WeightsError(f"{folder} has a config.json but no model.safetensors; the weights are elsewhere or pickled")

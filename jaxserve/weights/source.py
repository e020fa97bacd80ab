"""What every checkpoint format offers to the assembler."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.exceptions import WeightsError
from jaxserve.tokenizer import Tokenizer


class Source(ABC):
    """A checkpoint whose tensors are read one at a time, under their Hugging Face names.

    `config` is a Hugging Face config.json as a dict, `generation_config` the like (may be empty), `shapes` maps each
    tensor's name to its shape. Opening a source reads headers only.
    """

    name: str  # for people
    config: dict[str, Any]
    generation_config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fills `out`, of the tensor's shape and any float dtype."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None where a model can do without (dummies)."""


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if the file is absent and not required.

    Raises:
      WeightsError: absent though required, or not a JSON object.
    """
    if not path.is_file():
        if not required:
            return {}
        raise WeightsError(f"{path.parent} has no {path.name}, so it is not a model folder; give one that has")
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def listed(names: Iterable[str], limit: int = 6) -> str:
    """`a, b, c and 12 more`."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more

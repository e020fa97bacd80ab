"""JSON files of model folders."""

import json
from pathlib import Path
from typing import Any

from jaxserve.exceptions import WeightsError


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
    except (ValueError, RecursionError) as error:  # also of bytes that are no text, and of endless numbers
        raise WeightsError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value

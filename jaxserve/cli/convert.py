"""`jaxserve convert`: any checkpoint into Orbax."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[str, typer.Argument(help="A Hugging Face id or folder, or a .gguf file.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: auto, bfloat16, float16 or float32.")] = "auto",
) -> None:
    """Write a checkpoint as Orbax, which loads straight into place on any mesh."""
    from jaxserve import weights

    weights.convert(source, target, dtype=dtype)
    print(f"wrote {target}", flush=True)

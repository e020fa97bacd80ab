"""`jaxserve convert`: any checkpoint into Orbax."""

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.output import show


def convert(
    source: Annotated[str, typer.Argument(help="A Hugging Face id or folder, or a .gguf file.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: auto, bfloat16, float16 or float32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Write a checkpoint as Orbax. It loads straight into place on any mesh."""
    from jaxserve import weights

    folder = weights.convert(source, target, dtype=dtype)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    show({"source": source, "path": str(folder), "bytes": size}, "converted", as_json=as_json)

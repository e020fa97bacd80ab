"""`jaxserve calibrate`: what a policy of sparse attention must know of a model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.evaluate import passes, read_text
from jaxserve.cli.output import require_writable


def calibrate(
    model: Annotated[str, typer.Option(help="As for generate.")],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A text like those to come.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where to write what --sparse-attention takes.")],
    policy: Annotated[str, typer.Option(help="double_sparsity or kascade.")] = "double_sparsity",
    num_channels: Annotated[
        int | None,
        typer.Option(help="Channels that double_sparsity compares.  [default: an eighth of them]", show_default=False),
    ] = None,
    num_anchors: Annotated[int, typer.Option(min=1, help="Layers of kascade that choose pages.")] = 5,
    num_tokens: Annotated[int, typer.Option(min=512, help="Most tokens of the text that are read.")] = 131072,
) -> None:
    """Find what a policy of sparse attention must know of a model, by reading a text."""
    import jax.numpy as jnp

    from jaxserve import weights
    from jaxserve.evaluation.calibrate import calibrate as find

    require_writable(output)
    content, sizes = read_text(text), {"num_channels": num_channels, "num_anchors": num_anchors}
    with passes() as on_progress:
        loaded = weights.load(model, dtype=jnp.bfloat16, progress=False)
        if loaded.tokenizer is None:
            raise ValueError(f"model must come with a tokenizer, got {model}")
        token_ids = loaded.tokenizer.encode(content)[:num_tokens]
        found = find(loaded, policy, token_ids, **sizes, on_progress=on_progress)
    output.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"wrote {output}", flush=True)

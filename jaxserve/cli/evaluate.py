"""`jaxserve eval`: what sparse attention costs in quality."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli.output import readable


def evaluate(
    model: Annotated[str, typer.Option(help="As for generate.")],
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A text to be told again.")] = None,
    sparse_attention: Annotated[
        list[str] | None,
        typer.Option(
            help="As for generate; may be given several times.  [default: three policies, three budgets each]"
        ),
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each text.")] = 1024,
    num_needles: Annotated[int, typer.Option(min=0, help="Texts with one fact, and as many with four.")] = 4,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the KV cache.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare policies of sparse attention with dense attention, on needles and on the last quarter of --text."""
    from jaxserve.evaluation.compare import compare
    from jaxserve.layers import sparse

    policies = [sparse.resolve(wanted) for wanted in sparse_attention or defaults(num_tokens, page_size)]
    written = None if text is None else text.read_text(encoding="utf-8")
    sizes = {"num_tokens": num_tokens, "num_needles": num_needles, "page_size": page_size}
    rows = compare(model, policies, written, **sizes)
    if as_json:
        print(json.dumps(rows, indent=2), flush=True)
    else:
        columns(rows, f"{model}, {num_tokens} tokens")


def columns(rows: list[dict[str, Any]], title: str) -> None:
    """Prints a table with a line for each row."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        grid.add_row(*(readable(value) for value in row.values()))
    Console().print(grid)


def defaults(num_tokens: int, page_size: int) -> list[Any]:
    """Each policy with an eighth, a quarter and a half of the tokens."""
    budgets = [max(4 * page_size, num_tokens // share) for share in (8, 4, 2)]
    dynamic = [{"policy": name, "budget": budget} for name in ("quest", "lserve") for budget in budgets]
    return dynamic + [{"policy": "streaming_llm", "window": budget - 4} for budget in budgets]

"""`jaxserve eval`: what sparse attention costs in quality, and what it gains in speed."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.bench.plot import pyplot, require_drawable
from jaxserve.cli.output import progress, readable, require_writable

if TYPE_CHECKING:
    from jaxserve.evaluation.compare import Comparison

MEASURES = ("recall", "density", "s/token")


def evaluate(
    model: Annotated[
        str, typer.Option(help="As for generate, or retrieval: one made for looking up, in up to 131,072 tokens.")
    ],
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A text whose end is told again: its perplexity.")
    ] = None,
    sparse_attention: Annotated[
        list[str] | None,
        typer.Option(
            help="As for generate; may be given several times.  [default: three policies, three budgets each]"
        ),
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each text with its answer.")] = 1024,
    num_samples: Annotated[int, typer.Option(min=0, help="Texts of each task.")] = 4,
    task: Annotated[
        list[str] | None, typer.Option(help="A task; may be given several times.  [default: all of the model]")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the KV cache.")] = 16,
    speed: Annotated[bool, typer.Option(help="Time the decode of one sequence, too.")] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Draw accuracy against density and speed into this file. Extra [plot].")
    ] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the result to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare policies of sparse attention with dense attention, on tasks and on the end of --text.

    Tasks: needle (one fact among ordinary sentences), needle of 4, variable tracking, common words, frequent words; of
    the retrieval model lookup (a record every 32 tokens) and crowded lookup (every 4). A task counts where dense
    attention solves 95 %.
    """
    from jaxserve.evaluation.compare import compare
    from jaxserve.layers import sparse

    require_writable(output_json)
    if plot is not None:
        require_drawable(plot)
    policies = [sparse.resolve(wanted) for wanted in sparse_attention or defaults(num_tokens, page_size)]
    sizes = {"num_tokens": num_tokens, "num_samples": num_samples, "page_size": page_size}
    if not num_samples and text is None:
        raise ValueError("nothing to compare: give a --text, or --num-samples above 0")
    content = None if text is None else read_text(text)
    with passes() as on_progress:
        found = compare(model, policies, content, **sizes, tasks=task, speed=speed, on_progress=on_progress)
    result = {"model": model, **sizes, **found._asdict()}
    written = json.dumps(result, indent=2, ensure_ascii=False)
    if output_json is not None:
        output_json.write_text(written + "\n", encoding="utf-8")
    if as_json:
        print(written, flush=True)
    else:
        columns(found.rows, f"{model}, {num_tokens} tokens")
        for name, share in found.left_out.items():
            print(f"left out: {name}, of which dense attention solves {share:.0%}", file=sys.stderr)
    if plot is not None:
        draw(found, plot)


def columns(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Prints a table with a line for each row. Where it is too wide, names are broken but no numbers are."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    cells = [{name: readable(value) for name, value in row.items()} for row in rows]
    widths = {name: max(len(row[name]) for row in cells) for name in cells[0] if name != "policy"}
    numbers = (Column(name, min_width=width, overflow="fold") for name, width in widths.items())
    grid = Table(Column("policy", overflow="fold"), *numbers, title=title, title_justify="left", box=SIMPLE_HEAD)
    for row in cells:
        grid.add_row(*row.values())
    Console().print(grid)


def defaults(num_tokens: int, page_size: int) -> list[Any]:
    """Each policy with an eighth, a quarter and a half of the tokens."""
    budgets = [max(4 * page_size, num_tokens // share) for share in (8, 4, 2)]
    dynamic = [{"policy": name, "budget": budget} for name in ("quest", "lserve") for budget in budgets]
    return dynamic + [{"policy": "streaming_llm", "window": budget - 4} for budget in budgets]


def draw(found: "Comparison", file: Path) -> None:
    """What was found of quality, a row of axes each, against density and, where it was measured, seconds a token.

    Policies that differ in their fields alone are joined by a line.

    Raises:
        ValueError: there is nothing of quality to draw.
    """
    plt = pyplot()
    across = [name for name in ("density", "s/token") if name in found.rows[0]]
    series: dict[str, list[dict[str, Any]]] = {}
    for row in found.rows:
        tasks = [row[name] for name in row if name not in ("policy", "perplexity", "kl", *MEASURES)]
        named = row | ({"accuracy": sum(tasks) / len(tasks)} if tasks else {})
        series.setdefault(_without_fields(row["policy"]), []).append(named)
    down = [name for name in ("accuracy", "perplexity") if name in series["dense"][0]]
    if not down:
        raise ValueError("--plot has nothing to draw, as dense attention solves no task: give a --text, or other tasks")
    size = (6 * len(across), 4 * len(down))
    figure, grid = plt.subplots(len(down), len(across), figsize=size, layout="constrained", squeeze=False)
    for axes_of_row, y in zip(grid, down, strict=True):
        for axes, x in zip(axes_of_row, across, strict=True):
            for name, rows in series.items():
                points = sorted((row[x], row[y]) for row in rows)
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
            axes.set(xlabel=x, ylabel=y, **({"ylim": (-0.05, 1.05)} if y == "accuracy" else {}))
    grid[0][0].legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _without_fields(policy: str) -> str:
    """`decode Quest(layers=(0, None)), prefill StreamingLLM()` as `decode Quest, prefill StreamingLLM`."""
    while (less := re.sub(r"\([^()]*\)", "", policy)) != policy:
        policy = less
    return policy


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text: {error}") from error


@contextmanager
def passes() -> Iterator[Any]:
    """A bar on stderr, to be told how many passes are done and how many there are."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with progress(TextColumn("{task.description}"), *columns) as bar:
        task = bar.add_task("loading and reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

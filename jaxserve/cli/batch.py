"""`jaxserve batch`: a JSONL file of prompts in, a JSONL file of answers out."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.options import ENGINE_OPTIONS, ProfileOption, takes
from jaxserve.cli.output import how_to_install, progress

if TYPE_CHECKING:
    from jaxserve.batch import Totals


@takes(engine=ENGINE_OPTIONS)
def batch(
    engine: dict[str, Any],
    source: Annotated[Path, typer.Argument(help="JSONL file: prompts, messages or rows of OpenAI's batch API.")],
    target: Annotated[Path, typer.Argument(help="JSONL file to write: one line a row, in the same order.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the totals as JSON.")] = False,
    profile: ProfileOption = None,
) -> None:
    """Answer every row of a JSONL file. A bad row gets an error in its own line and stops no other.

    A row is for instance {"custom_id": "a", "prompt": "The sea is", "max_tokens": 16}; sampling options stand beside
    the prompt, and "messages" in place of "prompt" makes it a chat.
    """
    try:
        from jaxserve.batch import JsonLines, run_batch
    except ModuleNotFoundError as error:
        if error.name != "grain":
            raise
        raise ValueError(f"batch reads through Grain: {how_to_install('batch')}") from error
    rows = JsonLines(source)  # before the model, so that a wrong path is told at once
    with driver.start(engine) as llm, driver.profiled(llm, profile), _progress(len(rows)) as on_row:
        totals = run_batch(llm.llm_engine, rows, target, model_name=engine["model"], on_row=on_row)
    if as_json:
        print(json.dumps({"rows": totals.num_rows, "failed": totals.failed, **_tokens(totals)}))
    else:
        speed = f"{totals.generated_tokens} tokens in {totals.elapsed_s:.1f} s"
        print(f"{totals.num_rows} rows, {totals.failed} failed, {speed}")
    if totals.first_failure is not None:
        print(f"first failure: {totals.first_failure}", file=sys.stderr)


def _tokens(totals: "Totals") -> dict[str, float]:
    return {
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": totals.generated_tokens,
        "elapsed_s": totals.elapsed_s,
        "generated_tokens_per_s": totals.tokens_per_s,
    }


@contextmanager
def _progress(num_rows: int) -> Iterator[Callable[["Totals"], None]]:
    """A bar on stderr: rows done, tokens generated a second, time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with progress(*columns) as bar:
        task = bar.add_task("rows", total=num_rows, speed="")

        def on_row(totals: "Totals") -> None:
            bar.update(task, completed=totals.done, speed=f"{totals.tokens_per_s:.1f} tokens/s")

        yield on_row

"""`jaxserve batch`: JSONL files of prompts in, part files or one file of answers out."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.options import ENGINE_OPTIONS, ProfileOption, takes
from jaxserve.cli.output import progress
from jaxserve.exceptions import how_to_install

if TYPE_CHECKING:
    from jaxserve.batch import Totals

SOME_ROWS_FAILED = 3
PLAIN_INTERVAL_S = 10.0
CHANGES_ANSWERS = (
    "model",
    "tokenizer",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "load_format",
    "revision",
    "max_model_len",
)


@takes(engine=ENGINE_OPTIONS)
def batch(
    engine: dict[str, Any],
    source: Annotated[str, typer.Argument(metavar="IN", help="JSONL file, folder or glob; a path or a URL (gs://).")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL of part files, or one local .jsonl.")],
    num_shards: Annotated[
        int | None, typer.Option(min=1, help="Share the work between so many processes.  [default: JAX's processes]")
    ] = None,
    shard_index: Annotated[
        int | None, typer.Option(min=0, help="Which of them this is, from 0.  [default: JAX's process]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Makes rows without a seed of their own repeatable.")] = 0,
    part_rows: Annotated[int, typer.Option(min=1, help="Rows of a part file.")] = 256,
    window_rows: Annotated[int, typer.Option(min=1, help="Rows that are put in order together.")] = 4096,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away another job's results in OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the totals as JSON.")] = False,
    profile: ProfileOption = None,
) -> int:
    """Answer every row of JSONL files. A bad row gets an error in its own line and stops no other.

    A row is for instance {"custom_id": "a", "prompt": "The sea is", "max_tokens": 16}; sampling options stand beside
    the prompt, and "messages" in place of "prompt" makes it a chat. Rows of OpenAI's batch API work, too.

    The same command goes on where it was stopped, by whatever. Exit code 0: every row has its answer; 3: all are done,
    some with an error.
    """
    try:
        import jaxserve.batch as job
    except ModuleNotFoundError as error:
        if error.name not in ("grain", "fsspec"):
            raise
        raise ValueError(f"batch reads through Grain: {how_to_install('batch')}") from error
    shard, num_shards = _shard(shard_index, num_shards, one_engine=engine.get("coordinator_address") is not None)
    single = _single_file(target, num_shards)
    if single is not None and single.exists() and not Path(f"{single}.parts/manifest.json").exists() and not overwrite:
        raise ValueError(f"{single} exists; give another OUT, or --overwrite to replace it")
    rows = job.Source(source, part_rows=part_rows)  # before the model, so that a wrong path is told at once
    job.require_apart(rows, target)
    manifest = job.Manifest(
        input_sha256=rows.sha256,
        num_rows=rows.num_rows,
        part_rows=part_rows,
        num_shards=num_shards,
        options={"seed": seed, **{name: engine[name] for name in CHANGES_ANSWERS if name in engine}},
    )
    parts = job.Parts(f"{target}.parts" if single else target, manifest, shard=shard, overwrite=overwrite)
    totals = job.count_done(rows, parts)
    if totals.done < totals.num_rows:
        with driver.start(engine) as llm, driver.profiled(llm, profile), _progress(totals) as on_progress:
            job.run_batch(
                llm.llm_engine,
                rows,
                parts,
                totals,
                model_name=engine["model"],
                seed=seed,
                window_rows=window_rows,
                on_progress=on_progress,
            )
    else:
        parts.begin()
    if single is not None:
        parts.join(single, rows.num_parts)
    _report(totals, as_json=as_json)
    return SOME_ROWS_FAILED if totals.failed else 0


def _shard(index: int | None, count: int | None, *, one_engine: bool) -> tuple[int, int]:
    """This process's shard and how many there are: one, where several processes are one engine.

    Raises:
        ValueError: one of the two is missing, or the index is too large.
    """
    if (index is None) != (count is None):
        raise ValueError("--num-shards and --shard-index belong together: give both or neither")
    if index is None or count is None:
        if one_engine:  # which has yet to join them, before JAX is used
            return 0, 1
        import grain

        shard = grain.sharding.ShardByJaxProcess()
        return shard.shard_index, shard.shard_count
    if index >= count:
        raise ValueError(f"--shard-index must be less than --num-shards ({count}), got {index}")
    return index, count


def _single_file(target: str, num_shards: int) -> Path | None:
    """The one file that OUT names, or None where it is a folder."""
    if not target.endswith(".jsonl"):
        return None
    if "://" in target or num_shards > 1:
        raise ValueError(f"OUT must be a folder of part files on a remote store or with several shards, got {target}")
    return Path(target)


def _report(totals: "Totals", *, as_json: bool) -> None:
    if as_json:
        report = {
            "rows": totals.num_rows,
            "rows_done_before": totals.done_before,
            "failed": totals.failed,
            "prompt_tokens": totals.prompt_tokens,
            "cached_prompt_tokens": totals.cached_prompt_tokens,
            "generated_tokens": totals.generated_tokens,
            "elapsed_s": totals.elapsed_s,
            "generated_tokens_per_s": totals.tokens_per_s,
        }
        print(json.dumps(report))
    else:
        before = f" ({totals.done_before} done before)" if totals.done_before else ""
        speed = f"{totals.generated_tokens} tokens in {totals.elapsed_s:.1f} s"
        print(f"{totals.num_rows} rows{before}, {totals.failed} failed, {speed}")
    if totals.first_failure is not None:
        print(f"first failure: {totals.first_failure}", file=sys.stderr)


@contextmanager
def _progress(totals: "Totals") -> Iterator[Callable[["Totals"], None]]:
    """A bar on stderr: rows done, tokens generated a second, time left. Without a terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with progress(*columns) as bar:
        if bar.disable:
            yield PlainProgress(totals, PLAIN_INTERVAL_S)
            return
        task = bar.add_task("rows", total=totals.num_rows, completed=totals.done, speed="")

        def on_progress(totals: "Totals") -> None:
            bar.update(task, completed=totals.done, speed=_speed(totals))

        yield on_progress


class PlainProgress:
    """Writes a line to stderr at the start, and then about every `interval_s` seconds."""

    def __init__(self, totals: "Totals", interval_s: float):
        self._interval_s = interval_s
        self._next_s = interval_s
        done_before = " are done already" if totals.done_before else ""
        print(f"{totals.done_before}/{totals.num_rows} rows{done_before}", file=sys.stderr, flush=True)

    def __call__(self, totals: "Totals") -> None:
        if totals.elapsed_s >= self._next_s:
            self._next_s = totals.elapsed_s + self._interval_s
            print(f"{totals.done}/{totals.num_rows} rows, {_speed(totals)}", file=sys.stderr, flush=True)


def _speed(totals: "Totals") -> str:
    """Failures, tokens a second and the time left, for people."""
    failed = f"{totals.failed} failed, " if totals.failed else ""
    left = totals.remaining_s
    return f"{failed}{totals.tokens_per_s:.1f} tokens/s, ETA {'-' if left is None else timedelta(seconds=round(left))}"

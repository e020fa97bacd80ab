"""`jaxserve compile`: an engine's programs, compiled for a TPU topology that is not here."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import ENGINE_OPTIONS, takes
from jaxserve.cli.output import progress, readable, show

if TYPE_CHECKING:
    from jaxserve.compile_ahead import EnginePrograms, ProgramReport

DOES_NOT_FIT = 3
COMPILE_OPTIONS = {
    "model": ENGINE_OPTIONS["model"]._replace(
        help="llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b, smollm2-135m, a Hugging Face id or folder, or a .gguf file; "
        "weights are not read."
    )
} | {
    name: ENGINE_OPTIONS[name]
    for name in (
        "dtype",
        "quantization",
        "load_format",
        "revision",
        "max_model_len",
        "page_size",
        "num_pages",
        "kv_cache_dtype",
        "sparse_attention",
        "device_memory_utilization",
        "kv_cache_memory_bytes",
        "tensor_parallel_size",
        "kv_parallel_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "prefill",
    )
}
NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # what comes from there does not serialise again
UNVERIFIED = "Programs were compiled, not run: neither was what is saved ever loaded on a TPU."


@takes(engine=COMPILE_OPTIONS)
def compile(
    topology: Annotated[str, typer.Option(help="v5e-8, v6e-8, v5p-8, tpu7x-8 and others of TPUs.")],
    engine: dict[str, Any],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Compile these programs alone: decode, mixed, layered, sample and others, or a name or pattern of "
            "names such as decode_64 or 'mixed_64_*'; may be given several times."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Write the serialised programs and a manifest.json into this folder. To load them on a TPU is not "
            "verified.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Compile every program that the engine would use on TPUs, without having one, and show what each needs.

    Takes a machine with CPUs and libtpu. Weights are neither read nor allocated. Exit code 0: all programs compile and
    fit; 3: some do not, or there is no room for a KV pool.
    """
    from jaxserve.topologies import WITHOUT_TPU, find_topology

    place = find_topology(topology)
    if place.jax_name is None:
        raise ValueError(f"topology must be one of TPUs to be compiled for here, got {topology}; v6e-8, say")
    require_libtpu()
    os.environ.update(WITHOUT_TPU | NO_CACHE)
    from jaxserve.compile_ahead import EnginePrograms
    from jaxserve.config import EngineConfig, NoRoomError

    model = engine.pop("model")
    asked = {"model": model, "topology": topology, **engine}
    try:
        programs = EnginePrograms(EngineConfig.of(model, **engine), place)
    except NoRoomError as error:
        if as_json:
            show({**asked, "fits": False, "problem": str(error), "programs": []}, "compile", as_json=True)
        else:
            print(f"Does not fit: {error}")
        return DOES_NOT_FIT
    names = programs.names(only or ())
    reports, saved = _compile(programs, names, save)
    result = as_dict(programs, reports, asked)
    if save is not None:
        listed = [program | saved.get(program["name"], {}) for program in result["programs"]]
        manifest = result | {"jax_topology": place.jax_name, "programs": listed}
        (save / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if as_json:
        show(result, "compile", as_json=True)
    else:
        _print(result)
    return 0 if result["fits"] else DOES_NOT_FIT


def require_libtpu() -> None:
    """Raises ValueError, with the way out, where the compiler for TPUs is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        pins = [pin.split(";")[0] for pin in importlib.metadata.requires("jax") or [] if pin.startswith("libtpu")]
        raise ValueError(f'compiling for TPUs takes libtpu, which is not here: pip install "{pins[0]}"')


def _compile(
    programs: "EnginePrograms", names: list[str], save: Path | None
) -> "tuple[list[ProgramReport], dict[str, dict[str, Any]]]":
    """What became of each program, and what was written of those that compile."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from jaxserve.compile_ahead import save_program

    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
    reports, saved = [], {}
    with progress(TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=name)
            report, program = programs.compile(name)
            reports.append(report)
            if save is not None and program is not None:
                saved[name] = save_program(save, name, program)
            bar.advance(task)
    return reports, saved


def as_dict(programs: "EnginePrograms", reports: "list[ProgramReport]", asked: dict[str, Any]) -> dict[str, Any]:
    """What became of the programs, as JSON has it."""
    topology, total = programs.topology, programs.total_bytes(reports)
    return {
        **asked,
        "device": topology.device.name,
        "memory_bytes": topology.device.memory_bytes,
        "weights_bytes": programs.weights_bytes,
        "pool_bytes": programs.pool_bytes,
        "state_bytes": programs.state_bytes,
        "needed_bytes": total,
        "fits": total <= topology.device.memory_bytes and all(report.problem is None for report in reports),
        "sizes": dataclasses.asdict(programs.sizes),
        "versions": {name: importlib.metadata.version(name) for name in ("jaxserve", "jax", "jaxlib", "libtpu")},
        "programs": [dataclasses.asdict(report) for report in reports],
        "notes": [*programs.notes, UNVERIFIED],
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    sizes = result["sizes"]
    console.print(
        f"{result['model']} on {result['topology']}, of each device {_gib(result['memory_bytes'])} GiB: weights "
        f"{_gib(result['weights_bytes'])}, KV pool {_gib(result['pool_bytes'])}, state of slots "
        f"{_gib(result['state_bytes'])}; {sizes['num_pages']:,} pages of {sizes['page_size']}, up to "
        f"{sizes['max_num_seqs']:,} sequences of {sizes['max_model_len']:,} tokens",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("program", no_wrap=True)
    for name in ("args", "temp", "out", "VMEM", "SMEM", "GFLOP", "matmuls", "time", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("", "GiB", "MiB", "MiB", "KiB", "KiB", "", "GB", "s", "", style="dim")
    for program in result["programs"]:
        table.add_row(*_cells(program))
    console.print(table)
    for program in result["programs"]:
        if program["problem"]:
            console.print(f"{program['name']}: {program['problem']}", highlight=False, markup=False)
    verdict = "All of these compile and fit" if result["fits"] else "Not all of these compile and fit"
    console.print(f"{verdict}; with all their code at most {_gib(result['needed_bytes'])} GiB", highlight=False)
    for note in result["notes"]:
        console.print(note, style="dim", highlight=False, markup=False)


def _cells(program: dict[str, Any]) -> list[str]:
    units = {"argument": 2**30, "temp": 2**20, "output": 2**20, "vmem": 2**10, "smem": 2**10}
    scaled = [_scaled(program[f"{name}_bytes"], unit) for name, unit in units.items()]
    work = [_scaled(program[name], 1e9) for name in ("flops", "matmul_bytes")]
    return [program["name"], *scaled, *work, f"{program['compile_s']:.1f}", "no" if program["problem"] else "yes"]


def _scaled(value: int | None, unit: float) -> str:
    return readable(None if value is None else round(value / unit, 1))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"

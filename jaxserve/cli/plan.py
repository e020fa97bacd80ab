"""`jaxserve plan`: which split of a model over which devices fits, and how fast it would be."""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import ENGINE_OPTIONS, takes
from jaxserve.cli.output import readable, show

if TYPE_CHECKING:
    from jaxserve.plan import Plan, SplitPlan

NOTHING_FITS = 3
EVERY = "every power of two that fits the topology"
PLAN_OPTIONS = {
    "model": ENGINE_OPTIONS["model"]._replace(
        help="llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b, smollm2-135m, a Hugging Face id or folder, or a .gguf file; "
        "weights are not read."
    ),
    "kv_cache_dtype": ENGINE_OPTIONS["kv_cache_dtype"],
    "tensor_parallel_size": ENGINE_OPTIONS["tensor_parallel_size"]._replace(unset=EVERY),
    "kv_parallel_size": ENGINE_OPTIONS["kv_parallel_size"]._replace(unset=EVERY),
    "device_memory_utilization": ENGINE_OPTIONS["device_memory_utilization"],
}


@takes(engine=PLAN_OPTIONS)
def plan(
    topology: Annotated[str, typer.Option(help="h200, h200x2 ... h200x8, v5e-8, v6e-8, v5p-8, tpu7x-8 and others.")],
    context: Annotated[int, typer.Option(help="Tokens that each sequence has at most, its answer included.", min=1)],
    engine: dict[str, Any],
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show how a model could be split over devices, what fits, and the time per output token to expect.

    Needs neither the devices nor the weights. On GPUs JAX may allocate the share of memory that
    XLA_PYTHON_CLIENT_MEM_FRACTION says here, else 0.75, as the engine would there.
    """
    from jaxserve import plan as planner

    model = engine.pop("model")
    found = planner.plan(
        model, topology, context=context, batch=batch, memory_fraction=_memory_fraction(os.environ), **engine
    )
    asked = {"model": model, "topology": topology, "context": context, "batch": batch, **engine}
    if as_json:
        show(as_dict(found, asked), "plan", as_json=True)
    else:
        _print(found, asked)
    return 0 if found.best else NOTHING_FITS


def _memory_fraction(environment: Mapping[str, str]) -> float:
    """As JAX reads it."""
    from jaxserve.plan.planner import GPU_MEMORY_FRACTION

    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := environment.get(name):
            try:
                return float(text)
            except ValueError as error:
                raise ValueError(f"{name} must be a number in (0, 1], got {text[:80]!r}") from error
    return GPU_MEMORY_FRACTION


def as_dict(plan: "Plan", asked: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as JSON has it."""
    topology = plan.topology
    return {
        **asked,
        "device": topology.device.name,
        "num_devices": topology.num_devices,
        "num_hosts": topology.num_hosts,
        "memory_bytes": plan.memory_bytes,
        "splits": [dataclasses.asdict(split) | {"best": split is plan.best} for split in plan.splits],
        "ways_out": plan.ways_out,
        "notes": plan.notes,
    }


def _print(plan: "Plan", asked: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from jaxserve.plan.splits import DEFAULT_MAX_NUM_SEQS

    console, topology = Console(), plan.topology
    console.print(
        f"{asked['model']} on {topology.name}: {topology.num_devices} x {topology.device.name}, of each "
        f"{_gib(plan.memory_bytes)} GiB for JAX; {asked['batch']:,} sequences of {asked['context']:,} tokens",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("kv x tp", "weights", "state", "pool", "reserve", "pages", "tokens", "fits", "TPOT", "prefill"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("", "GiB", "GiB", "GiB", "GiB", "", "", "", "ms", "tok/s", style="dim")
    for split in plan.splits:
        table.add_row(*_cells(split), style="bold green" if split is plan.best else None)
    console.print(table)
    best = plan.best
    if best:
        sizes = f"--kv-parallel-size {best.kv_parallel_size} --tensor-parallel-size {best.tensor_parallel_size}"
        many = f" --max-num-seqs {best.max_num_seqs}" if best.max_num_seqs > DEFAULT_MAX_NUM_SEQS else ""
        console.print(f"Best: {sizes}{many}", highlight=False)
    else:
        console.print("Nothing fits. What would:" if plan.ways_out else "Nothing fits.", highlight=False)
        for way in plan.ways_out:
            console.print(f"- {way}", highlight=False)
    for note in plan.notes:
        console.print(note, style="dim", highlight=False)


def _cells(split: "SplitPlan") -> list[str]:
    return [
        f"{split.kv_parallel_size} x {split.tensor_parallel_size}",
        _gib(split.weights_bytes),
        _gib(split.state_bytes),
        _gib(split.pool_bytes),
        _gib(split.reserve_bytes),
        f"{split.num_pages:,}",
        f"{split.num_tokens:,}",
        "yes" if split.fits else "no",
        readable(split.tpot_ms and round(split.tpot_ms, 2)),
        readable(split.prefill_tokens_per_s and round(split.prefill_tokens_per_s)),
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"

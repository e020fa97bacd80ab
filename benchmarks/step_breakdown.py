"""Where the time of a decode step goes on one GPU, from a trace: Llama-3.1-8B's shape with random weights.

tpot_idle_64     ms a step in which the device runs nothing, at 64 sequences of 1,024 tokens
and a table of ms a step by kind of kernel, at 1 x 128, 16 x 128, 64 x 1,024 and 256 x 1,024

python -m benchmarks.step_breakdown [--save DIR]
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import tpot
from benchmarks._report import Row, report
from jaxserve import LLM

NUM_STEPS = 16
IDLE_MUST_MS, IDLE_STRETCH_MS = 0.15, 0.05
KINDS = {  # of kernels, by a part of their names; the first that fits
    "attention": ("paged_attention",),
    "RoPE, KV write": ("rope_kv_write", "scatter"),
    "dense layers": ("dense_layer",),
    "matmul": ("nvjet", "gemm", "cutlass", "cublas"),
    "copies": ("memcpy", "memset"),
    "norms, activations, sampling": ("",),
}


def kernels(run: Callable[[], None]) -> list[tuple[float, float, str]]:
    """(start, end, name) of everything that the device ran meanwhile, in ms, in order."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    found = [
        (event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6, event.name)
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]
    return sorted(found)


def decode(llm: LLM, case: tpot.Case) -> list[tuple[float, float, str]]:
    """The device's work of NUM_STEPS steps in which every sequence decodes."""
    engine = llm.llm_engine
    for i, prompt in enumerate(tpot.prompts(case)):
        engine.add_request(str(i), prompt, tpot.sampling(NUM_STEPS + 300))
    for _ in range(3):
        while len(engine.step()) < case.batch:
            pass
        engine.core.runner.wait_for_programs()  # without warm-up a larger one stands in at first

    def run() -> None:
        for _ in range(NUM_STEPS):
            engine.step()

    found = kernels(run)
    engine.abort_request([str(i) for i in range(case.batch)])
    while engine.has_unfinished_requests():
        engine.step()
    return found


def split(found: list[tuple[float, float, str]]) -> dict[str, float]:
    """ms a step of each kind, and of none."""
    totals = dict.fromkeys(KINDS, 0.0)
    idle, busy_until = 0.0, found[0][0]
    for start, end, name in found:
        kind = next(kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts))
        totals[kind] += end - start
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    return {kind: total / NUM_STEPS for kind, total in {**totals, "idle": idle}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="folder for the row as step_breakdown.jsonl")
    save = parser.parse_args().save
    table = Table("ms a step", *KINDS, "idle", "sum")
    rows = []
    with tpot.engine(warm_up="off") as llm:
        for case in tpot.LLAMA.cases:
            if case.context <= 1024:
                decode(llm, case)  # compiles
                parts = split(decode(llm, case))
                shown = (*parts.values(), sum(parts.values()))
                table.add_row(f"{case.batch} x {case.context}", *(f"{ms:.3f}" for ms in shown))
                if case.batch == 64:
                    rows.append(
                        Row(
                            name="tpot_idle_64",
                            value=parts["idle"],
                            unit="ms",
                            target=IDLE_MUST_MS,
                            stretch=IDLE_STRETCH_MS,
                            lower_is_better=True,
                        )
                    )
    Console(width=140).print(table)
    report(rows, save=save and save / "step_breakdown.jsonl")


if __name__ == "__main__":
    main()

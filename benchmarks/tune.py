"""Finds the fastest tilings of the paged attention kernels on this GPU and writes the table that they read.

Every tiling that fits the shared memory is timed over the shapes of `shapes.py`, at each head_dim; the best by the
geometric mean of its times over the computed one's wins, if it is ahead by a hundredth, or else the computed one does.

    python -m benchmarks.tune [--kernel decode|prefill] [--head-dim 64 128 256] [--write]
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import shapes
from benchmarks.paged_attention import decode_s, prefill_s
from jaxserve.pallas_kernels.paged_attention import hopper, mosaic_gpu

AHEAD = 0.99  # of the computed tiling's time; less is noise
TABLE = Path(mosaic_gpu.__file__).with_name("tilings.json")


def candidates(kernel: str, head_dim: int) -> list[dict[str, int]]:
    """Tilings that fit."""
    found = []
    for block, stages, pairs in itertools.product((64, 128), (2, 3, 4, 6), (1, 2) if kernel == "decode" else (1,)):
        tiling = {"block": block, "stages": stages} | ({"pairs": pairs} if kernel == "decode" else {})
        if mosaic_gpu.shared_bytes(kernel, head_dim, **tiling) <= hopper.SHARED_MEMORY_BYTES:
            found.append(tiling)
    return found


def seconds(kernel: str, head_dim: int) -> list[float]:
    """Of each shape, with the tiling that the table names now."""
    if kernel == "prefill":
        return [prefill_s(shape, head_dim) for shape in shapes.PREFILL]
    return [
        decode_s(np.full(s.batch, s.context), s.num_heads, s.num_kv_heads, s.page_size, head_dim) for s in shapes.DECODE
    ]


def best(kernel: str, head_dim: int, console: Console) -> dict[str, int]:
    """The winner; the table has no entry for this head_dim then."""
    entries = mosaic_gpu.TILINGS[kernel]
    entries.pop(str(head_dim), None)
    before = seconds(kernel, head_dim)
    results = []
    for tiling in candidates(kernel, head_dim):
        entries[str(head_dim)] = tiling
        jax.clear_caches()
        try:
            times = seconds(kernel, head_dim)
        except Exception as error:  # too many registers, an unsupported block: not a candidate on this card
            console.print(f"{kernel} {head_dim} {tiling}: {type(error).__name__}: {str(error)[:100]}")
            continue
        ratio = statistics.geometric_mean([t / d for t, d in zip(times, before, strict=True)])
        results.append((ratio, tiling, times))
    entries.pop(str(head_dim), None)
    results.sort(key=lambda result: result[0])
    table = Table("tiling", "over computed", "us by shape", title=f"{kernel}, head_dim {head_dim}")
    for ratio, tiling, times in results[:6]:
        table.add_row(str(tiling), f"{ratio:.3f}", " ".join(f"{1e6 * t:.1f}" for t in times))
    console.print(table)
    return results[0][1] if results and results[0][0] < AHEAD else mosaic_gpu.computed(kernel, head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="+", choices=("decode", "prefill"), default=("decode", "prefill"))
    parser.add_argument("--head-dim", nargs="+", type=int, choices=(64, 128, 256), default=(64, 128, 256))
    parser.add_argument("--write", action="store_true", help=f"put the winners into {TABLE.name}")
    arguments = parser.parse_args()
    console = Console(width=140)
    table = json.loads(TABLE.read_text())
    for kernel, head_dim in itertools.product(arguments.kernel, arguments.head_dim):
        table[kernel][str(head_dim)] = best(kernel, head_dim, console)
    text = json.dumps(table, indent=2)
    print(text)
    if arguments.write:
        TABLE.write_text(text + "\n")


if __name__ == "__main__":
    main()

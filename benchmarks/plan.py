"""How far `jaxserve plan` is from what was measured: predictions beside the rows in `results/`, in percent.

    tpot_plan_BxC        a decode step of B sequences of C tokens on one H200 (tpot_BxC_decode)
    tpot_plan_prefill_*  prompt tokens a second (prefill_*)
    mesh_plan_*          on two H200s, of results/plan_predictions.jsonl, where results/ holds the row that it names

python -m benchmarks.plan [--save DIR]
python -m benchmarks.plan --fit            # the constants of jaxserve/plan/roofline.py, from the rows in FITTED
python -m benchmarks.plan --predict        # writes results/plan_predictions.jsonl anew
"""

import argparse
import datetime
import functools
import json
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from benchmarks import tpot
from benchmarks._report import Row, report
from jaxserve.config import DeviceMemory, EngineConfig
from jaxserve.models import get_model
from jaxserve.plan.memory import Memory, memory_of
from jaxserve.plan.roofline import MEASURED, Rates, decode_step, prefill_s
from jaxserve.plan.splits import decode_rows, rank_of
from jaxserve.topologies import find_topology
from jaxserve.weights.dummy import SHAPES

RESULTS = Path(__file__).parent / "results"
PREDICTIONS = RESULTS / "plan_predictions.jsonl"
FITTED = (
    "tpot_16x128_decode",
    "tpot_64x1024_decode",
    "tpot_256x1024_decode",
    "prefill_64x1024",
    "tpot_qwen3_30b_1x128_decode",
)
MESHES = ((1, 2), (2, 1))  # kv, tp
MAX_ERROR = 10.0  # percent, as docs/plan.md says


class Case(NamedTuple):
    """What was measured, or is to be."""

    kind: Literal["decode", "prefill"]
    model: str
    batch: int
    context: int
    kv: int = 1
    tp: int = 1


def measured() -> dict[str, float]:
    """All rows in `results/` by name."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(RESULTS.glob("*.jsonl")) if file != PREDICTIONS]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    return {row["name"]: row["value"] for row in rows if "name" in row}


@functools.cache
def memory(model: str, kv: int, tp: int) -> Memory:
    """Of `benchmarks.tpot`'s engine."""
    sizes = {"kv_parallel_size": kv, "tensor_parallel_size": tp}
    config = EngineConfig.of(model, max_num_batched_tokens=8192, device_memory_utilization=0.85, **sizes)
    device = DeviceMemory(platform="gpu", limit_bytes=find_topology("h200").device.memory_bytes)
    return memory_of(config, get_model(SHAPES[model]), device)


def predict(case: Case, rates: Rates = MEASURED) -> float:
    """ms a step, or tokens a second."""
    kind, model, batch, context, kv, tp = case
    found = memory(model, kv, tp)
    rank = rank_of(get_model(SHAPES[model]), found, find_topology("h200"), kv, tp, rates)
    if kind == "prefill":
        return batch * context / prefill_s(rank, num_seqs=batch, length=context, budget=8192)
    halfway = context + tpot.NUM_STEPS // 2  # each of the steps that are measured sees a token more
    return 1e3 * decode_step(rank, batch=batch, context=halfway, num_rows=decode_rows(found, batch)).total_s


def cases() -> dict[str, Case]:
    """What `predict` takes, by the name of the measured row."""
    found = {}
    for shape in tpot.SHAPES.values():
        for case in shape.cases:
            name = f"tpot{shape.suffix}_{case.batch}x{case.context}_decode"
            found[name] = Case("decode", shape.name, case.batch, case.context)
        found[f"prefill{shape.suffix}_64x1024"] = Case("prefill", shape.name, 64, 1024)
    return found


def mesh_cases() -> dict[str, Case]:
    return {
        f"tpot_kv{kv}_tp{tp}_{case.batch}x{case.context}_decode": Case(
            "decode", tpot.LLAMA.name, case.batch, case.context, kv, tp
        )
        for kv, tp in MESHES
        for case in tpot.LLAMA_ON_TWO.cases
    }  # fmt: skip


def errors() -> dict[str, float]:
    """Percent by which predictions miss the measured rows that `MEASURED` was not fitted to."""
    known = measured()
    left = {name: case for name, case in cases().items() if name not in FITTED}
    return {name: 100 * (predict(case) / known[name] - 1) for name, case in left.items()}


def fit() -> Rates:
    """The rates with the least squared relative errors on the rows in FITTED."""
    known, all_cases = measured(), cases()

    def rates(x: np.ndarray) -> Rates:
        shares = {"bandwidth_share": float(x[0]), "compute_share": float(x[1])}
        return MEASURED._replace(**shares, kernel_s=float(x[2]) * 1e-6)

    def misses(x: np.ndarray) -> list[float]:
        return [predict(all_cases[name], rates(x)) / known[name] - 1 for name in FITTED]

    return rates(least_squares(misses, [0.8, 0.6, 4.0]).x)


def write_predictions() -> None:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [{"card": "2 x NVIDIA H200", "predicted": date, "rates": MEASURED._asdict()}]
    for name, case in mesh_cases().items():
        row = name.removeprefix("tpot_").removesuffix("_decode")
        lines.append({"name": f"mesh_plan_{row}", "value": round(predict(case), 3), "unit": "ms", "to_measure": name})
    PREDICTIONS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def judged() -> dict[str, float]:
    """Percent by which the written predictions miss, of those whose row is measured."""
    known = measured()
    rows = [json.loads(line) for line in PREDICTIONS.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        row["name"]: 100 * (row["value"] / known[row["to_measure"]] - 1) for row in rows if row["to_measure"] in known
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--save", type=Path, help="folder for the rows as plan.jsonl")
    options = parser.parse_args()
    if options.fit:
        print(fit())
        return
    if options.predict:
        write_predictions()
        return
    named = {f"tpot_plan_{name.removeprefix('tpot_').removesuffix('_decode')}": e for name, e in errors().items()}
    rows = [
        Row(name=name, value=abs(error), unit="%", target=MAX_ERROR, lower_is_better=True)
        for name, error in (named | judged()).items()
    ]
    report(rows, save=options.save and options.save / "plan.jsonl")


if __name__ == "__main__":
    main()

"""What to tell with a plan: what would make a split fit, and what the figures do not know."""

import bisect
import dataclasses
from typing import Any

from jaxserve.layers.kv_cache import position_shape
from jaxserve.pallas_kernels.paged_attention.types import LANES
from jaxserve.plan.splits import Question, SplitPlan, splits_of
from jaxserve.topologies import TOPOLOGIES

LARGE_MEMORY_FRACTION = 0.95  # of a GPU, that JAX can be asked to allocate


def ways_out(question: Question, splits: list[SplitPlan]) -> list[str]:
    """Single changes with which the question fits."""
    found = []

    def fits(**changes: Any) -> bool:
        return any(split.fits for split in splits_of(dataclasses.replace(question, **changes)))

    if most := bisect.bisect_left(range(1, question.batch), True, key=lambda batch: not fits(batch=batch)):
        found.append(f"--batch {most} with --context {question.context}")
    if longest := max(split.max_context for split in splits):
        found.append(f"--context {longest} with --batch {question.batch}")
    options = question.options
    if options.get("kv_cache_dtype", "auto") == "auto" and fits(options=options | {"kv_cache_dtype": "fp8"}):
        found.append("--kv-cache-dtype fp8")
    fixed = ("kv_parallel_size", "tensor_parallel_size")
    free = {name: value for name, value in options.items() if name not in fixed}
    if len(free) < len(options) and fits(options=free):
        found.append("another split: leave --kv-parallel-size and --tensor-parallel-size out")
    on_gpu = question.topology.device.platform == "gpu"
    if on_gpu and question.memory_fraction < LARGE_MEMORY_FRACTION and fits(memory_fraction=LARGE_MEMORY_FRACTION):
        found.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={LARGE_MEMORY_FRACTION} in the environment of both commands")
    by_size = sorted(TOPOLOGIES.values(), key=lambda topology: topology.num_devices)
    same = [t for t in by_size if t.device is question.topology.device]
    larger = [t for t in same if t.num_devices > question.topology.num_devices]
    for some in (larger, [t for t in by_size if t not in same]):  # other devices only where more of these are no help
        if name := next((t.name for t in some if fits(topology=t)), None):
            return [*found, f"--topology {name}"]
    return found


def notes(question: Question, splits: list[SplitPlan]) -> list[str]:
    """What stands between these figures and the truth."""
    topology, found = question.topology, []
    if topology.num_hosts > 1:
        found.append(
            f"{topology.name} has {topology.num_hosts} hosts of {topology.devices_a_host} devices; a split over all "
            f"{topology.num_devices} takes one process on each host, started as docs/mesh.md says."
        )
    head_dim = question.model.config.head_dim
    if topology.device.platform == "tpu":
        found.append("Times on TPUs are estimates: nothing was measured there.")
        _, in_a_row = position_shape(
            1, head_dim, "bfloat16", "tpu"
        )  # heads that the layout of pages fits to rows are counted
        if padding := -in_a_row % LANES:
            found.append(
                f"TPUs pad head_dim {head_dim} to {head_dim + padding}: pages take more memory than is counted here, "
                "and the engine counts no more; leave room with --device-memory-utilization."
            )
    elif any(split.num_devices > 2 for split in splits):
        found.append("Collectives were measured between two GPUs; with more they may take longer.")
    if any(split.kv_parallel_size > 1 for split in splits):
        found.append("With kv above 1 the attention of prompts is plain XLA: take its prefill for an upper bound.")
        if "sliding" in question.model.layer_kinds:
            found.append(
                "With kv above 1 layers with a sliding window read all pages, in plain XLA: TPOT is a lower bound."
            )
    if topology.device.platform == "gpu" and question.options.get("kv_cache_dtype", "auto") != "auto":
        found.append(
            "Over fp8 pages attention of decode steps takes 0.58 of the time over bfloat16 ones (0.5 is counted), and "
            "that of prompts 1.3 to 1.6 times (1 is counted)."
        )
    return found

"""From a question to a plan: all splits that were asked for, which of them is best, and what would make one fit."""

import dataclasses
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.exceptions import ParameterError
from jaxserve.models import Model, get_model
from jaxserve.plan.advice import notes, ways_out
from jaxserve.plan.splits import Question, SplitPlan, splits_of
from jaxserve.topologies import Topology, check_devices, find_topology
from jaxserve.weights.loader import open_checkpoint

OPTIONS = ("kv_cache_dtype", "device_memory_utilization", "kv_parallel_size", "tensor_parallel_size")
GPU_MEMORY_FRACTION = 0.75  # that JAX allocates by itself
MAX_BATCH = 8192  # a step's tokens, unless more are asked for
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_experts", "qkv_size", "head_dim")
MAX_SIZE = 2**20  # of each; far above any model, and the rows of a dimension that is split cost memory here
MAX_HEAD_DIM = 2**12  # since devices may hold copies of heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All splits that were asked for, and the one with the lowest time per output token among those that fit."""

    topology: Topology
    memory_bytes: int  # of a device, that JAX may allocate
    splits: list[SplitPlan]
    ways_out: list[str]  # where none fits: what would
    notes: list[str]  # what stands between these figures and the truth

    @property
    def best(self) -> SplitPlan | None:
        fitting = [split for split in self.splits if split.fits]
        return min(fitting, key=lambda split: (split.tpot_ms, split.num_devices), default=None)


def plan(
    model: str,
    topology: str,
    *,
    context: int,
    batch: int,
    memory_fraction: float = GPU_MEMORY_FRACTION,
    **options: Any,
) -> Plan:
    """Plans a model on a topology.

    Args:
        model: a name such as llama-3.1-8b, a Hugging Face id or folder, or a .gguf file; its weights are not read.
        topology: one of `jaxserve.topologies.TOPOLOGIES`.
        context: tokens that each sequence has at most, its answer included.
        batch: sequences at a time.
        memory_fraction: of a GPU's memory that JAX may allocate (XLA_PYTHON_CLIENT_MEM_FRACTION).
        options: those of the engine in OPTIONS. `tensor_parallel_size` and `kv_parallel_size` fix a split; without
            them all are planned whose sizes are powers of two and which use devices of one host, or all.

    Raises:
        ParameterError: a value out of range, or a topology that is not known.
        TypeError: an option that is not among OPTIONS.
        ValueError: a model that is not supported, a context that it was not made for, or sizes that no split has.
    """
    place = find_topology(topology)
    for name, value, limit in (("context", context, 2**31 - 1), ("batch", batch, MAX_BATCH)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ParameterError(name, value, f"an integer in [1, {limit}]")
    if not 0.0 < memory_fraction <= 1.0:
        raise ParameterError("memory_fraction", memory_fraction, "in (0, 1]")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise TypeError(f"unknown options of a plan {unknown}; known: {list(OPTIONS)}")
    EngineConfig.of(model, **options)  # refuses what the engine would
    found = get_model(open_checkpoint(model, load_format="dummy").config)
    _check_sizes(found, context)
    check_devices(place, options.get("kv_parallel_size") or 1, options.get("tensor_parallel_size") or 1)
    question = Question(
        model=found,
        name=model,
        topology=place,
        context=context,
        batch=batch,
        memory_fraction=memory_fraction,
        options=options,
    )
    splits = list(splits_of(question))
    if not splits:
        raise ValueError(
            f"no split with {options} suits {place.name}: an engine uses up to {place.devices_a_host} devices of one "
            f"host, or all {place.num_devices}; give other sizes"
        )
    return Plan(
        topology=place,
        memory_bytes=question.device_memory.limit_bytes,
        splits=splits,
        ways_out=[] if any(split.fits for split in splits) else ways_out(question, splits),
        notes=notes(question, splits),
    )


def _check_sizes(model: Model, context: int) -> None:
    config = model.config
    if context > config.max_position_embeddings:
        raise ValueError(
            f"context {context} is beyond the model's max_position_embeddings {config.max_position_embeddings}; "
            "lower it to that"
        )
    for name in SIZES:
        size, limit = getattr(config, name), MAX_HEAD_DIM if name == "head_dim" else MAX_SIZE
        if size > limit:
            raise ValueError(f"{name} must be at most {limit} to be planned, got {size}")

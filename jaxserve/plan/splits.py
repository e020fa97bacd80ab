"""All splits of a topology, which of them fit, which is fastest, and what would make one fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxserve.config import DeviceMemory, EngineConfig
from jaxserve.exceptions import ParameterError
from jaxserve.models import Model, get_model
from jaxserve.plan.memory import Memory, memory_of
from jaxserve.plan.roofline import MEASURED, Rank, Rates, StepTime, decode_s, prefill_s
from jaxserve.runner import default_shapes
from jaxserve.topologies import TOPOLOGIES, Topology, find_topology
from jaxserve.weights.loader import open_checkpoint

DEFAULT_MAX_NUM_SEQS = 256  # beyond it a plan raises max_num_seqs to the batch
GPU_MEMORY_FRACTION = 0.75  # that JAX allocates by itself
LARGE_MEMORY_FRACTION = 0.95  # that can be asked of it
MAX_BATCH = 8192  # a step's tokens, unless more are asked for
MAX_DIMENSION = 2**24  # of a model; far above any, and each costs memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One split. Bytes are of each device; pages and tokens of all together."""

    kv_parallel_size: int
    tensor_parallel_size: int
    weights_bytes: int
    pool_bytes: int
    reserve_bytes: int
    num_pages: int
    num_tokens: int
    max_batch: int  # sequences of the asked context that the pages hold
    max_context: int  # tokens that each sequence of the asked batch may have
    fits: bool
    tpot_ms: float | None  # None: no page fits beside the weights
    tpot_parts_ms: dict[str, float]
    prefill_tokens_per_s: float | None

    @property
    def num_devices(self) -> int:
        return self.kv_parallel_size * self.tensor_parallel_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All splits that were asked for, and the one with the lowest time per output token among those that fit."""

    topology: Topology
    memory_bytes: int  # of a device, that JAX may allocate
    splits: list[SplitPlan]
    ways_out: list[str]  # where none fits: what would

    @property
    def best(self) -> SplitPlan | None:
        fitting = [split for split in self.splits if split.fits]
        return min(fitting, key=lambda split: (split.tpot_ms, split.num_devices), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

    model: Model
    name: str
    topology: Topology
    context: int  # tokens of each sequence, its answer included
    batch: int  # sequences
    memory_fraction: float  # of a GPU's memory that JAX may allocate
    options: dict[str, Any]  # of the engine

    @property
    def device_memory(self) -> DeviceMemory:
        device = self.topology.device
        fraction = self.memory_fraction if device.platform == "gpu" else 1.0
        return DeviceMemory(on_cpu=False, limit_bytes=int(device.memory_bytes * fraction))


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
        options: of the engine; `tensor_parallel_size` and `kv_parallel_size` fix a split, and without them all are
            planned whose sizes are powers of two.

    Raises:
        ParameterError: a value out of range, or a topology that is not known.
        TypeError: an unknown option.
        ValueError: a model that is not supported, or a context that it was not made for.
    """
    place = find_topology(topology)
    for name, value, limit in (("context", context, 2**31 - 1), ("batch", batch, MAX_BATCH)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ParameterError(name, value, f"an integer in [1, {limit}]")
    if not 0.0 < memory_fraction <= 1.0:
        raise ParameterError("memory_fraction", memory_fraction, "in (0, 1]")
    EngineConfig.of(model, **options)  # refuses what the engine would
    found = get_model(open_checkpoint(model, load_format="dummy").config)
    _check_sizes(found, context)
    _check_devices(place, options.get("kv_parallel_size") or 1, options.get("tensor_parallel_size") or 1)
    question = Question(
        model=found,
        name=model,
        topology=place,
        context=context,
        batch=batch,
        memory_fraction=memory_fraction,
        options=options,
    )
    splits = list(_splits(question))
    return Plan(
        topology=place,
        memory_bytes=question.device_memory.limit_bytes,
        splits=splits,
        ways_out=[] if any(split.fits for split in splits) else _ways_out(question, splits),
    )


def _check_sizes(model: Model, context: int) -> None:
    config = model.config
    if context > config.max_position_embeddings:
        raise ValueError(
            f"context {context} is beyond the model's max_position_embeddings {config.max_position_embeddings}; "
            "lower it to that"
        )
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_experts", "qkv_size")
    largest = max(names, key=lambda name: getattr(config, name))
    if getattr(config, largest) > MAX_DIMENSION:
        raise ValueError(f"{largest} must be at most {MAX_DIMENSION} to be planned, got {getattr(config, largest)}")


def _check_devices(topology: Topology, kv: int, tp: int) -> None:
    if kv * tp > topology.num_devices:
        raise ValueError(
            f"kv_parallel_size {kv} x tensor_parallel_size {tp} needs {kv * tp} devices, {topology.name} has "
            f"{topology.num_devices}; lower one of them or take a larger topology"
        )


def _splits(question: Question) -> Iterator[SplitPlan]:
    for kv, tp in _sizes(question):
        yield _split(question, kv, tp)


def _sizes(question: Question) -> list[tuple[int, int]]:
    """(kv, tp), by the number of devices."""
    limit = question.topology.num_devices
    kv, tp = (question.options.get(name) for name in ("kv_parallel_size", "tensor_parallel_size"))
    powers = [1 << i for i in range(limit.bit_length())]
    found = [(k, t) for k in ([kv] if kv else powers) for t in ([tp] if tp else powers) if k * t <= limit]
    return sorted(found, key=lambda sizes: (sizes[0] * sizes[1], sizes[0]))


def _split(question: Question, kv: int, tp: int) -> SplitPlan:
    model, batch, context = question.model, question.batch, question.context
    sizes = {"kv_parallel_size": kv, "tensor_parallel_size": tp}
    rows = {} if batch <= DEFAULT_MAX_NUM_SEQS else {"max_num_seqs": batch}
    config = EngineConfig.of(question.name, **{**question.options, **rows, **sizes})
    memory = memory_of(config, model, question.device_memory)
    time, prefill = _speed(question, memory, kv, tp)
    return SplitPlan(
        **sizes,
        weights_bytes=memory.weights_bytes,
        pool_bytes=memory.pool_bytes,
        reserve_bytes=memory.reserve_bytes,
        num_pages=memory.num_pages,
        num_tokens=memory.num_tokens,
        max_batch=memory.max_batch(context),
        max_context=min(memory.max_context(batch), model.config.max_position_embeddings),
        fits=memory.max_batch(context) >= batch,
        tpot_ms=None if time is None else 1e3 * time.total_s,
        tpot_parts_ms={} if time is None else {n.removesuffix("_s"): 1e3 * v for n, v in time._asdict().items()},
        prefill_tokens_per_s=prefill,
    )


def _speed(question: Question, memory: Memory, kv: int, tp: int) -> tuple[StepTime | None, float | None]:
    """A decode step, and tokens a second of prompts of the whole context."""
    if memory.sizes is None:
        return None, None
    rank = rank_of(question.model, memory, question.topology, kv, tp)
    rows = decode_rows(memory, question.batch)
    step = decode_s(rank, batch=question.batch, context=question.context, num_rows=rows)
    budget = memory.sizes[0].max_num_batched_tokens
    together = min(question.batch, max(1, budget // question.context))
    seconds = prefill_s(rank, num_seqs=together, length=question.context, budget=budget)
    return step, together * question.context / seconds


def decode_rows(memory: Memory, batch: int) -> int:
    """Rows of the program for steps in which so many sequences decode."""
    assert memory.sizes is not None
    shapes = default_shapes(memory.sizes[1])
    return next(shape.decode_rows for shape in shapes if not shape.prefill_tokens and shape.decode_rows >= batch)


def rank_of(model: Model, memory: Memory, topology: Topology, kv: int, tp: int, rates: Rates = MEASURED) -> Rank:
    """One rank, as the roofline sees it."""
    assert memory.sizes is not None
    return Rank(
        model=model,
        config=memory.config,
        kv_parallel_size=kv,
        tensor_parallel_size=tp,
        outer_bytes={path[0]: size for path, size in memory.leaf_bytes.items() if len(path) == 1},
        layer_bytes={path[2]: size for path, size in memory.leaf_bytes.items() if path[:2] == ("layers", 0)},
        kv_bytes=memory.kv_token_bytes // model.config.num_layers,
        page_size=memory.sizes[1].page_size,
        device=topology.device,
        rates=rates,
    )


def _ways_out(question: Question, splits: list[SplitPlan]) -> list[str]:
    """Single changes with which the question fits."""
    found = []
    most = max(splits, key=lambda split: split.max_batch)
    if most.max_batch:
        found.append(f"--batch {most.max_batch} with --context {question.context}")
    longest = max(splits, key=lambda split: split.max_context)
    if longest.max_context:
        found.append(f"--context {longest.max_context} with --batch {question.batch}")

    def fits(**changes: Any) -> bool:
        return any(split.fits for split in _splits(dataclasses.replace(question, **changes)))

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

"""The splits of a topology: what each holds, whether it fits, and how fast it would be."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxserve.config import DeviceMemory, EngineConfig
from jaxserve.models import Model
from jaxserve.plan.memory import Memory, memory_of
from jaxserve.plan.roofline import MEASURED, Rank, Rates, StepTime, decode_step, prefill_s
from jaxserve.program_set import default_shapes
from jaxserve.topologies import Topology

DEFAULT_MAX_NUM_SEQS = 256  # of the engine on accelerators; a plan raises it where the batch is larger


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One split. Bytes are of each device; pages and tokens of all together."""

    kv_parallel_size: int
    tensor_parallel_size: int
    max_num_seqs: int  # to start the engine with
    weights_bytes: int
    state_bytes: int  # of max_num_seqs sequences, beside their pages
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
        return DeviceMemory(platform=device.platform, limit_bytes=int(device.memory_bytes * fraction))


def splits_of(question: Question) -> Iterator[SplitPlan]:
    """Those that the options leave open, by the number of devices."""
    for kv, tp in _sizes(question):
        yield _split(question, kv, tp)


def _sizes(question: Question) -> list[tuple[int, int]]:
    """(kv, tp) that the topology can run, by the number of devices."""
    topology = question.topology
    kv, tp = (question.options.get(name) for name in ("kv_parallel_size", "tensor_parallel_size"))
    powers = [1 << i for i in range(topology.num_devices.bit_length())]
    found = [(k, t) for k in ([kv] if kv else powers) for t in ([tp] if tp else powers) if topology.can_run(k * t)]
    return sorted(found, key=lambda sizes: (sizes[0] * sizes[1], sizes[0]))


def _split(question: Question, kv: int, tp: int) -> SplitPlan:
    model, batch, context = question.model, question.batch, question.context
    sizes = {
        "kv_parallel_size": kv,
        "tensor_parallel_size": tp,
        "max_num_seqs": max(DEFAULT_MAX_NUM_SEQS, batch),
    }
    config = EngineConfig.of(question.name, **{**question.options, **sizes})
    memory = memory_of(config, model, question.device_memory)
    time, prefill = _speed(question, memory, kv, tp)
    return SplitPlan(
        **sizes,
        weights_bytes=memory.weights_bytes,
        state_bytes=memory.state_bytes,
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
    if memory.scheduler is None:
        return None, None
    rank = rank_of(question.model, memory, question.topology, kv, tp)
    rows = decode_rows(memory, question.batch)
    step = decode_step(rank, batch=question.batch, context=question.context, num_rows=rows)
    budget = memory.scheduler.max_num_batched_tokens
    together = min(question.batch, max(1, budget // question.context))
    seconds = prefill_s(rank, num_seqs=together, length=question.context, budget=budget)
    return step, together * question.context / seconds


def decode_rows(memory: Memory, batch: int) -> int:
    """Rows of the program for steps in which so many sequences decode."""
    assert memory.runner is not None
    shapes = default_shapes(memory.runner)
    return next(shape.decode_rows for shape in shapes if not shape.prefill_tokens and shape.decode_rows >= batch)


def rank_of(model: Model, memory: Memory, topology: Topology, kv: int, tp: int, rates: Rates = MEASURED) -> Rank:
    """One rank, as the roofline sees it."""
    assert memory.runner is not None
    return Rank(
        model=model,
        config=memory.config,
        kv_parallel_size=kv,
        tensor_parallel_size=tp,
        outer_bytes={path[0]: size for path, size in memory.leaf_bytes.items() if len(path) == 1},
        layer_bytes={path[2]: size for path, size in memory.leaf_bytes.items() if path[:2] == ("layers", 0)},
        kv_bytes=memory.kv_token_bytes // model.config.num_layers,
        page_size=memory.runner.page_size,
        device=topology.device,
        rates=rates,
    )

"""What a device of a split holds, by the engine's own rules."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxserve.config import (
    DeviceMemory,
    EngineConfig,
    NoRoomError,
    RunnerConfig,
    kv_bytes_per_token,
    resolve,
    sparse_bytes,
    state_bytes,
)
from jaxserve.models import Model, ModelConfig
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.sharding.mesh import abstract_mesh
from jaxserve.weights.checkpoint import LeafPath
from jaxserve.weights.loader import param_bytes_per_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device, and the pages of all."""

    config: ModelConfig  # with the heads of one rank
    leaf_bytes: Mapping[LeafPath, int]
    reserve_bytes: int  # that the engine leaves for activations and logits
    kv_token_bytes: int  # of the keys and values of a token, in all layers
    sparse_page_bytes: int  # of what sparse attention keeps beside a page
    sparse_slots_bytes: int  # of what it keeps for all slots
    scheduler: SchedulerConfig | None  # like `runner` None where weights and state leave no room for pages
    runner: RunnerConfig | None

    @property
    def weights_bytes(self) -> int:
        return sum(self.leaf_bytes.values())

    @property
    def state_bytes(self) -> int:
        """Of the state of all slots; 0 where no page fits beside it."""
        runner = self.runner
        if runner is None:
            return 0
        return state_bytes(runner.max_num_seqs, runner.max_pages, self.config.vocab_size) + self.sparse_slots_bytes

    @property
    def pool_bytes(self) -> int:
        runner = self.runner
        if runner is None:
            return 0
        page_bytes = runner.page_size * self.kv_token_bytes + self.sparse_page_bytes
        return runner.num_pages // runner.kv_parallel_size * page_bytes

    @property
    def num_pages(self) -> int:
        """Of all devices together, with those that hold nothing: one for each rank of `kv`."""
        return 0 if self.runner is None else self.runner.num_pages

    @property
    def num_tokens(self) -> int:
        """That the pages of all devices together hold."""
        runner = self.runner
        return 0 if runner is None else (runner.num_pages - runner.kv_parallel_size) * runner.page_size

    def max_batch(self, context: int) -> int:
        """Sequences of this length that the pages hold."""
        if self.runner is None:
            return 0
        page_size = self.runner.page_size
        return self.num_tokens // page_size // -(-context // page_size)

    def max_context(self, batch: int) -> int:
        """Tokens that each of so many sequences may have."""
        if self.runner is None:
            return 0
        page_size = self.runner.page_size
        return self.num_tokens // page_size // batch * page_size


@functools.lru_cache(maxsize=256)  # a plan asks for the same split on several topologies
def _of_a_rank(model: Model, dtype: Any, kv: int, tp: int) -> tuple[ModelConfig, dict[LeafPath, int]]:
    mesh = abstract_mesh(kv, tp)
    return model.config_on(mesh), param_bytes_per_device(model, dtype, mesh)


def memory_of(config: EngineConfig, model: Model, device: DeviceMemory) -> Memory:
    """What an engine with these options would hold on each of these devices.

    Raises:
        ValueError: options that do not fit the model.
    """
    parallel = config.parallel
    own, leaves = _of_a_rank(model, config.model.jax_dtype, parallel.kv_parallel_size, parallel.tensor_parallel_size)
    try:
        scheduler, runner = resolve(config, own, params_bytes=sum(leaves.values()), device=device)
    except NoRoomError:
        scheduler = runner = None
    sparse_page_bytes = sparse_slots_bytes = 0
    if runner is not None:
        sparse_page_bytes, sparse_slots_bytes = sparse_bytes(
            config, own, device.platform, page_size=runner.page_size, max_num_seqs=runner.max_num_seqs,
            max_pages=runner.max_pages,
        )  # fmt: skip
    return Memory(
        config=own,
        leaf_bytes=leaves,
        reserve_bytes=device.limit_bytes - int(device.limit_bytes * config.cache.device_memory_utilization),
        kv_token_bytes=kv_bytes_per_token(own, config.kv_dtype, device.platform),
        sparse_page_bytes=sparse_page_bytes,
        sparse_slots_bytes=sparse_slots_bytes,
        scheduler=scheduler,
        runner=runner,
    )

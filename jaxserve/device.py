"""What is on the devices: parameters, KV cache and slot state, and the programs that work on them.

All state is donated from program to program, so the device runs steps in the order of their calls and never copies the
cache. Where several processes are one engine, each has a `Device`, and all make the same calls.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array

from jaxserve import compile_process
from jaxserve.config import RunnerConfig
from jaxserve.executables import compiled
from jaxserve.layers.kv_cache import KVCache, init_kv_cache
from jaxserve.layers.sampler import Sampled, SamplingState, SequenceState, init_sampling, init_sequences
from jaxserve.layers.sparse.state import init_state
from jaxserve.models.base import Model
from jaxserve.multi_process import Leader, on_all_processes
from jaxserve.programs import Compiler, Programs
from jaxserve.sharding.mesh import EVERYWHERE, on_ranks, placed, put, replicated
from jaxserve.sharding.rules import kv_specs
from jaxserve.step_builder import Rows, State, StepBuilder
from jaxserve.step_programs import (
    SampleShape,
    StepShape,
    forward_step,
    sample_step,
    score_step,
    start_edits,
    start_slots,
    update_masks,
    update_tables,
)

# JAX keeps what it compiled, and its memory maps, by function and for as long as the process lives
STEPS = (forward_step, sample_step, score_step, update_tables, start_slots, start_edits, update_masks)


class Device:
    """The only owner of device state and the only caller of compiled programs."""

    def __init__(
        self,
        model: Model,
        params: dict,
        config: RunnerConfig,
        *,
        kv_dtype: jnp.dtype,
        num_compile_threads: int = 1,
        leader: Leader | None = None,
    ):
        self.model, self.params, self.leader = model, params, leader
        self._head = {name: leaf for name, leaf in params.items() if name != "layers"}
        if leader is not None:
            leader.hold(self)
        self.kv, everywhere = empty_cache(model, config, kv_dtype), replicated(model.mesh)
        self._sequences, self._sampling = put(empty_slots(model, config), everywhere)
        self._passed: dict[int, Array] = {}  # where prefill rows stand between two groups of layers, [T, D], by step
        self._hidden_rows: Array | None = None  # of the last step, [R, D]
        self.compiler = Compiler(num_compile_threads, compile_process.compiler)
        state = State(self.params, self.kv, self._sequences, self._sampling)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        self._build = build = StepBuilder(model, shapes, max_logprobs=config.max_logprobs)
        programs = functools.partial(Programs, compiler=self.compiler, compiled=compiled, announce=self._announce)
        self.forward = programs("forward", build.forward)
        self.sample = programs("sample", build.sample)
        self.score = programs("score", build.score)
        self.update_tables = programs("update_tables", build.update_tables)
        self.start_slots = programs("start_slots", build.start_slots)
        self.start_edits = programs("start_edits", build.start_edits)
        self.update_masks = programs("update_masks", build.update_masks)

    # Calls of programs, which all processes run alike. Whoever calls has seen to it that the program is there

    @on_all_processes
    def run_forward(
        self,
        shape: StepShape,
        step: int,
        ints: np.ndarray,
        below: int | None,
        kept: tuple[int, ...],
        targets: np.ndarray | None,
    ) -> tuple[Array, Sampled | None, Array | None]:
        """Hidden rows to sample from, logprobs of `targets`, and the number of experts read.

        Args:
            below: the step that the prefill rows come from, where they start above the first layer; None = made up.
            kept: those steps whose prefill rows are to stay, this one perhaps among them.
        """
        arguments = (self.params, self.kv, self._sequences, ints)
        if below is not None:
            arguments += (self._passed.pop(below),)
        elif shape.starts_above:
            arguments += (jnp.zeros_like(self._build.hidden(shape.prefill_tokens)),)
        hidden, prefill_hidden, experts_read, self.kv, self._sequences = self.forward.exact(shape)(*arguments)
        passed = {**self._passed, step: prefill_hidden}
        self._passed, self._hidden_rows = {kept_step: passed[kept_step] for kept_step in kept}, hidden
        scored = None
        if targets is not None:
            padded = jnp.pad(prefill_hidden, ((0, len(targets) - len(prefill_hidden)), (0, 0)))
            scored = self.score.exact(Rows(len(targets)))(self._head, padded, targets)
        return hidden, scored, experts_read

    @on_all_processes
    def run_sample(self, key: SampleShape, rows: np.ndarray) -> Sampled:
        program, hidden, self._hidden_rows = self.sample.exact(key), self._hidden_rows, None
        sampled, self._sequences, self._sampling = program(self._head, hidden, rows, self._sequences, self._sampling)
        return sampled

    @on_all_processes
    def run_update_tables(self, rows: np.ndarray) -> None:
        self._sequences = self.update_tables.exact(Rows(len(rows)))(self._sequences, rows)

    @on_all_processes
    def run_start_slots(self, ints: np.ndarray, floats: np.ndarray) -> None:
        program = self.start_slots.exact(Rows(len(ints)))
        self._sequences, self._sampling = program(self._sequences, self._sampling, ints, floats)

    @on_all_processes
    def run_start_edits(self, slot: int, leaves: list[np.ndarray]) -> None:
        row = jax.tree.unflatten(jax.tree.structure(self._sampling.edits), leaves)
        self._sampling = self.start_edits.exact(Rows(1))(self._sampling, np.int32(slot), row)

    @on_all_processes
    def run_update_masks(self, slots: np.ndarray, masks: np.ndarray) -> None:
        self._sampling = self.update_masks.exact(Rows(len(slots)))(self._sampling, slots, masks)

    @on_all_processes
    def prepare(self, name: str, keys: bytes) -> None:
        """Others than process 0 compile these programs too."""
        if self.leader is None:
            table = next(table for table in self.tables if table.name == name)
            kind: Any = {"forward": StepShape, "sample": SampleShape}.get(name, Rows)
            table.request(msgspec.convert(msgspec.msgpack.decode(keys), list[kind]))

    def _announce(self, name: str, keys: list) -> None:
        if self.leader is not None:
            self.prepare(name, msgspec.msgpack.encode(keys))

    def read[T](self, arrays: Iterable[Any], function: Callable[[], T]) -> T:
        """`function()`, which waits for these arrays. Raises EngineDeadError when another process has died."""
        return function() if self.leader is None else self.leader.read(arrays, function)

    @property
    def expert_bytes(self) -> int:
        """Of the weights of one expert of one layer; 0 for a dense model."""
        config = self.model.config
        if not config.num_experts:
            return 0
        layers = self.params["layers"]
        layers = layers.values() if isinstance(layers, dict) else layers
        experts = [(layer["gate_up"], layer["down"]) for layer in layers]
        num_experts = jax.tree.leaves(experts)[0].shape[-3]  # a multiple of the ranks
        return sum(leaf.nbytes for leaf in jax.tree.leaves(experts)) // (config.num_layers * num_experts)

    @property
    def tables(self) -> tuple[Programs, ...]:
        return (
            self.forward, self.sample, self.score, self.update_tables, self.start_slots, self.start_edits,
            self.update_masks,
        )  # fmt: skip

    def close(self) -> None:
        """Ends compiles and lets go of weights, cache and programs: another engine may need the memory."""
        if self.leader is not None:
            self.leader.close()
            if self.leader.has_lost:  # what waits for the dead cannot be freed
                return
        self.compiler.close()
        self.params, self._head, self.kv, self._passed = {}, {}, {}, {}
        for state in jax.tree.leaves((self._sequences, self._sampling)):
            state.delete()
        for table in self.tables:
            table.clear()
        for step in STEPS:  # for other engines this means to trace again
            step.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def empty_cache(model: Model, config: RunnerConfig, dtype: jnp.dtype) -> dict[str, KVCache]:
    """Made where it stays: each rank has its share of the pages, and its heads of them."""
    num_pages = config.num_pages // config.kv_parallel_size

    def make() -> dict[str, KVCache]:
        caches = init_kv_cache(model.config, num_pages=num_pages, page_size=config.page_size, dtype=dtype)
        if model.sparse is None:
            return caches
        state = init_state(
            model.sparse, caches["full"], model.config.head_dim, num_slots=config.max_num_seqs + 1,
            max_pages=config.max_pages,
        )  # fmt: skip
        return {**caches, "full": state}

    return on_ranks(model.mesh, make, lambda: ((), kv_specs(jax.eval_shape(make))))()


def empty_slots(model: Model, config: RunnerConfig) -> tuple[SequenceState, SamplingState]:
    return (
        init_sequences(config.max_num_seqs, config.max_pages),
        init_sampling(config.max_num_seqs, model.config.vocab_size),
    )


def state_shapes(model: Model, params: dict, config: RunnerConfig, kv_dtype: jnp.dtype) -> State:
    """What a `Device` over parameters of these shapes would hold, as shapes."""
    kv, slots = jax.eval_shape(lambda: (empty_cache(model, config, kv_dtype), empty_slots(model, config)))
    everywhere = jax.tree.map(lambda _: EVERYWHERE, slots)
    return State(params, placed(kv, kv_specs(kv), model.mesh), *placed(slots, everywhere, model.mesh))

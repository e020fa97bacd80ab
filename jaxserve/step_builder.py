"""The programs of an engine, made from the shapes of what is on its devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.layers.kv_cache import KVCache
from jaxserve.layers.limits import MAX_STOP_IDS
from jaxserve.layers.sampler import SamplingState, SequenceState
from jaxserve.models.base import Model
from jaxserve.sharding.mesh import replicated
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


@dataclasses.dataclass(frozen=True)
class Rows:
    """The key of a program that only a number of rows tells apart."""

    count: int

    def covers(self, other: "Rows") -> bool:
        return self.count >= other.count

    @property
    def cost(self) -> int:
        return self.count


class State(NamedTuple):
    """What is on the devices, arrays or their shapes; shapes have a sharding each."""

    params: dict
    kv: dict[str, KVCache]
    sequences: SequenceState
    sampling: SamplingState

    @property
    def head(self) -> dict:
        """The parameters outside the layers."""
        return {name: leaf for name, leaf in self.params.items() if name != "layers"}


class StepBuilder:
    """Makes programs: each method one of the key's shape, with `compiled(function, *arguments, **static)`."""

    def __init__(self, model: Model, state: State, *, max_logprobs: int):
        self._model, self._state, self._max_logprobs = model, state, max_logprobs
        self._head, self._everywhere = state.head, replicated(model.mesh)

    def forward(self, shape: StepShape, compiled: Any) -> Callable:
        params, kv, sequences, _ = self._state
        arguments = (params, kv, sequences, int32(shape.num_ints))
        if shape.starts_above:
            arguments += (self.hidden(shape.prefill_tokens),)
        return compiled(forward_step, self._model, *arguments, shape=shape)

    def sample(self, shape: SampleShape, compiled: Any) -> Callable:
        *_, sequences, sampling = self._state
        arguments = (self._head, self.hidden(shape.rows), int32(shape.rows), sequences, sampling)
        return compiled(sample_step, self._model, *arguments, features=shape.features)

    def score(self, rows: Rows, compiled: Any) -> Callable:
        arguments = (self._head, self.hidden(rows.count), int32(rows.count))
        return compiled(score_step, self._model, *arguments, num_logprobs=self._max_logprobs)

    def update_tables(self, rows: Rows, compiled: Any) -> Callable:
        return compiled(update_tables, self._state.sequences, int32(rows.count, 3))

    def start_slots(self, rows: Rows, compiled: Any) -> Callable:
        *_, sequences, sampling = self._state
        floats = jax.ShapeDtypeStruct((rows.count, 6), jnp.float32)
        return compiled(start_slots, sequences, sampling, int32(rows.count, 5 + MAX_STOP_IDS), floats)

    def start_edits(self, _: Rows, compiled: Any) -> Callable:
        sampling = self._state.sampling
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sampling.edits)
        return compiled(start_edits, sampling, int32(), row)

    def update_masks(self, rows: Rows, compiled: Any) -> Callable:
        sampling = self._state.sampling
        masks = jax.ShapeDtypeStruct((rows.count, sampling.edits.allowed.shape[1]), jnp.uint32)
        return compiled(update_masks, sampling, int32(rows.count), masks)

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """Of so many rows, between the programs of a step."""
        shape, dtype = (rows, self._model.config.hidden_size), self._head["final_norm"].dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._everywhere)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)

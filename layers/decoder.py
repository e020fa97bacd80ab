"""The decoder stack: how rows pass the layers, whichever form the parameters have.

`params["layers"]` is either a tuple with one dict a layer (CPU: the loop is unrolled, since a slice of a stack is a
copy there), or one dict of stacks `[L_kind, ...]` for each layer kind (GPU, TPU: the loop stays a loop over whole
periods of the pattern of kinds, and its variable indexes the stacks and the KV cache). Only `run_layers` knows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxserve.layers.attention import AttentionSpec, attend, on_hopper, prepare_batch
from jaxserve.layers.dense import PlainNorm, dense_weights, layer_numbers, run_dense_layers
from jaxserve.layers.kv_cache import KVCache, StepBatch
from jaxserve.layers.sparse.hooks import LayerPolicies, SparseAttention
from jaxserve.layers.sparse.state import begin_step
from jaxserve.pallas_kernels.paged_attention import Implementation
from jaxserve.pallas_kernels.target import layers_a_turn

Params = Mapping[str, Any]
Carry = tuple[Array, dict[str, KVCache], Array | None]  # rows [T, D], cache, i32 [] experts read (None: has none)


@dataclasses.dataclass(kw_only=True)
class Attend:
    """What a layer sees of the step: attention over its rows, and which of these are real."""

    cache: KVCache  # of the layer's kind; with the layer's keys and values in it once it was called
    index: int | Array  # of the layer in its kind
    batch: StepBatch  # prepared
    spec: AttentionSpec
    implementation: Implementation | None
    experts_read: Array | None  # i32 [], by all layers up to now; None: the model has no experts

    def __call__(self, heads: Array) -> Array:
        """Attention of heads of q, k and v [T, N + 2 K, H]: [T, N, H]."""
        out, self.cache = attend(heads, self.cache, self.index, self.batch, self.spec, self.implementation)
        return out

    @property
    def real(self) -> Array:
        """bool [T]: other rows are padding. What a layer makes of them does not matter."""
        assert self.batch.real is not None, "not prepared"
        return self.batch.real

    def count_experts(self, num_experts: Array) -> None:
        """Says that the layer reads the weights of so many experts."""
        assert self.experts_read is not None, "the model says that it has none"
        self.experts_read += num_experts


@runtime_checkable
class DecoderModel(Protocol):
    """What the stack asks of a model; `jaxserve.models.base.Model` is one."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    @property
    def plain_norm(self) -> PlainNorm | None: ...  # None: layers are not plain, see `jaxserve.layers.dense`
    @property
    def has_experts(self) -> bool: ...
    @property
    def sparse(self) -> SparseAttention | None: ...
    def attention_spec(self, kind: str) -> AttentionSpec: ...
    def embed(self, params: Params, token_ids: Array) -> Array: ...
    def layer(self, p: Params, kind: str, x: Array, attend: Attend) -> Array: ...
    def final_norm(self, params: Params, x: Array) -> Array: ...


def forward(
    model: DecoderModel,
    params: Params,
    kv: dict[str, KVCache],
    batch: StepBatch,
    *,
    span: tuple[int, int] | None = None,
    frontier: Float[Array, "T D"] | None = None,
    implementation: Implementation | None = None,
) -> Carry:
    """Hidden states of every row of the step, decode rows first, and the cache with their keys and values.

    Third, for a mixture of experts, how many experts all layers have read, i32 [].

    Args:
        span: layers `[lo, hi)` that the prefill rows pass, static; None = all. Decode rows always pass all.
        frontier: where the prefill rows stand before layer `lo`; None = at their embedding (lo must be 0).
    Returns:
        Decode rows after the final norm. Prefill rows likewise when the span ends at the last layer; else their
        new frontier, before any norm.
    """
    num_layers, cut = len(model.layer_kinds), batch.num_decode_rows
    lo, hi = span or (0, num_layers)
    assert frontier is not None or lo == 0, "prefill rows that start above layer 0 need their frontier"
    if frontier is None:
        rows = model.embed(params, batch.token_ids)
    else:
        rows = jnp.concatenate([model.embed(params, batch.token_ids[:cut]), frontier])

    region = batch.decode or batch.prefill
    if "full" in kv and region is not None:
        full = begin_step(
            model.sparse, kv["full"], model.attention_spec("full").head_dim,
            num_decode=cut, num_prefill=rows.shape[0] - cut, max_pages=region.page_table.shape[1],
        )  # fmt: skip
        kv = {**kv, "full": full}

    def run(carry: Carry, part: StepBatch, lo: int, hi: int) -> Carry:
        if lo == hi or not carry[0].shape[0]:
            return carry
        for first, last, policies in model.sparse.segments(lo, hi) if model.sparse else [(lo, hi, None)]:
            carry = run_alike(carry, part, first, last, policies)
        return carry

    def run_alike(carry: Carry, part: StepBatch, lo: int, hi: int, policies: LayerPolicies | None) -> Carry:
        rows, kv, experts_read = carry
        batches = {k: prepare_batch(part, kv[k], model.attention_spec(k), implementation, policies) for k in kv}
        if dense := _dense_layers(model, params["layers"], batches, rows.shape[0]):
            kind, weights, norm = dense
            spec = model.attention_spec(kind)
            rows, cache = run_dense_layers(weights, norm, lo, hi, rows, kv[kind], batches[kind], spec, implementation)
            return rows, {kind: cache}, experts_read
        body = _layer_body(model, batches, implementation)
        return run_layers(body, params["layers"], model.layer_kinds, lo, hi, carry)

    def run_decode(carry: Carry, lo: int, hi: int) -> Carry:
        rows, kv, experts_read = carry
        decode, kv, experts_read = run((rows[:cut], kv, experts_read), _decode_part(batch), lo, hi)
        return jnp.concatenate([decode, rows[cut:]]), kv, experts_read

    carry = (rows, kv, jnp.int32(0) if model.has_experts else None)
    carry = run_decode(carry, 0, lo)
    carry = run(carry, batch, lo, hi)
    rows, kv, experts_read = run_decode(carry, hi, num_layers)
    kv = {kind: dataclasses.replace(cache, chosen=None) for kind, cache in kv.items()}
    normed = model.final_norm(params, rows)
    if hi < num_layers:
        normed = jnp.concatenate([normed[:cut], rows[cut:]])
    return normed, kv, experts_read


def _dense_layers(model: DecoderModel, layers: Any, batches: dict[str, StepBatch], num_rows: int):
    """The one kind of layer, its weights and its norm, if all between attention and attention is one kernel here."""
    norm, kinds = model.plain_norm, list(batches)
    if norm is None or len(kinds) > 1 or isinstance(layers, tuple | list):
        return None
    (kind,) = kinds
    if not on_hopper(batches[kind].decode, batches[kind].prefill):
        return None
    weights = dense_weights(layers[kind], num_rows)
    return None if weights is None else (kind, weights, norm)


def _decode_part(batch: StepBatch) -> StepBatch:
    """The step without its prefill region."""
    cut = batch.num_decode_rows
    return StepBatch(
        token_ids=batch.token_ids[:cut],
        positions=batch.positions[:cut],
        page_ids=batch.page_ids[:cut],
        page_offsets=batch.page_offsets[:cut],
        decode=batch.decode,
        prefill=None,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedLayer(Mapping[str, Any]):
    """The parameters of one layer of a stack. A leaf is sliced when it is asked for; a kernel may take the stack."""

    stack: dict[str, Any]  # [L, ...]
    index: int | Array
    number: Array  # the same, in memory: see `layer_numbers`

    def __getitem__(self, name: str) -> Any:
        return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, self.index, keepdims=False), self.stack[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack)

    def __len__(self) -> int:
        return len(self.stack)


def _layer_body(model: DecoderModel, batches: dict[str, StepBatch], implementation: Implementation | None):
    """`body(kind, p, index, carry) -> carry` for `run_layers`; `index` counts layers of the same kind."""

    def body(kind: str, p: Params, index: int | Array, carry: Carry) -> Carry:
        x, kv, experts_read = carry
        attention = Attend(
            cache=kv[kind],
            index=index,
            batch=batches[kind],
            spec=model.attention_spec(kind),
            implementation=implementation,
            experts_read=experts_read,
        )
        x = model.layer(p, kind, x, attention)
        return x, {**kv, kind: attention.cache}, attention.experts_read

    return body


def run_layers(body: Callable[..., Any], layers: Any, kinds: Sequence[str], lo: int, hi: int, carry: Any) -> Any:
    """`carry = body(kinds[i], params of layer i, index of layer i in its kind, carry)` for i in `[lo, hi)`."""
    # Under a jit of its own the body is traced and lowered once a kind, not once a layer; XLA inlines the calls
    body = jax.jit(body, static_argnums=0)
    if not isinstance(layers, tuple | list):
        return _run_stacked(body, layers, kinds, lo, hi, carry)
    for i in range(lo, hi):
        carry = body(kinds[i], layers[i], np.int32(_count(kinds[:i], kinds[i])), carry)
    return carry


def _run_stacked(body: Callable[..., Any], layers: Any, kinds: Sequence[str], lo: int, hi: int, carry: Any) -> Any:
    """Whole repeating periods of `kinds` in one loop, the layers before and after them unrolled."""
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    numbers = layer_numbers(len(kinds))

    def one(turn: int | Array, i: int, carry: Any) -> Any:
        """Layer `turn * period + i`."""
        index = turn * _count(kinds[:period], kinds[i]) + _count(kinds[:i], kinds[i])
        number = jax.lax.dynamic_index_in_dim(numbers, index, keepdims=False)
        return body(kinds[i], StackedLayer(stack=layers[kinds[i]], index=index, number=number), number, carry)

    def whole_period(turn: int | Array, carry: Any) -> Any:
        for i in range(period):
            carry = one(turn, i, carry)
        return carry

    first = -(-lo // period)
    last = max(first, hi // period)
    for i in range(lo, min(hi, first * period)):
        carry = one(i // period, i % period, carry)
    if first < last:
        unroll = max(1, min(layers_a_turn() // period, last - first))
        carry = jax.lax.fori_loop(first, last, whole_period, carry, unroll=unroll)
    for i in range(last * period, hi):
        carry = one(i // period, i % period, carry)
    return carry


def _count(kinds: Sequence[str], kind: str) -> int:
    return list(kinds).count(kind)


def stack_layers(layers: Sequence[Params], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One stack `[L_kind, ...]` a leaf for each layer kind, from one dict a layer."""
    by_kind = {kind: [p for p, k in zip(layers, kinds, strict=True) if k == kind] for kind in dict.fromkeys(kinds)}
    return {kind: jax.tree.map(lambda *leaves: jnp.stack(leaves), *same) for kind, same in by_kind.items()}

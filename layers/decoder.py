"""The decoder stack: how rows pass the layers, whichever form the parameters have.

`params["layers"]` is either a tuple with one dict a layer (CPU: the loop is unrolled, since a slice of a stack is a
copy there), or one dict of stacks `[L_kind, ...]` for each layer kind (GPU, TPU: the loop stays a loop over whole
periods of the pattern of kinds, and its variable indexes the stacks and the KV cache). Only `run_layers` knows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxserve.layers.attention import AttentionSpec, attend
from jaxserve.layers.kv_cache import KVCache, StepBatch
from jaxserve.pallas_kernels.paged_attention import Implementation

Params = Mapping[str, Any]
Attend = Callable[[Array, Array, Array], Array]  # q [T, N, H], k [T, K, H], v [T, K, H] -> [T, N, H]


@runtime_checkable
class DecoderModel(Protocol):
    """What the stack asks of a model; `jaxserve.models.base.Model` is one."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    def attention_spec(self, kind: str) -> AttentionSpec: ...
    def embed(self, params: Params, token_ids: Array) -> Array: ...
    def layer(self, p: Params, kind: str, x: Array, positions: Array, attend: Attend) -> Array: ...
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
) -> tuple[Float[Array, "rows D"], dict[str, KVCache]]:
    """Hidden states of every row of the step, decode rows first, and the cache with their keys and values.

    Args:
        span: layers `[lo, hi)` that the prefill rows pass, static; None = all. Decode rows always pass all.
        frontier: where the prefill rows stand before layer `lo`; None = at their embedding (lo must be 0).
    Returns:
        Decode rows after the final norm. Prefill rows likewise when the span ends at the last layer; else their
        new frontier, before any norm.
    """
    num_layers = len(model.layer_kinds)
    lo, hi = span or (0, num_layers)
    cut = batch.num_decode_rows
    x = model.embed(params, batch.token_ids)
    decode, prefill = x[:cut], x[cut:] if frontier is None else frontier
    assert frontier is not None or lo == 0, "prefill rows that start above layer 0 need their frontier"

    def run(rows: Array, kv: dict[str, KVCache], part: StepBatch, lo: int, hi: int):
        body = _layer_body(model, part, implementation)
        return run_layers(body, params["layers"], model.layer_kinds, lo, hi, (rows, kv))

    if cut == 0:
        prefill, kv = run(prefill, kv, batch, lo, hi)
    elif lo == 0 and hi == num_layers:
        return_rows, kv = run(x, kv, batch, lo, hi)
        return model.final_norm(params, return_rows), kv
    else:
        decode_only = _decode_part(batch)
        decode, kv = run(decode, kv, decode_only, 0, lo)
        both, kv = run(jnp.concatenate([decode, prefill]), kv, batch, lo, hi)
        decode, prefill = both[:cut], both[cut:]
        decode, kv = run(decode, kv, decode_only, hi, num_layers)
    if hi == num_layers:
        return model.final_norm(params, jnp.concatenate([decode, prefill])), kv
    return jnp.concatenate([model.final_norm(params, decode), prefill]), kv


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


def _layer_body(model: DecoderModel, batch: StepBatch, implementation: Implementation | None):
    """`body(kind, p, index, (x, kv)) -> (x, kv)` for `run_layers`; `index` counts layers of the same kind."""

    def body(kind: str, p: Params, index: int | Array, carry: tuple[Array, dict[str, KVCache]]):
        x, kv = carry
        cache = kv[kind]

        def attend_and_write(q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            out, cache = attend(q, k, v, cache, index, batch, model.attention_spec(kind), implementation)
            return out

        x = model.layer(p, kind, x, batch.positions, attend_and_write)
        return x, {**kv, kind: cache}

    return body


def run_layers(body: Callable[..., Any], layers: Any, kinds: Sequence[str], lo: int, hi: int, carry: Any) -> Any:
    """`carry = body(kinds[i], params of layer i, index of layer i in its kind, carry)` for i in `[lo, hi)`."""
    if isinstance(layers, tuple | list):
        for i in range(lo, hi):
            carry = body(kinds[i], layers[i], list(kinds[:i]).count(kinds[i]), carry)
        return carry
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    first, last = -(-lo // period), hi // period  # whole periods inside [lo, hi)

    def one(i: int, turn: int | Array, carry: Any) -> Any:
        """Layer `turn * period + i`."""
        kind = kinds[i]
        index = turn * list(kinds[:period]).count(kind) + list(kinds[:i]).count(kind)
        p = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), layers[kind])
        return body(kind, p, index, carry)

    def whole_period(turn: Array, carry: Any) -> Any:
        for i in range(period):
            carry = one(i, turn, carry)
        return carry

    if first >= last:
        head, tail = range(lo, hi), range(0)
    else:
        head, tail = range(lo, first * period), range(last * period, hi)
    for i in head:
        carry = one(i % period, i // period, carry)
    if first < last:
        carry = jax.lax.fori_loop(first, last, whole_period, carry, unroll=min(max(1, 4 // period), last - first))
    for i in tail:
        carry = one(i % period, i // period, carry)
    return carry


def stack_layers(layers: Sequence[Params], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One stack `[L_kind, ...]` a leaf for each layer kind, from one dict a layer."""
    by_kind = {kind: [p for p, k in zip(layers, kinds, strict=True) if k == kind] for kind in dict.fromkeys(kinds)}
    return {kind: jax.tree.map(lambda *leaves: jnp.stack(leaves), *same) for kind, same in by_kind.items()}

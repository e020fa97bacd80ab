"""Plain dense layers for few rows: attention, and one kernel from there to the attention of the next layer.

What is plain: pre-norm attention and a gated MLP with SiLU, each with its residual, and nothing between the projection
to queries, keys and values and their rotation. The kernel crosses the border between two layers, which is why this is
not a `layer` of a model but another way through all of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxserve.layers.attention import AttentionSpec, attend
from jaxserve.layers.kv_cache import KVCache, StepBatch
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import rms_norm
from jaxserve.pallas_kernels.dense_layer import DenseWeights, dense_layer, fits_rows, unsupported
from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.paged_attention import Implementation


class PlainNorm(NamedTuple):
    """`rms_norm`'s settings in a model whose layers are all plain."""

    eps: float
    offset: float


def dense_weights(stack: Any, num_rows: int) -> DenseWeights | None:
    """The weights of plain layers, if the kernel serves so many rows with them. It falls back with a word, once."""
    if not fits_rows(num_rows):
        return None
    weights = DenseWeights(**{name: stack[name] for name in DenseWeights._fields})
    reason = unsupported(weights, num_rows)
    if reason:
        say_once("the dense part of layers with few rows", reason)
    return None if reason else weights


def run_dense_layers(
    weights: DenseWeights,
    norm: PlainNorm,
    lo: int,
    hi: int,
    x: Float[Array, "R D"],
    kv: KVCache,
    batch: StepBatch,
    spec: AttentionSpec,
    implementation: Implementation | None,
) -> tuple[Float[Array, "R D"], KVCache]:
    """The residual stream after layers `[lo, hi)`, and the cache with their keys and values; lo < hi."""
    numbers = layer_numbers(weights.o.shape[0])

    @jax.jit
    def one(index: Array, x: Array, heads: Array, progress: Array, kv: KVCache):
        heads = heads.reshape(x.shape[0], -1, kv.k.shape[-1])
        attended, kv = attend(heads, kv, index, batch, spec, implementation)
        attended = attended.reshape(x.shape[0], -1)
        x, heads, progress = dense_layer(attended, x, weights, index, progress, eps=norm.eps, offset=norm.offset)
        return x, heads, progress, kv

    def body(i: int | Array, carry: tuple) -> tuple:
        return one(jax.lax.dynamic_index_in_dim(numbers, i, keepdims=False), *carry)

    heads = linear(rms_norm(x, weights.input_norm[lo], norm.eps, offset=norm.offset), weights.qkv[lo])
    carry = (x, heads, jnp.zeros(2, jnp.int32), kv)
    x, _, _, kv = jax.lax.fori_loop(lo, hi, body, carry, unroll=min(8, hi - lo))
    return x, kv


def layer_numbers(count: int) -> Array:
    """i32 [count]. A kernel reads its layer's number from memory: a slice of what is there already costs nothing, where
    the number itself would take a kernel to write.
    """
    return jax.lax.optimization_barrier(jnp.arange(count, dtype=jnp.int32))

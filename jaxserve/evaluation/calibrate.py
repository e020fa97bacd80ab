"""What policies must know of a model beforehand, found by passes over a text."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.evaluation.watch import as_batch
from jaxserve.layers.attention import prepare_batch, rotate_and_write
from jaxserve.layers.decoder import Attend
from jaxserve.layers.kv_cache import KVCache, StepBatch, init_kv_cache
from jaxserve.models import Model
from jaxserve.pallas_kernels.paged_attention import paged_attention
from jaxserve.weights import LoadedModel

PAGE_SIZE = 16


def calibrate(
    loaded: LoadedModel, policy: str, token_ids: Sequence[int], *, window: int = 512, num_channels: int | None = None
) -> dict[str, Any]:
    """The policy with what it must know of this model, as `sparse_attention` takes it.

    Args:
        loaded: as a tuple of layers, on one device.
        token_ids: of a text; it is read in pieces of `window` tokens, what is left over at the end is not.
        num_channels: for double_sparsity: channels of each layer and KV head; None = an eighth of them.
    Raises:
        ValueError: a policy that needs nothing or is unknown, a text shorter than a piece, or more channels than there
            are.
    """
    if policy not in CALIBRATIONS:
        raise ValueError(f"policy must be one that is calibrated, {sorted(CALIBRATIONS)}, got {policy!r}")
    if len(token_ids) < window:
        raise ValueError(f"text must have at least {window} tokens, got {len(token_ids)}")
    return {"policy": policy, **CALIBRATIONS[policy](loaded, _pieces(token_ids, window), num_channels)}


def _pieces(token_ids: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(token_ids) - window + 1, window):
        yield token_ids[start : start + window]


def rank_channels(loaded: LoadedModel, pieces: Iterator[Sequence[int]], num_channels: int | None) -> dict[str, Any]:
    """For each layer and KV head the channels with the largest mean `|q k|`, of queries with their own keys."""
    head_dim = loaded.model.config.head_dim
    num_channels = max(1, head_dim // 8) if num_channels is None else num_channels
    if not 1 <= num_channels <= head_dim:
        raise ValueError(f"num_channels must be within the head's {head_dim}, got {num_channels}")
    total = sum(np.stack(products_by_layer(loaded, piece)) for piece in pieces)  # [L, K, H]
    order = np.argsort(-total, axis=-1, kind="stable")
    return {"channels": order[..., :num_channels].tolist()}


CALIBRATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {"double_sparsity": rank_channels}


def products_by_layer(loaded: LoadedModel, token_ids: Sequence[int]) -> list[np.ndarray]:
    """Mean `|q k|` over the tokens and a group's heads, f32 [K, H], for each layer without a sliding window."""
    model, params = loaded.model, loaded.params
    batch, num_pages = as_batch(token_ids, len(token_ids), PAGE_SIZE)
    dtype = params["final_norm"].dtype
    kv = init_kv_cache(model.config, num_pages=num_pages + 1, page_size=PAGE_SIZE, dtype=dtype)
    x, found = model.embed(params, batch.token_ids), []
    for i, kind in enumerate(model.layer_kinds):
        index = np.int32(model.layer_kinds[:i].count(kind))
        x, kv[kind], products = _layer(model, kind, params["layers"][i], x, kv[kind], index, batch)
        if kind == "full":
            found.append(np.asarray(products))
    return found


@dataclasses.dataclass(kw_only=True)
class _Measuring(Attend):
    """Attention that keeps the products of queries and keys."""

    products: Array | None = None

    def __call__(self, heads: Array) -> Array:
        batch, spec = self.batch, self.spec
        q, self.cache = rotate_and_write(heads, self.cache, self.index, batch, spec.num_kv_heads)
        T, H = q.shape[0], q.shape[2]
        k = self.cache.k[self.index, batch.page_ids, batch.page_offsets].reshape(T, -1, 1, H).astype(jnp.float32)
        products = jnp.mean(jnp.abs(q.astype(jnp.float32).reshape(T, k.shape[1], -1, H) * k), axis=(0, 2))
        self.products = products[: spec.num_kv_heads]
        options = {"scale": spec.scale, "sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}
        assert batch.prefill is not None
        return paged_attention(q, self.cache, self.index, batch.prefill, **options)[:, : spec.num_heads]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _layer(
    model: Model, kind: str, p: dict[str, Any], x: Array, kv: KVCache, index: Array, batch: StepBatch
) -> tuple[Array, KVCache, Array | None]:
    spec = model.attention_spec(kind)
    attention = _Measuring(
        cache=kv,
        index=index,
        batch=prepare_batch(batch, kv, spec),
        spec=spec,
        implementation=None,
        experts_read=jnp.int32(0) if model.has_experts else None,
    )
    x = model.layer(p, kind, x, attention)
    return x, attention.cache, attention.products

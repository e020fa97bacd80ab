"""What policies must know of a model beforehand, found by passes over a text."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.evaluation.anchors import choose_anchors, page_masses, similarity
from jaxserve.evaluation.watch import as_batch
from jaxserve.layers.attention import AttentionSpec, prepare_batch, rotate_and_write
from jaxserve.layers.decoder import Attend
from jaxserve.layers.kv_cache import KVCache, StepBatch, init_kv_cache
from jaxserve.layers.linear import linear
from jaxserve.models import Model
from jaxserve.pallas_kernels.paged_attention import paged_attention
from jaxserve.weights import LoadedModel

PAGE_SIZE = 16
Pieces = Iterator[Sequence[int]]


def calibrate(
    loaded: LoadedModel,
    policy: str,
    token_ids: Sequence[int],
    *,
    window: int = 512,
    num_channels: int | None = None,
    num_anchors: int = 5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The policy with what it must know of this model, as `sparse_attention` takes it.

    Args:
        loaded: as a tuple of layers, on one device.
        token_ids: of a text; it is read in pieces of `window` tokens, what is left over at the end is not.
        num_channels: for double_sparsity: channels of each layer and KV head; None = an eighth of them.
        num_anchors: for kascade: layers that choose, the first one included.
        on_progress: called before each piece and at the end, with how many are done and how many there are.
    Raises:
        ValueError: a policy that needs nothing or is unknown, a text shorter than a piece, more channels or anchors
            than there are, or a model that the policy is not for.
    """
    if policy not in CALIBRATIONS:
        raise ValueError(f"policy must be one that is calibrated, {sorted(CALIBRATIONS)}, got {policy!r}")
    if len(token_ids) < window:
        raise ValueError(f"text must have at least {window} tokens, got {len(token_ids)}")
    count = len(token_ids) // window

    def pieces() -> Pieces:
        for i in range(count):
            on_progress(i, count)
            yield token_ids[i * window : (i + 1) * window]
        on_progress(count, count)

    size = num_channels if policy == "double_sparsity" else num_anchors
    return {"policy": policy, **CALIBRATIONS[policy](loaded, pieces(), size)}


def rank_channels(loaded: LoadedModel, pieces: Pieces, num_channels: int | None) -> dict[str, Any]:
    """For each layer and KV head the channels with the largest mean `|q k|`, of queries with their own keys."""
    head_dim = loaded.model.config.head_dim
    num_channels = max(1, head_dim // 8) if num_channels is None else num_channels
    if not 1 <= num_channels <= head_dim:
        raise ValueError(f"num_channels must be within the head's {head_dim}, got {num_channels}")
    total = sum(np.stack([products(seen) for seen in pass_over(loaded, piece)]) for piece in pieces)  # [L, K, H]
    order = np.argsort(-total, axis=-1, kind="stable")
    return {"channels": order[..., :num_channels].tolist()}


def find_anchors(loaded: LoadedModel, pieces: Pieces, num_anchors: int) -> dict[str, Any]:
    """Layers that choose, and which of their heads the others follow, as `anchors` has it."""
    kinds, spec = loaded.model.layer_kinds, loaded.model.attention_spec("full")
    if set(kinds) != {"full"}:
        raise ValueError("kascade is for models without sliding windows; this one has some")
    if not 1 <= num_anchors <= len(kinds):
        raise ValueError(f"num_anchors must be within the model's {len(kinds)} layers, got {num_anchors}")
    alike, importance = [], []
    for piece in pieces:
        layers = [
            (np.asarray(page_masses(seen.q, seen.k, spec.scale, spec.soft_cap, PAGE_SIZE)), changed(seen))
            for seen in pass_over(loaded, piece)
        ]
        masses, changes = zip(*layers, strict=True)
        alike.append(similarity(masses, PAGE_SIZE))
        importance.append(changes)
    anchors, heads = choose_anchors(np.mean(alike, axis=0), np.mean(importance, axis=0), num_anchors)
    return {"anchors": anchors, "heads": heads}


CALIBRATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {"double_sparsity": rank_channels, "kascade": find_anchors}


class Seen(NamedTuple):
    """What a pass sees in a layer."""

    x: Array  # [T, D], before the layer
    attended: Array  # [T, D], what attention adds to it, before any norm
    q: Array  # f32 [T, K, G, H], rotated
    k: Array  # f32 [T, K, H], likewise


def products(seen: Seen) -> np.ndarray:
    """Mean `|q k|` over the tokens and a group's heads, f32 [K, H]."""
    return np.asarray(jnp.mean(jnp.abs(seen.q * seen.k[:, :, None]), axis=(0, 2)))


def changed(seen: Seen) -> float:
    """One less the mean cosine of a layer's input and of that with what attention adds."""
    before, after = (np.asarray(x, np.float64) for x in (seen.x, seen.x + seen.attended))
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    return float(1 - np.mean(np.sum(before * after, axis=1) / np.maximum(lengths, 1e-30)))


def pass_over(loaded: LoadedModel, token_ids: Sequence[int]) -> Iterator[Seen]:
    """Each layer without a sliding window."""
    model, params = loaded.model, loaded.params
    batch, num_pages = as_batch(token_ids, len(token_ids), PAGE_SIZE)
    dtype = params["final_norm"].dtype
    kv = init_kv_cache(model.config, num_pages=num_pages + 1, page_size=PAGE_SIZE, dtype=dtype)
    x = model.embed(params, batch.token_ids)
    for i, kind in enumerate(model.layer_kinds):
        index = np.int32(model.layer_kinds[:i].count(kind))
        x, kv[kind], seen = _layer(model, kind, params["layers"][i], x, kv[kind], index, batch)
        if kind == "full":
            yield seen


@dataclasses.dataclass(kw_only=True)
class _Measuring(Attend):
    """Attention that keeps its queries, keys and output."""

    kept: tuple[Array, Array, Array] | None = None

    def __call__(self, heads: Array) -> Array:
        batch, spec = self.batch, self.spec
        q, self.cache = rotate_and_write(heads, self.cache, self.index, batch, spec.num_kv_heads)
        assert batch.prefill is not None
        options = {"scale": spec.scale, "sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}
        out = paged_attention(q, self.cache, self.index, batch.prefill, **options)[:, : spec.num_heads]
        keys = self.cache.k[self.index, batch.page_ids, batch.page_offsets].reshape(q.shape[0], -1, q.shape[2])
        self.kept = q[:, : spec.num_heads], keys[:, : spec.num_kv_heads], out
        return out


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _layer(
    model: Model, kind: str, p: dict[str, Any], x: Array, kv: KVCache, index: Array, batch: StepBatch
) -> tuple[Array, KVCache, Seen]:
    spec: AttentionSpec = model.attention_spec(kind)
    attention = _Measuring(
        cache=kv,
        index=index,
        batch=prepare_batch(batch, kv, spec),
        spec=spec,
        implementation=None,
        experts_read=jnp.int32(0) if model.has_experts else None,
    )
    after = model.layer(p, kind, x, attention)
    assert attention.kept is not None
    q, k, out = attention.kept
    T, K, H = k.shape
    attended = linear(out.reshape(T, -1), p["o"])
    q, k = q.reshape(T, K, -1, H).astype(jnp.float32), k.astype(jnp.float32)
    return after, attention.cache, Seen(x, attended, q, k)

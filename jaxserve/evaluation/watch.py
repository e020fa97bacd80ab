"""One pass of a model over a text, its last part as an answer: what it says there, and what its attention reads.

An answer in a prefill region goes through the decode policy row by row, as it does when the engine computes it again.
So one pass over a known text tells what decoding it token by token would.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.layers.attention import prepare_batch, rotate_and_write
from jaxserve.layers.decoder import Attend
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch, init_kv_cache
from jaxserve.layers.sparse import LayerPolicies, Layout, SparseAttention
from jaxserve.layers.sparse.attend import attend_rows, rows_by_policy, select_rows
from jaxserve.layers.sparse.selection import tables_of
from jaxserve.layers.sparse.state import init_state
from jaxserve.models import Model
from jaxserve.pallas_kernels.paged_attention import paged_attention
from jaxserve.weights import LoadedModel


class Watched(NamedTuple):
    """What a model says of an answer of T tokens."""

    logprobs: np.ndarray  # f32 [T, V], of each token of the answer, by those before it
    recall: float  # share of dense attention's mass on what a token reads, mean of tokens with a policy, heads, layers
    density: float  # share of the positions before it that a token reads, mean likewise

    def nll(self, answer: Sequence[int]) -> float:
        """Mean negative log-likelihood of the answer's tokens, in nats."""
        return float(-np.mean(self.logprobs[np.arange(len(answer)), np.asarray(answer)]))

    def kl_from(self, truth: "Watched") -> float:
        """Mean KL(truth || this), in nats."""
        return float(np.mean(np.sum(np.exp(truth.logprobs) * (truth.logprobs - self.logprobs), axis=-1)))

    def says(self, answer: Sequence[int]) -> bool:
        """Whether greedy decoding ends with exactly these tokens."""
        return self.logprobs[-len(answer) :].argmax(axis=-1).tolist() == list(answer)


def watch(
    loaded: LoadedModel,
    sparse: SparseAttention | None,
    token_ids: Sequence[int],
    num_prompt: int,
    *,
    page_size: int = 16,
) -> Watched:
    """The tokens from `num_prompt` on are the answer; a model loaded as a tuple of layers, on one device.

    Raises:
        ValueError: policies that do not fit the model or the page size, or that drop tokens, or a text without a prompt
            or an answer.
    """
    if not 0 < num_prompt < len(token_ids):
        raise ValueError(f"num_prompt must be within the text of {len(token_ids)} tokens, got {num_prompt}")
    model, params = loaded.model, loaded.params
    if sparse is not None and sparse.drops:
        raise ValueError(f"an evaluation takes policies that select pages, got one that drops tokens: {sparse.decode}")
    if sparse is not None:
        config = model.config
        sparse.check(page_size, Layout(config.layer_kinds, config.num_kv_heads, 1, config.kv_head_copies))
    batch, num_pages = _as_batch(token_ids, num_prompt, page_size)
    dtype = params["final_norm"].dtype
    kv = init_kv_cache(model.config, num_pages=num_pages + 1, page_size=page_size, dtype=dtype)
    if sparse is not None:
        kv["full"] = init_state(sparse, kv["full"], model.config.head_dim, num_slots=1, max_pages=num_pages)
    x, shares = model.embed(params, batch.token_ids), []
    num_layers = len(model.layer_kinds)
    for lo, hi, policies in sparse.segments(0, num_layers) if sparse else [(0, num_layers, None)]:
        for i in range(lo, hi):
            kind = model.layer_kinds[i]
            index = np.int32(model.layer_kinds[:i].count(kind))
            x, kv[kind], found = _layer(model, kind, policies, params["layers"][i], x, kv[kind], index, batch)
            shares += found
    logits = model.logits(params, model.final_norm(params, x[num_prompt - 1 : -1]))
    recall, density = np.mean(np.asarray(shares), axis=0) if shares else (1.0, 1.0)
    return Watched(np.asarray(jax.nn.log_softmax(logits)), float(recall), float(density))


def _as_batch(token_ids: Sequence[int], num_prompt: int, page_size: int) -> tuple[StepBatch, int]:
    """The text as one prefill step of slot 0, and its pages; they begin with page 1."""
    num_tokens = len(token_ids)
    positions, num_pages = jnp.arange(num_tokens), -(-num_tokens // page_size)
    region = AttentionBatch(
        page_table=1 + jnp.arange(num_pages)[None],
        kv_lens=jnp.array([num_tokens]),
        cu_q_lens=jnp.array([0, num_tokens]),
        slots=jnp.zeros(1, jnp.int32),
        prompt_lens=jnp.array([num_prompt]),
    )
    batch = StepBatch(
        token_ids=jnp.asarray(token_ids, jnp.int32),
        positions=positions,
        page_ids=1 + positions // page_size,
        page_offsets=positions % page_size,
        decode=None,
        prefill=region,
    )
    return batch, num_pages


@dataclasses.dataclass(kw_only=True)
class _Watching(Attend):
    """Attention that also keeps, for each policy, [recall, density] of its rows."""

    shares: list[Array] = dataclasses.field(default_factory=list)

    def __call__(self, heads: Array) -> Array:
        q, kv = rotate_and_write(heads, self.cache, self.index, self.batch, self.spec.num_kv_heads)
        options = {"scale": self.spec.scale, "sliding_window": self.spec.sliding_window, "soft_cap": self.spec.soft_cap}

        def attention(rows: Array, region: AttentionBatch) -> tuple[Array, Array]:
            return paged_attention(rows, kv, self.index, region, **options, return_lse=True)

        assert self.batch.prefill is not None
        dense = out = attention(q, self.batch.prefill)
        sparse = self.batch.sparse
        if sparse is not None:
            assert sparse.prefill is not None
            for policy, rows in rows_by_policy(sparse.policies, q, sparse.prefill):
                numbers, kv = select_rows(policy, rows, kv, self.index)
                out = attend_rows(rows, numbers, kv, attention, out)
                tables = tables_of(numbers, rows.page_table, rows.seen, kv.page_size, kv.k.shape[1])
                recall = jnp.mean(jnp.exp(out[1] - dense[1])[:, : self.spec.num_heads], axis=1)
                density = jnp.mean(
                    tables.kv_lens[:, : self.spec.num_kv_heads] / jnp.maximum(rows.seen, 1)[:, None], axis=1
                )
                is_row = rows.seen > 0
                self.shares.append(jnp.mean(jnp.stack([recall, density]), axis=1, where=is_row[None]))
        self.cache = kv
        return out[0][:, : self.spec.num_heads]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _layer(
    model: Model,
    kind: str,
    policies: LayerPolicies | None,
    p: dict[str, Any],
    x: Array,
    kv: KVCache,
    index: Array,
    batch: StepBatch,
) -> tuple[Array, KVCache, list[Array]]:
    spec = model.attention_spec(kind)
    attention = _Watching(
        cache=kv,
        index=index,
        batch=prepare_batch(batch, kv, spec, policies=policies),
        spec=spec,
        implementation=None,
        experts_read=jnp.int32(0) if model.has_experts else None,
    )
    x = model.layer(p, kind, x, attention)
    return x, attention.cache, attention.shares

"""What a model says of a text: the distributions of its next tokens, and how far two of them are apart."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve import weights
from jaxserve.layers.decoder import forward
from jaxserve.layers.kv_cache import AttentionBatch, StepBatch, init_kv_cache

PAGE_SIZE = 16


def logprobs(loaded: weights.LoadedModel, kv_dtype: DTypeLike, token_ids: list[int]) -> Array:
    """log p(next token) after each token of the text [T, V], with a KV cache of this dtype."""
    model, num_tokens = loaded.model, len(token_ids)
    positions = jnp.arange(num_tokens)
    pages = 1 + jnp.arange(-(-num_tokens // PAGE_SIZE))
    kv = init_kv_cache(model.config, num_pages=len(pages) + 1, page_size=PAGE_SIZE, dtype=kv_dtype)
    region = AttentionBatch(
        page_table=pages[None], kv_lens=jnp.array([num_tokens]), cu_q_lens=jnp.array([0, num_tokens])
    )
    batch = StepBatch(
        token_ids=jnp.array(token_ids),
        positions=positions,
        page_ids=pages[positions // PAGE_SIZE],
        page_offsets=positions % PAGE_SIZE,
        decode=None,
        prefill=region,
    )

    @jax.jit
    def run(params, kv):
        return jax.nn.log_softmax(model.logits(params, forward(model, params, kv, batch)[0]))

    return run(loaded.params, kv)


def mean_kl(truth: Array, other: Array) -> float:
    """Mean KL(truth || other) in nats, of log-probabilities [T, V]."""
    return float(jnp.mean(jnp.sum(jnp.exp(truth) * (truth - other), axis=-1)))

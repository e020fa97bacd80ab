"""How long a token of an answer takes after a prompt."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.evaluation.watch import Prompt, Reader
from jaxserve.layers.decoder import forward
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch
from jaxserve.layers.sparse import SparseAttention
from jaxserve.models import Model

STEPS = 16


def seconds_per_token(reader: Reader, prompt: Prompt, sparse: SparseAttention | None) -> float:
    """Mean of up to STEPS greedy decode steps of one sequence after the prompt, as the engine runs them, compiled before.

    It is measured, so it says something of this machine and its load only.

    Raises:
        ValueError: policies that do not fit, or a prompt that leaves no room for two tokens.
    """
    model = dataclasses.replace(reader.loaded.model, sparse=sparse)
    kv, params = reader.state(prompt, sparse), reader.loaded.params
    num_prompt, page_size = len(prompt.token_ids), reader.page_size
    steps = min(STEPS, reader.max_tokens - num_prompt)
    if steps < 1:
        raise ValueError(f"decoding needs room for an answer, got a prompt of all {num_prompt} tokens")
    page_table = 1 + jnp.arange(reader.num_pages)[None]
    step = functools.partial(_step, model, params, page_table, np.int32(num_prompt), page_size)
    token, kv = step(jnp.asarray(prompt.token_ids[-1:], jnp.int32), np.int32(num_prompt - 1), kv)
    jax.block_until_ready(token)
    start = time.perf_counter()
    for i in range(steps):
        token, kv = step(token, np.int32(num_prompt + i), kv)
    jax.block_until_ready(token)
    return (time.perf_counter() - start) / steps


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=7)
def _step(
    model: Model,
    params: dict[str, Any],
    page_table: Array,
    num_prompt: Array,
    page_size: int,
    token_ids: Array,
    position: Array,
    kv: dict[str, KVCache],
) -> tuple[Array, dict[str, KVCache]]:
    """The next token [1], and the cache, which is donated."""
    region = AttentionBatch(
        page_table=page_table,
        kv_lens=position[None] + 1,
        slots=jnp.zeros(1, jnp.int32),
        prompt_lens=num_prompt[None],
    )
    batch = StepBatch(
        token_ids=token_ids,
        positions=position[None],
        page_ids=1 + position[None] // page_size,
        page_offsets=position[None] % page_size,
        decode=region,
        prefill=None,
    )
    x, kv, _ = forward(model, params, kv, batch)
    return jnp.argmax(model.logits(params, x), axis=-1).astype(jnp.int32), kv

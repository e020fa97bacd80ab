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
from jaxserve.models import Model

STEPS = 8
ROUNDS = 2


def seconds_per_token(reader: Reader, prompt: Prompt) -> float:
    """Mean of STEPS greedy decode steps of one sequence, as the engine runs them, in the fastest of ROUNDS rounds.

    They begin so many tokens before the prompt's end. It is measured, so it says something of this machine and its load
    only.

    Raises:
        ValueError: a prompt without so many tokens.
    """
    first = len(prompt.token_ids) - 1 - STEPS
    if first < 1:
        raise ValueError(f"the time of decoding needs a prompt of at least {STEPS + 2} tokens, got {first + 1 + STEPS}")
    model = dataclasses.replace(reader.loaded.model, sparse=prompt.sparse)
    kv, params = jax.tree.map(jnp.copy, prompt.kv), reader.loaded.params
    page_table = 1 + jnp.arange(reader.num_pages)[None]
    times = []
    for _ in range(1 + ROUNDS):
        token, start = jnp.asarray([prompt.token_ids[first]], jnp.int32), time.perf_counter()
        for position in range(first, first + STEPS):
            token, kv = _step(
                model, params, page_table, np.int32(first), reader.page_size, token, np.int32(position), kv
            )
        jax.block_until_ready(token)
        times.append(time.perf_counter() - start)
    return min(times[1:]) / STEPS  # the first round compiles


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

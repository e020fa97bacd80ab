"""What only a Hopper GPU can show. Where one is: `pytest --noconftest tests/test_on_card.py tests/pallas_kernels`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.decoder import forward, stack_layers
from jaxserve.layers.kv_cache import AttentionBatch, StepBatch, init_kv_cache
from jaxserve.models import get_model

on_card = pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs a GPU")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
PAGE_SIZE, NUM_SEQS, PROMPT_LEN, NUM_STEPS = 64, 2, 96, 32  # 2 x (96 + 32) = 256 positions


def batch_of(tokens: np.ndarray, start: int, *, decode: bool) -> StepBatch:
    """All sequences' tokens `[S, n]` from position `start` on, as one region."""
    count = tokens.shape[1]
    table = 1 + np.arange(2 * NUM_SEQS, dtype=np.int32).reshape(NUM_SEQS, 2)
    positions = np.tile(np.arange(start, start + count, dtype=np.int32), NUM_SEQS)
    sequences = np.repeat(np.arange(NUM_SEQS), count)
    kv_lens = np.full(NUM_SEQS, start + count, np.int32)
    cu_q_lens = None if decode else np.arange(NUM_SEQS + 1, dtype=np.int32) * count
    region = AttentionBatch(page_table=table, kv_lens=kv_lens, cu_q_lens=cu_q_lens)
    batch = StepBatch(
        token_ids=tokens.reshape(-1).astype(np.int32),
        positions=positions,
        page_ids=table[sequences, positions // PAGE_SIZE],
        page_offsets=positions % PAGE_SIZE,
        decode=region if decode else None,
        prefill=None if decode else region,
    )
    return jax.tree.map(jnp.asarray, batch)


def logits(params, dtype, implementation, tokens: np.ndarray, kv_dtype=None) -> np.ndarray:
    """Logits at every position, float32 [S, PROMPT_LEN + NUM_STEPS, V]: one prefill, then decode steps."""
    model = get_model(LLAMA)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    kv = init_kv_cache(model.config, num_pages=2 * NUM_SEQS + 1, page_size=PAGE_SIZE, dtype=kv_dtype or dtype)["full"]
    kv = {"full": dataclasses.replace(kv, k=jnp.full_like(kv.k, jnp.nan), v=jnp.full_like(kv.v, jnp.nan))}

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, kv, batch):
        hidden, kv, _ = forward(model, params, kv, batch, implementation=implementation)
        return model.logits(params, hidden), kv

    with jax.default_matmul_precision("highest"):
        out, kv = run(params, kv, batch_of(tokens[:, :PROMPT_LEN], 0, decode=False))
        found = [np.asarray(out).reshape(NUM_SEQS, PROMPT_LEN, -1)]
        for at in range(PROMPT_LEN, PROMPT_LEN + NUM_STEPS):
            out, kv = run(params, kv, batch_of(tokens[:, at : at + 1], at, decode=True))
            found.append(np.asarray(out)[:, None])
    return np.concatenate(found, axis=1)


def inputs():
    model = get_model(LLAMA)
    params = model.init(jax.random.key(0), jnp.bfloat16)
    params = params | {"layers": stack_layers(params["layers"], model.layer_kinds)}
    return params, np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (NUM_SEQS, PROMPT_LEN + NUM_STEPS))


def compare(implementation, kv_dtype=None) -> None:
    params, tokens = inputs()
    truth = logits(params, jnp.float32, "xla", tokens, kv_dtype)
    plain = np.abs(logits(params, jnp.bfloat16, "xla", tokens, kv_dtype) - truth)
    got = logits(params, jnp.bfloat16, implementation, tokens, kv_dtype)
    error = np.abs(got - truth)
    assert np.sqrt((error**2).mean()) <= 1.5 * np.sqrt((plain**2).mean())
    assert error.max() <= 1.5 * plain.max()
    best = np.sort(truth, axis=-1)[..., -2:]
    clear = best[..., 1] - best[..., 0] > 4 * error.max()
    assert clear.any()
    np.testing.assert_array_equal(got.argmax(axis=-1)[clear], truth.argmax(axis=-1)[clear])


@on_card
@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn], ids=["bf16", "fp8"])
def test_the_kernels_are_as_close_to_float32_as_xla_in_bfloat16(kv_dtype):
    compare("mosaic_gpu", kv_dtype)


@on_card
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_the_kernels_really_run(decode, kv_dtype):
    params, tokens = inputs()
    model = get_model(LLAMA)
    kv = init_kv_cache(model.config, num_pages=2 * NUM_SEQS + 1, page_size=PAGE_SIZE, dtype=kv_dtype)
    batch = batch_of(tokens[:, : 1 if decode else PROMPT_LEN], 0, decode=decode)
    text = jax.jit(functools.partial(forward, model)).lower(params, kv, batch).compile().as_text()
    assert f"paged_attention_{'decode' if decode else 'prefill'}" in text
    assert "rope_kv_write" in text

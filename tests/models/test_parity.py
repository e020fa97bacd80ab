"""Every architecture's logits against Hugging Face transformers, through the paged forward, in float32."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from paged_golden import BOUND, CASES, Paged, largest_error, load, whole

from jaxserve.layers.decoder import stack_layers

CHUNKS = (13, 5)  # of the two prompts in the first of two steps: neither ends with a page
DECODE_FROM = (33, 20)


@pytest.mark.parametrize("case", CASES)
def test_whole_prompts_agree(case):
    model, params, prompts, expected = load(case)
    assert largest_error(whole(model, params, prompts), expected) < BOUND


@pytest.mark.parametrize("case", CASES)
def test_prompts_in_two_chunks_agree(case):
    model, params, prompts, expected = load(case)
    paged = Paged(model, params)
    first = paged.step(prefill={s: prompts[s][: CHUNKS[s]] for s in (0, 1)})
    second = paged.step(prefill={s: prompts[s][CHUNKS[s] :] for s in (0, 1)})
    assert largest_error([np.concatenate([first[s], second[s]]) for s in (0, 1)], expected) < BOUND


@pytest.mark.parametrize("case", CASES)
def test_decoding_beside_a_prefill_agrees(case):
    """Sequence 0 decodes token by token; sequence 1 arrives in one of those steps and then decodes as well."""
    model, params, prompts, expected = load(case)
    paged = Paged(model, params)
    steps = [paged.step(prefill={0: prompts[0][: DECODE_FROM[0]]})]
    for i in range(DECODE_FROM[0], len(prompts[0])):
        decode = {s: prompts[s][n : n + 1] for s, n in enumerate(paged.lens) if 0 < n < len(prompts[s])}
        arrival = {1: prompts[1][: DECODE_FROM[1]]} if i == DECODE_FROM[0] + 2 else {}
        steps.append(paged.step(decode=decode, prefill=arrival))
    assert paged.lens == [len(prompt) for prompt in prompts]
    logits = [np.concatenate([step[s] for step in steps if s in step]) for s in (0, 1)]
    assert largest_error(logits, expected) < BOUND


@pytest.mark.parametrize("case", ["llama3", "qwen2_sliding", "qwen3_moe", "gemma2", "gemma3"])
def test_stacked_layers_agree(case):
    """One form of each kind of pattern; gemma3's 5:1 has two layers beyond its last whole period."""
    model, params, prompts, expected = load(case)
    stacked = {**params, "layers": stack_layers(params["layers"], model.layer_kinds)}
    assert largest_error(whole(model, stacked, prompts), expected) < BOUND


WRONG_CONFIGS = {
    "llama2": ({"rope_theta": 10500.0}, {"rms_norm_eps": 1e-6}, {"query_scale": 0.26}),
    "llama3": ({"rope_scaling": None},),
    "qwen2_sliding": ({"layer_kinds": ("full",) * 3},),
    "qwen3": ({"qk_norm": False},),
    "qwen3_moe": ({"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
    "qwen3_moe_raw": ({"norm_topk_prob": True},),
    "mistral": ({"sliding_window": 7}, {"sliding_window": 9}, {"layer_kinds": ("full", "full")}),
    "gemma2": (
        {"attn_soft_cap": None},
        {"final_soft_cap": None},
        {"query_scale": None},
        {"embed_scale": 1.0},
        {"norm_offset": 0.0},
        {"act": "silu"},
        {"sliding_window": 9},
        {"layer_kinds": ("full", "sliding", "full")},
    ),
    "gemma3": (
        {"rope_local_theta": None},
        {"rope_scaling": None},
        {"qk_norm": False},
        {"sliding_window": 7},
        {"layer_kinds": ("sliding",) * 4 + ("full",) + ("sliding",) * 3},
    ),
}


@pytest.mark.parametrize(
    ("case", "change"), [(case, change) for case in WRONG_CONFIGS for change in WRONG_CONFIGS[case]]
)
def test_a_wrong_config_fails_the_bound(case, change):
    model, params, prompts, expected = load(case)
    wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
    assert largest_error(whole(wrong, params, prompts), expected) > BOUND


def without_bias(p):
    return {**p, "qkv_bias": jnp.zeros_like(p["qkv_bias"])}


def with_up_before_gate(p):
    return {**p, "gate_up": jnp.concatenate(jnp.split(p["gate_up"], 2)[::-1])}


def with_neighbouring_rotary_pairs(p):
    """q and k as a GGUF file stores them."""
    q, rest = jnp.split(p["qkv"], [64])
    return {**p, "qkv": jnp.concatenate([q.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(q.shape), rest])}


@pytest.mark.parametrize(
    ("case", "spoil"),
    [("qwen2", without_bias), ("llama2", with_up_before_gate), ("llama2", with_neighbouring_rotary_pairs)],
)
def test_wrong_weights_fail_the_bound(case, spoil):
    model, params, prompts, expected = load(case)
    wrong = {**params, "layers": tuple(map(spoil, params["layers"]))}
    assert largest_error(whole(model, wrong, prompts), expected) > BOUND


def test_a_missed_token_of_the_cache_fails_the_bound():
    """The second chunk at its right positions, but over one key and value that were never written."""
    model, params, prompts, expected = load("llama2")
    paged = Paged(model, params)
    paged.step(prefill={0: prompts[0][:13]})
    paged.kv = {"full": type(paged.kv["full"])(k=paged.kv["full"].k.at[:, 3, 0].set(0.0), v=paged.kv["full"].v)}
    assert largest_error([paged.step(prefill={0: prompts[0][13:]})[0]], [expected[0][13:]]) > BOUND

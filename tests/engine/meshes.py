"""Tiny models for engines on a mesh, and what their tests ask of them."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import LLM, SamplingParams

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 322,  # no multiple of anything here
    "hidden_size": 32,
    "intermediate_size": 68,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MODELS = {
    "dense": DENSE,
    "one kv head": DENSE | {"num_attention_heads": 6, "num_key_value_heads": 1},
    "sliding": DENSE | {"architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "experts": MOE,
}
OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 160,
    "page_size": 4,
    "num_pages": 480,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "warm_up": "off",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=11, max_tokens=6, ignore_eos=True)
EDITED = SamplingParams(
    temperature=1.0, seed=5, presence_penalty=0.5, logprobs=3, prompt_logprobs=1, max_tokens=6, ignore_eos=True
)
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 300, n).tolist() for n in (110, 5, 16, 33, 1)]  # 110 tokens: 3 pages on each of 8 ranks


def folder_of(config, path) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def start(model: str, **options) -> LLM:
    """An engine whose pages hold NaN until they are written."""
    llm = LLM(model, **(OPTIONS | options))
    device = llm.llm_engine.core.runner.device
    nan = lambda leaf: jnp.full_like(leaf, jnp.nan, device=leaf.sharding) if leaf.ndim == 5 else leaf  # noqa: E731
    device.kv = jax.tree.map(nan, device.kv)
    return llm


def tokens(llm: LLM, params=GREEDY, prompts=PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def collectives(program) -> collections.Counter:
    """How often a compiled program does which."""
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return collections.Counter(re.findall(rf" ({names})(?:-start)?\(", program.as_text()))

"""Random weights in a model's shape: load_format="dummy", for speed tests and capacity planning."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxserve.models import Model
from jaxserve.sharding.placement import Placement
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.checkpoint import Checkpoint, LeafPath

_LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}

# config.json of meta-llama/Llama-3.1-{8B,70B}, Qwen/Qwen3-30B-A3B and HuggingFaceTB/SmolLM2-135M-Instruct.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA31
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3.1-70b": _LLAMA31
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}


class DummyCheckpoint(Checkpoint):
    """Random parameters for `config`; the same seed gives the same ones."""

    def __init__(self, name: str, config: dict[str, Any], *, seed: int, tokenizer: Tokenizer | None):
        self.name, self.config, self.generation_config = name, config, {}
        self._seed, self._tokenizer = seed, tokenizer

    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def leaves(
        self, model: Model, dtype: DTypeLike, places: dict[LeafPath, Placement]
    ) -> Iterator[tuple[LeafPath, jax.Array]]:
        for i, part in enumerate(model.init_parts(jax.random.key(self._seed), dtype), -1):
            for name in list(part):
                path = (name,) if i < 0 else ("layers", i, name)
                yield path, places[path].put(part.pop(name))

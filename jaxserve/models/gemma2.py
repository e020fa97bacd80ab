"""Gemma 2: four norms a layer, soft caps, every second layer with a sliding window. Source: arXiv 2408.00118."""

import math
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxserve.layers.decoder import Attend, Params
from jaxserve.layers.mlp import mlp
from jaxserve.models.base import ModelConfig, Target, translate_decoder
from jaxserve.models.blocks import attention_params, mlp_params, norm, norm_params, self_attention
from jaxserve.models.hf_config import decoder_config, layer_kinds_from_hf, required, supported
from jaxserve.models.llama import LAYER_NAMES as LLAMA_NAMES

ARCHITECTURES = ("Gemma2ForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    return gemma_config(
        hf,
        *ARCHITECTURES,
        layer_kinds=layer_kinds_from_hf(hf, lambda i: i % 2 == 0),
        attn_soft_cap=hf.get("attn_logit_softcapping", 50.0),
        final_soft_cap=hf.get("final_logit_softcapping", 30.0),
    )


def gemma_config(hf: Mapping[str, Any], architecture: str, **fields: Any) -> ModelConfig:
    """What Gemma 2 and 3 have in common."""
    required(hf, "hidden_size", "head_dim", "query_pre_attn_scalar", "sliding_window")
    supported(hf, "use_bidirectional_attention", (False, None))
    return decoder_config(
        {"hidden_activation": "gelu_pytorch_tanh", **hf},
        architecture,
        norm_offset=1.0,
        embed_scale=math.sqrt(hf["hidden_size"]),
        query_scale=hf["query_pre_attn_scalar"] ** -0.5,
        sliding_window=hf["sliding_window"],
        tie_word_embeddings=hf.get("tie_word_embeddings", True),
        **fields,
    )


class Layer(nnx.Module):
    """The parameters of one layer."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        norms = ("input_norm", "post_norm", "pre_ffw_norm", "post_ffw_norm")
        norm_params(self, config, norms, config.hidden_size, dtype=dtype, rngs=rngs)
        attention_params(self, config, dtype=dtype, rngs=rngs)
        mlp_params(self, config, dtype=dtype, rngs=rngs)


def layer(p: Params, config: ModelConfig, kind: str, x: Float[Array, "T D"], attend: Attend) -> Float[Array, "T D"]:
    """Attention and MLP, each with a norm before it, a norm after it, and its residual."""
    h = self_attention(p, config, kind, norm(x, p["input_norm"], config), attend)
    x = x + norm(h, p["post_norm"], config)
    h = mlp(norm(x, p["pre_ffw_norm"], config), p["gate_up"], p["down"], act=config.act)
    return x + norm(h, p["post_ffw_norm"], config)


LAYER_NAMES = LLAMA_NAMES | {
    "pre_feedforward_layernorm.weight": ("pre_ffw_norm", None),
    "post_feedforward_layernorm.weight": ("post_ffw_norm", None),
}


def translate(name: str) -> Target | None:
    """Where a checkpoint tensor belongs; None = ignored on purpose. Raises KeyError for an unknown name."""
    return translate_decoder(name, LAYER_NAMES)

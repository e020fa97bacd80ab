"""Llama 2, 3 and 3.1, and what is built like them (SmolLM). Source: arXiv 2302.13971, 2407.21783."""

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
from jaxserve.models.hf_config import decoder_config

ARCHITECTURES = ("LlamaForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    return decoder_config(hf, *ARCHITECTURES)


class Layer(nnx.Module):
    """The parameters of one layer."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        norm_params(self, config, ("input_norm", "post_norm"), config.hidden_size, dtype=dtype, rngs=rngs)
        attention_params(self, config, dtype=dtype, rngs=rngs)
        mlp_params(self, config, dtype=dtype, rngs=rngs)


def layer(p: Params, config: ModelConfig, kind: str, x: Float[Array, "T D"], attend: Attend) -> Float[Array, "T D"]:
    """Pre-norm attention and MLP, each with its residual."""
    x = x + self_attention(p, config, kind, norm(x, p["input_norm"], config), attend)
    return x + mlp(norm(x, p["post_norm"], config), p["gate_up"], p["down"], act=config.act)


LAYER_NAMES = {
    "input_layernorm.weight": ("input_norm", None),
    "self_attn.q_proj.weight": ("qkv", "q"),
    "self_attn.k_proj.weight": ("qkv", "k"),
    "self_attn.v_proj.weight": ("qkv", "v"),
    "self_attn.o_proj.weight": ("o", None),
    "post_attention_layernorm.weight": ("post_norm", None),
    "mlp.gate_proj.weight": ("gate_up", "gate"),
    "mlp.up_proj.weight": ("gate_up", "up"),
    "mlp.down_proj.weight": ("down", None),
}


def translate(name: str) -> Target | None:
    """Where a checkpoint tensor belongs; None = ignored on purpose. Raises KeyError for an unknown name."""
    return translate_decoder(name, LAYER_NAMES)

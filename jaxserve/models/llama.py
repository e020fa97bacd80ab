"""Llama 2, 3 and 3.1, and what is built like them (SmolLM). Source: arXiv 2302.13971, 2407.21783."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxserve.layers.decoder import Attend, Params
from jaxserve.layers.linear import fan_in, ones, param
from jaxserve.layers.mlp import mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.models.base import (
    ModelConfig,
    Target,
    required,
    rope_from_hf,
    self_attention,
    supported,
    translate_decoder,
)

ARCHITECTURES = ("LlamaForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    required(
        hf, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    )  # fmt: skip
    supported(hf, "hidden_act", ("silu",))
    supported(hf, "attention_bias", (False, None))
    supported(hf, "mlp_bias", (False, None))
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        max_position_embeddings=hf["max_position_embeddings"],
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        **rope_from_hf(hf),
    )


class Layer(nnx.Module):
    """The parameters of one layer."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        c, d, f = config, config.hidden_size, config.intermediate_size
        how = {"rngs": rngs, "dtype": dtype}
        self.input_norm = param(ones, (d,), ("embed",), **how)
        self.qkv = param(fan_in, (c.qkv_size, d), ("heads", "embed"), **how)
        self.o = param(fan_in, (d, c.num_heads * c.head_dim), ("embed", "heads"), **how)
        self.post_norm = param(ones, (d,), ("embed",), **how)
        self.gate_up = param(fan_in, (2 * f, d), ("mlp", "embed"), **how)
        self.down = param(fan_in, (d, f), ("embed", "mlp"), **how)


def layer(
    p: Params, config: ModelConfig, kind: str, x: Float[Array, "T D"], positions: Int[Array, " T"], attend: Attend
) -> Float[Array, "T D"]:
    """Pre-norm attention and MLP, each with its residual."""
    h = rms_norm(x, p["input_norm"], config.rms_norm_eps)
    x = x + self_attention(p, config, kind, h, positions, attend)
    h = rms_norm(x, p["post_norm"], config.rms_norm_eps)
    return x + mlp(h, p["gate_up"], p["down"], act=config.act)


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

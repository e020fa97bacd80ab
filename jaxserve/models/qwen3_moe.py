"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in place of the MLP. Source: arXiv 2505.09388."""

import re
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxserve.layers.decoder import Attend, Params, StackedLayer
from jaxserve.layers.linear import fan_in, param
from jaxserve.layers.moe import moe
from jaxserve.models.base import ModelConfig, Target, translate_decoder
from jaxserve.models.blocks import attention_params, norm, norm_params, self_attention
from jaxserve.models.hf_config import decoder_config, required, supported
from jaxserve.models.qwen3 import LAYER_NAMES as QWEN3_NAMES

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported: here also layers with a dense MLP
            between those with experts, which no published checkpoint has.
    """
    required(hf, "moe_intermediate_size", "num_experts_per_tok")
    num_experts = hf.get("num_experts") or hf.get("num_local_experts")  # transformers 5 writes the second
    if not num_experts:
        raise ValueError("config.json lacks num_experts")
    supported(hf, "decoder_sparse_step", (1,))
    supported(hf, "mlp_only_layers", ([], None))
    supported(hf, "use_sliding_window", (False, None))
    return decoder_config(
        hf,
        *ARCHITECTURES,
        qk_norm=True,
        num_experts=num_experts,
        num_experts_per_tok=hf["num_experts_per_tok"],
        moe_intermediate_size=hf["moe_intermediate_size"],
        norm_topk_prob=hf.get("norm_topk_prob", False),
    )


class Layer(nnx.Module):
    """The parameters of one layer."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        how = {"rngs": rngs, "dtype": dtype}
        norm_params(self, config, ("input_norm", "post_norm"), d, **how)
        attention_params(self, config, **how)
        self.router = param(fan_in, (e, d), (None, "embed"), **how)
        self.gate_up = param(fan_in, (e, 2 * f, d), ("experts", None, "embed"), **how)
        self.down = param(fan_in, (e, d, f), ("experts", "embed", None), **how)


def layer(p: Params, config: ModelConfig, kind: str, x: Float[Array, "T D"], attend: Attend) -> Float[Array, "T D"]:
    """Pre-norm attention and mixture of experts, each with its residual."""
    x = x + self_attention(p, config, kind, norm(x, p["input_norm"], config), attend)
    h = norm(x, p["post_norm"], config)
    how = {
        "top_k": config.num_experts_per_tok,
        "normalize": config.norm_topk_prob,
        "act": config.act,
        "real": attend.real,
        "implementation": attend.implementation,
    }
    if isinstance(p, StackedLayer):
        out, num_experts = moe(h, p["router"], p.stack["gate_up"], p.stack["down"], layer=p.number, **how)
    else:
        out, num_experts = moe(h, p["router"], p["gate_up"], p["down"], **how)
    attend.count_experts(num_experts)
    return x + out


_EXPERT_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
LAYER_NAMES = {name: leaf for name, leaf in QWEN3_NAMES.items() if not name.startswith("mlp.")}
LAYER_NAMES["mlp.gate.weight"] = ("router", None)


def translate(name: str) -> Target | None:
    """Where a checkpoint tensor belongs; None = ignored on purpose. Raises KeyError for an unknown name."""
    match = _EXPERT_NAME.fullmatch(name)
    if match is None:
        return translate_decoder(name, LAYER_NAMES)
    leaf = "down" if match[3] == "down" else "gate_up"
    return Target(("layers", int(match[1]), leaf), (int(match[2]), match[3]))

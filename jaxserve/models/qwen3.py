"""Qwen3: Llama with RMSNorm on each head of q and k. Source: arXiv 2505.09388."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, Target, translate_decoder
from jaxserve.models.hf_config import decoder_config
from jaxserve.models.llama import LAYER_NAMES as LLAMA_NAMES, Layer as Layer, layer as layer
from jaxserve.models.qwen2 import window_fields

ARCHITECTURES = ("Qwen3ForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    head_dim = hf.get("head_dim", 128)  # not hidden_size / num_attention_heads
    return decoder_config(hf, *ARCHITECTURES, qk_norm=True, head_dim=head_dim, **window_fields(hf))


LAYER_NAMES = LLAMA_NAMES | {f"self_attn.{part}_norm.weight": (f"{part}_norm", None) for part in "qk"}


def translate(name: str) -> Target | None:
    """Where a checkpoint tensor belongs; None = ignored on purpose. Raises KeyError for an unknown name."""
    return translate_decoder(name, LAYER_NAMES)

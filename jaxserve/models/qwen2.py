"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v. Source: arXiv 2407.10671."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, Target, translate_decoder
from jaxserve.models.hf_config import decoder_config, layer_kinds_from_hf
from jaxserve.models.llama import LAYER_NAMES as LLAMA_NAMES, Layer as Layer, layer as layer

ARCHITECTURES = ("Qwen2ForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    return decoder_config(hf, *ARCHITECTURES, qkv_bias=True, **window_fields(hf))


def window_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """With `use_sliding_window` the layers from `max_window_layers` on have a window; else none has."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers")
    first = 28 if first is None else first
    kinds = layer_kinds_from_hf(hf, lambda i: window is not None and i >= first)
    return {"sliding_window": window, "layer_kinds": kinds}


LAYER_NAMES = LLAMA_NAMES | {f"self_attn.{part}_proj.bias": ("qkv_bias", part) for part in "qkv"}


def translate(name: str) -> Target | None:
    """Where a checkpoint tensor belongs; None = ignored on purpose. Raises KeyError for an unknown name."""
    return translate_decoder(name, LAYER_NAMES)

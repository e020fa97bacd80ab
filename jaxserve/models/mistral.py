"""Mistral: Llama with, in its first version, a sliding window in every layer. Source: arXiv 2310.06825."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig
from jaxserve.models.hf_config import decoder_config, layer_kinds_from_hf
from jaxserve.models.llama import Layer as Layer, layer as layer, translate as translate

ARCHITECTURES = ("MistralForCausalLM",)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    window = hf.get("sliding_window")
    kinds = layer_kinds_from_hf(hf, lambda i: window is not None)
    return decoder_config(hf, *ARCHITECTURES, sliding_window=window, layer_kinds=kinds)

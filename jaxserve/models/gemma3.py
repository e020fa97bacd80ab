"""Gemma 3, text: Gemma 2 with norms on q and k instead of soft caps, and a RoPE of its own in the sliding layers.

Of a checkpoint with a vision tower only the language model is read. Source: arXiv 2503.19786.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import ModelConfig, Target, translate_decoder
from jaxserve.models.gemma2 import LAYER_NAMES as GEMMA2_NAMES, Layer as Layer, gemma_config, layer as layer
from jaxserve.models.hf_config import layer_kinds_from_hf, rope_from_hf, supported

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

# The published text_config of the vision models names only what differs from these.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json, or its text_config, describes.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    text = _DEFAULTS | dict(hf.get("text_config", hf))
    supported(text, "attn_logit_softcapping", (None,))
    pattern = text.get("sliding_window_pattern", 6)
    return gemma_config(
        text,
        ARCHITECTURES[0],
        qk_norm=True,
        layer_kinds=layer_kinds_from_hf(text, lambda i: (i + 1) % pattern != 0),
        final_soft_cap=text.get("final_logit_softcapping"),
        **_rope(text),
    )


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE of full layers, perhaps stretched, and theta of sliding layers; from either layout of config.json."""
    nested = text.get("rope_parameters")
    if not nested:
        return rope_from_hf(text, 1e6) | {"rope_local_theta": float(text.get("rope_local_base_freq", 10000.0))}
    local = nested.get("sliding_attention", {})
    supported(local, "rope_type", ("default",))
    full = rope_from_hf({"rope_parameters": nested.get("full_attention")}, 1e6)
    return full | {"rope_local_theta": float(local.get("rope_theta", 10000.0))}


LAYER_NAMES = GEMMA2_NAMES | {f"self_attn.{part}_norm.weight": (f"{part}_norm", None) for part in "qk"}
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_LANGUAGE_PREFIX = re.compile(r"^(language_model\.model\.|model\.language_model\.)")


def translate(name: str) -> Target | None:
    """Where a checkpoint tensor belongs; None = ignored on purpose. Raises KeyError for an unknown name."""
    if _VISION.fullmatch(name):
        return None
    name = _LANGUAGE_PREFIX.sub("model.", name).removeprefix("language_model.")  # the second is for lm_head
    return translate_decoder(name, LAYER_NAMES)

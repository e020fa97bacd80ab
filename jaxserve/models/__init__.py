"""The registry of architectures."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models import gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe
from jaxserve.models.base import Model as Model, ModelConfig as ModelConfig, Target as Target
from jaxserve.models.hf_config import check_fields

_ALL = (gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe)
_MODULES = {name: module for module in _ALL for name in module.ARCHITECTURES}


def get_model(hf_config: Mapping[str, Any]) -> Model:
    """The model that a Hugging Face config.json describes.

    Raises:
        ValueError: the architecture is unknown, or a field of the configuration is missing or not supported.
    """
    names = hf_config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures must be a list of strings, got {names!r:.80}")
    module = next((_MODULES[name] for name in names if name in _MODULES), None)
    if module is None:
        raise ValueError(f"architectures {names} are not supported; jaxserve knows {', '.join(sorted(_MODULES))}")
    check_fields(hf_config)
    config = module.config_from_hf(hf_config)
    return Model(
        config=config,
        layer_module=module.Layer,
        layer_fn=module.layer,
        translate_fn=module.translate,
        plain=module.layer is llama.layer and config.act == "silu" and not (config.qkv_bias or config.qk_norm),
    )

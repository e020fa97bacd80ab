"""Reading config.json: what is missing or not supported is an error, never a guess."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxserve.layers.rope import RopeScaling
from jaxserve.models.base import LayerKind, ModelConfig

_ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}


def decoder_config(hf: Mapping[str, Any], architecture: str, **fields: Any) -> ModelConfig:
    """The configuration from the fields that all architectures have; `fields` are its own, and win.

    Raises:
        ValueError: a field is missing, or asks for something that is not supported.
    """
    required(
        hf, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    )  # fmt: skip
    act_name = "hidden_activation" if hf.get("hidden_activation") else "hidden_act"
    supported(hf, act_name, _ACTS)
    supported(hf, "attention_bias", (False, None))  # Qwen2, whose q, k and v have a bias, does not say so here
    supported(hf, "mlp_bias", (False, None))
    supported(hf, "quantization_config", (None,))
    common = {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "act": _ACTS[hf.get(act_name, "silu")],
        "tie_word_embeddings": hf.get("tie_word_embeddings", False),
    }
    rope = {} if "rope_theta" in fields else rope_from_hf(hf)
    return ModelConfig(architecture=architecture, **(common | rope | fields))


def required(hf: Mapping[str, Any], *names: str) -> None:
    """Raises ValueError when config.json lacks a field that has no default."""
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def supported(hf: Mapping[str, Any], name: str, allowed: Collection[Any]) -> None:
    """Raises ValueError when config.json asks for something that the architecture's module does not do."""
    if name in hf and hf[name] not in allowed:
        raise ValueError(f"config.json: {name} {hf[name]!r} is not supported; expected one of {list(allowed)}")


def rope_from_hf(hf: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of ModelConfig, from either layout of config.json.

    Raises:
        ValueError: a kind of scaling that is not supported.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or default_theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "linear":
        return {"rope_theta": theta, "rope_scaling": RopeScaling(kind="linear", factor=float(scaling["factor"]))}
    if kind != "llama3":
        raise ValueError(f"config.json: rope scaling {kind!r} is not supported; expected default, linear or llama3")
    return {
        "rope_theta": theta,
        "rope_scaling": RopeScaling(
            kind="llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position=int(scaling["original_max_position_embeddings"]),
        ),
    }


def layer_kinds_from_hf(hf: Mapping[str, Any], is_sliding: Callable[[int], bool]) -> tuple[LayerKind, ...]:
    """The kind of every layer: as `layer_types` lists them, else by the architecture's rule for layer i.

    Raises:
        ValueError: a kind of layer that is not supported.
    """
    types = hf.get("layer_types")
    if types is None:
        return tuple("sliding" if is_sliding(i) else "full" for i in range(hf["num_hidden_layers"]))
    unknown = sorted(set(types) - set(_LAYER_KINDS))
    if unknown:
        raise ValueError(f"config.json: layer_types {unknown} are not supported; expected {list(_LAYER_KINDS)}")
    return tuple(_LAYER_KINDS[name] for name in types)

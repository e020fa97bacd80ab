"""Reading config.json: what is missing or not supported is an error, never a guess."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxserve.layers.rope import RopeScaling
from jaxserve.models.base import LayerKind, ModelConfig

_ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}

_MAX_INT = 2**31 - 1
_MAX_LAYERS = 4096  # far above any model; each costs time before its tensors are looked for
_INT_RANGES = {
    "vocab_size": (1, _MAX_INT),
    "hidden_size": (1, _MAX_INT),
    "intermediate_size": (1, _MAX_INT),
    "num_hidden_layers": (1, _MAX_LAYERS),
    "num_attention_heads": (1, _MAX_INT),
    "num_key_value_heads": (1, _MAX_INT),
    "head_dim": (1, _MAX_INT),
    "max_position_embeddings": (2, _MAX_INT),  # one token of a prompt and one generated
    "original_max_position_embeddings": (1, _MAX_INT),
    "sliding_window": (1, _MAX_INT),
    "sliding_window_pattern": (1, _MAX_INT),
    "max_window_layers": (0, _MAX_INT),
    "num_experts": (1, _MAX_INT),
    "num_local_experts": (1, _MAX_INT),
    "num_experts_per_tok": (1, _MAX_INT),
    "moe_intermediate_size": (1, _MAX_INT),
}
_NUMBERS = (
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "factor", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
_MAX_NUMBER = 1e38  # about float32's
_BOOLS = ("tie_word_embeddings", "norm_topk_prob", "use_sliding_window")
_OBJECTS = ("text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
_NOT_NULL = ("rms_norm_eps", "sliding_window_pattern", "rope_local_base_freq")  # elsewhere null stands for absent


def check_fields(hf: Mapping[str, Any]) -> None:
    """The fields that any architecture reads have the right types and possible values, those of nested objects too.

    Raises:
        ValueError: one that has not; its name, what is expected, what came.
    """
    pending = [("", hf)]
    while pending:
        prefix, fields = pending.pop()
        for name, value in fields.items():
            expected = None if value is None and name not in _NOT_NULL else _expectation(name, value)
            if expected:
                raise ValueError(f"config.json: {prefix}{name} must be {expected}, got {value!r:.80}")
            if name in _OBJECTS and value is not None:
                pending.append((f"{prefix}{name}.", value))


def _expectation(name: str, value: Any) -> str | None:
    """What the field must be, None if it is."""
    if name in _INT_RANGES:
        low, high = _INT_RANGES[name]
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if fits else f"an integer in [{low}, {high}]"
    if name in _NUMBERS:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER
        return None if fits else "a positive finite number"
    if name in _BOOLS:
        return None if isinstance(value, bool) else "true or false"
    if name in _OBJECTS:
        return None if isinstance(value, Mapping) else "an object"
    return None


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
    config = ModelConfig(architecture=architecture, **(common | rope | fields))
    _check_sizes(config)
    return config


def _check_sizes(config: ModelConfig) -> None:
    """Sizes that follow from several fields."""
    if config.head_dim < 1 or config.head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even and positive (RoPE turns pairs), got {config.head_dim}")
    if config.qkv_size > _MAX_INT or 2 * config.intermediate_size > _MAX_INT:
        raise ValueError(
            f"config.json: fused matrices may have {_MAX_INT} rows, got {config.qkv_size} of num_attention_heads, "
            f"num_key_value_heads and head_dim, and {2 * config.intermediate_size} of intermediate_size"
        )


def required(hf: Mapping[str, Any], *names: str, where: str = "config.json") -> None:
    """Raises ValueError when config.json, or a part of it, lacks a field that has no default."""
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def supported(hf: Mapping[str, Any], name: str, allowed: Collection[Any]) -> None:
    """Raises ValueError when config.json asks for something that the architecture's module does not do."""
    if name in hf and hf[name] not in list(allowed):  # a list, since the value may not be hashable
        raise ValueError(f"config.json: {name} {hf[name]!r} is not supported; expected one of {list(allowed)}")


def rope_from_hf(hf: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of ModelConfig, from either layout of config.json.

    Raises:
        ValueError: a kind of scaling that is not supported, or lacks a field.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or default_theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "linear":
        required(scaling, "factor", where="config.json: rope scaling 'linear'")
        return {"rope_theta": theta, "rope_scaling": RopeScaling(kind="linear", factor=float(scaling["factor"]))}
    if kind != "llama3":
        raise ValueError(f"config.json: rope scaling {kind!r} is not supported; expected default, linear or llama3")
    required(
        scaling, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        where="config.json: rope scaling 'llama3'",
    )  # fmt: skip
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(
            f"config.json: low_freq_factor must be below high_freq_factor, got {scaling['low_freq_factor']} and "
            f"{scaling['high_freq_factor']}"
        )
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
    if not isinstance(types, list | tuple) or not all(isinstance(name, str) for name in types):
        raise ValueError(f"config.json: layer_types must be a list of strings, got {types!r:.80}")
    unknown = sorted(set(types) - set(_LAYER_KINDS))
    if unknown:
        raise ValueError(f"config.json: layer_types {unknown} are not supported; expected {list(_LAYER_KINDS)}")
    return tuple(_LAYER_KINDS[name] for name in types)

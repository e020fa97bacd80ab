"""Small checkpoints written to disk in each format, made from the golden models of tests/golden."""

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

from jaxserve.models import get_model

GOLDEN = Path(__file__).parents[1] / "golden"
STEP = 2.0**-6  # see make_golden.py: every weight is exact in bfloat16, float16 and float32
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# What GGUF cannot say about these models is left at what their published relatives have.
GGUF_CASES: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
}


@functools.cache
def golden(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors under their Hugging Face names, float32."""
    arrays = np.load(GOLDEN / f"{case}.npz")
    weights = {name[2:]: arrays[name].astype(np.float32) * STEP for name in arrays.files if name.startswith("w:")}
    return json.loads(str(arrays["config"])), weights


def expected_params(config: dict[str, Any], weights: dict[str, np.ndarray], dtype: Any = jnp.float32) -> Any:
    """What a load must give: every tensor in its place."""
    model = get_model(config)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), model.abstract_params(dtype))
    for name, weight in weights.items():
        target = model.translate(name)
        if target is not None:
            functools.reduce(lambda tree, key: tree[key], target.path, params)[target.index(model.config)] = weight
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def assert_same(params: Any, expected: Any) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for path, want in jax.tree.leaves_with_path(expected):
        got = functools.reduce(lambda tree, key: tree[getattr(key, "key", getattr(key, "idx", None))], path, params)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32), err_msg=str(path))


def tiny_tokenizer() -> tokenizers.Tokenizer:
    vocab = {"<s>": 0, "</s>": 1} | {chr(97 + i): 2 + i for i in range(26)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def write_hf(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    dtype: str = "float32",
    num_files: int = 1,
    tokenizer: bool = True,
) -> Path:
    """A folder as `save_pretrained` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    if tokenizer:
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tensors = {name: weight.astype(DTYPES[dtype]) for name, weight in weights.items()}
    if num_files == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::num_files]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    type_: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A file as llama.cpp's converter writes it: its own names, q and k rows of Llama interleaved, Gemma's norms with
    one added, experts stacked, Llama 3.1's frequency factors as a tensor. Matrices are in `type_`."""
    arch = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, arch, config)
    _add_tokenizer(writer, config["vocab_size"])
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 99)
    for name, weight in _stacked_experts(weights).items():
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            kind = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            weight = _interleaved(weight, config[kind])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + np.float32(1)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        _add_tensor(writer, ours, weight, type_)
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if (config.get("rope_scaling") or {}).get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(vocab_size - 3))])
    writer.add_token_scores([-float(i) for i in range(vocab_size)])
    writer.add_token_types([2, 3, 3] + [1] * (vocab_size - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, type_: gguf.GGMLQuantizationType) -> None:
    if weight.ndim == 1 or type_ == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, weight.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(weight, type_), raw_dtype=type_)


def _stacked_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    stacks: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        before, experts, after = name.partition(".experts.")
        key = f"{before}{experts}{after.split('.', 1)[1]}" if experts else name
        stacks.setdefault(key, []).append(weight)
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in stacks.items()}


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Pairs of RoPE side by side: row i and row i + H/2 of a head become rows 2i and 2i + 1."""
    out = np.empty_like(weight)
    head_dim = len(weight) // num_heads
    for head in range(0, len(weight), head_dim):
        out[head : head + head_dim : 2] = weight[head : head + head_dim // 2]
        out[head + 1 : head + head_dim : 2] = weight[head + head_dim // 2 : head + head_dim]
    return out


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """As the converter computes them, frequency by frequency."""
    scaling = config["rope_scaling"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)

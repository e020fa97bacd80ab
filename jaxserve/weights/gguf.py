"""GGUF checkpoints: metadata becomes a Hugging Face config, tensor names and layouts Hugging Face's.

llama.cpp stores the q and k rows of the `llama` architecture in the order of interleaved RoPE, and Gemma's norm weights
with one added; both are undone here. Experts lie in one stack a layer and are offered one by one.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.exceptions import WeightsError
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.checkpoint import TensorCheckpoint
from jaxserve.weights.gguf_file import GGUFFile, GGUFTensor, checked, dequantize_into
from jaxserve.weights.gguf_tokenizer import tokenizer_from_gguf

_ARCHITECTURES = {  # general.architecture -> (config.json's architecture, model_type)
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_LAYER_NAME = re.compile(r"blk\.([0-9]{1,9})\.(\w+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where one Hugging Face tensor lies: the whole of a GGUF tensor, or one expert of a stack."""

    tensor: GGUFTensor
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


class GGUFCheckpoint(TensorCheckpoint):
    """One .gguf file.

    Raises:
      WeightsError: damaged file, unknown architecture, or settings that are not supported.
    """

    def __init__(self, path: Path):
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        self.name = checked(metadata, "general.name", "a string") or path.stem
        self._architecture = checked(metadata, "general.architecture", "a string", "")
        if self._architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise WeightsError(f"{path}: architecture {self._architecture!r} is not supported; known are {known}")
        if (num_parts := checked(metadata, "split.count", "an integer", 0)) > 1:
            raise WeightsError(f"{path} is one of {num_parts} parts; join them with llama-gguf-split --merge")
        self._entries = self._named_entries()
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}
        self.config = _config(self._file, self._architecture)
        self.generation_config = _generation_config(metadata)

    def _named_entries(self) -> dict[str, _Entry]:
        entries = {}
        for tensor in self._file.tensors.values():
            if tensor.name == _ROPE_FACTORS:  # part of the configuration
                continue
            match = _LAYER_NAME.fullmatch(tensor.name)
            if match and (kind := _EXPERTS.fullmatch(match[2])):
                name = f"model.layers.{match[1]}.mlp.experts.%d.{kind[1]}_proj.weight"
                entries |= {name % e: _Entry(tensor, e) for e in range(tensor.shape[0])}
            else:
                entries[_hf_name(tensor.name, self._architecture)] = _Entry(tensor)
        return entries

    def read_into(self, name: str, out: np.ndarray) -> None:
        entry = self._entries[name]
        rows = self._file.rows(entry.tensor.name)
        rows = rows.reshape(-1, rows.shape[-1]) if entry.expert is None else rows[entry.expert]
        if self._architecture == "llama" and ".attn_q." in entry.tensor.name:
            rows = _split_halves(rows, entry.shape, self.config["num_attention_heads"])
        elif self._architecture == "llama" and ".attn_k." in entry.tensor.name:
            rows = _split_halves(rows, entry.shape, self.config["num_key_value_heads"])
        flat = out.reshape(-1, out.shape[-1])
        assert np.shares_memory(flat, out), "out must be contiguous"
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            # In float32: bfloat16 cannot hold 1 + a small weight.
            stored = np.empty(flat.shape, np.float32)
            dequantize_into(rows, entry.tensor.type, stored)
            flat[...] = stored - 1
        else:
            dequantize_into(rows, entry.tensor.type, flat)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file.metadata)


def _split_halves(rows: np.ndarray, shape: tuple[int, ...], num_heads: int) -> np.ndarray:
    """Encoded rows of q or k back in the order of split-half RoPE: row 2j+h of a head in the file is row h*(H/2)+j.

    A bias is one encoded row, so its elements are reordered; biases are not quantised.
    """
    lines = rows.reshape(shape[0], -1)
    heads = lines.reshape(num_heads, shape[0] // num_heads // 2, 2, -1)
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str, architecture: str) -> str:
    """The Hugging Face name; one that is unknown stays as it is and is reported as not belonging to the model."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
    layer, stem, kind = match.groups()
    inner = _LAYER.get(stem)
    if stem == "ffn_norm" and architecture.startswith("gemma"):
        inner = "pre_feedforward_layernorm"
    return name if inner is None else f"model.layers.{layer}.{inner}.{kind}"


def _config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The config.json that the converter started from, as far as the architectures here read it."""
    fields = _Fields(file, architecture)
    file_type = checked(file.metadata, "general.file_type", "an integer", -1)
    name, model_type = _ARCHITECTURES[architecture]
    num_heads, hidden_size = fields.get("attention.head_count"), fields.get("embedding_length")
    head_dim = fields.get("attention.key_length", hidden_size // num_heads)
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path}: missing tensors: token_embd.weight; the checkpoint is incomplete")
    config = {
        "architectures": [name],
        "model_type": model_type,
        "dtype": {0: "float32", 1: "float16"}.get(file_type, "bfloat16"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.get("feed_forward_length"),
        "num_hidden_layers": _num_layers(file, fields),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.get("context_length"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon", kind="a positive number"),
        "rope_theta": fields.get("rope.freq_base", 10000.0, kind="a positive number"),
        "rope_scaling": _rope_scaling(file, fields, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    if architecture == "qwen3moe":
        config |= _moe_config(fields)
    if architecture.startswith("gemma"):
        config |= _gemma_config(fields, config)
    elif fields.get("expert_count", 0, kind="an integer of 0 or more") and architecture != "qwen3moe":
        raise WeightsError(f"{file.path}: experts in architecture {architecture} (Mixtral) are not supported")
    return config


def _num_layers(file: GGUFFile, fields: "_Fields") -> int:
    """Of the metadata; a number far beyond the tensors' would take long to be found out later."""
    num_layers = fields.get("block_count")
    present = {int(match[1]) for name in file.tensors if (match := _LAYER_NAME.fullmatch(name))}
    if num_layers > max(present, default=-1) + 1:
        raise WeightsError(
            f"{file.path}: {fields.architecture}.block_count is {num_layers}, but the last layer with tensors is "
            f"{max(present, default=None)}; the checkpoint is incomplete"
        )
    return num_layers


def _moe_config(fields: "_Fields") -> dict[str, Any]:
    return {
        "num_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
        "norm_topk_prob": True,  # not stored: llama.cpp always normalises for this architecture
    }


def _gemma_config(fields: "_Fields", config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma has besides. The query scale is not stored; only the 27B models (46 and 62 layers) differ."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    gemma = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if config["num_hidden_layers"] in (46, 62) else config["head_dim"],
        "sliding_window": fields.get("attention.sliding_window"),
        "attn_logit_softcapping": fields.get("attn_logit_softcapping", None, kind="a positive number"),
        "final_logit_softcapping": fields.get("final_logit_softcapping", None, kind="a positive number"),
    }
    if fields.architecture == "gemma3":
        gemma |= {
            "rope_theta": fields.get("rope.freq_base", 1e6, kind="a positive number"),
            "rope_local_base_freq": 10000.0,
        }
        gemma |= {"sliding_window_pattern": 6}
    return gemma


def _rope_scaling(file: GGUFFile, fields: "_Fields", head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, fields, head_dim)
    kind = fields.get("rope.scaling.type", "none", kind="a string")
    if kind == "none":
        return None
    if kind != "linear":
        raise WeightsError(f"{file.path}: RoPE scaling {kind!r} is not supported; none, linear and llama3 are")
    return {"rope_type": "linear", "factor": fields.get("rope.scaling.factor", kind="a positive number")}


def _llama3_scaling(file: GGUFFile, fields: "_Fields", head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, of which GGUF stores only the result: each frequency's divisor. All published models use
    one set of parameters but for the factor, which is the largest divisor; that the rest fits is checked."""
    if file.tensors[_ROPE_FACTORS].shape != (head_dim // 2,):
        raise WeightsError(f"{file.path}: {_ROPE_FACTORS} must have {head_dim // 2} elements")
    stored = np.empty((1, head_dim // 2), np.float32)
    dequantize_into(file.rows(_ROPE_FACTORS)[None], file.tensors[_ROPE_FACTORS].type, stored)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    theta = fields.get("rope.freq_base", 10000.0, kind="a positive number")
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(stored[0], expected, rtol=1e-3):
        raise WeightsError(f"{file.path}: {_ROPE_FACTORS} does not hold Llama 3.1's factors; others are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Ids that end a text: end of sequence, of turn, of message."""
    found = [checked(metadata, f"tokenizer.ggml.{kind}_token_id", "an integer") for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(i for i in found if i is not None))
    config: dict[str, Any] = {"eos_token_id": eos} if eos else {}
    bos = checked(metadata, "tokenizer.ggml.bos_token_id", "an integer")
    return config if bos is None else config | {"bos_token_id": bos}


_REQUIRED = object()


class _Fields:
    """Metadata keys under the architecture's prefix."""

    def __init__(self, file: GGUFFile, architecture: str):
        self._file, self.architecture = file, architecture

    def get(self, key: str, default: Any = _REQUIRED, *, kind: str = "a positive integer") -> Any:
        full = f"{self.architecture}.{key}"
        value = self._file.metadata.get(full, default)
        if value is _REQUIRED:
            raise WeightsError(f"{self._file.path}: metadata lacks {full}; convert the model again")
        if isinstance(value, list):
            raise WeightsError(f"{self._file.path}: {full} differs between layers, which is not supported")
        return checked(self._file.metadata, full, kind, default)

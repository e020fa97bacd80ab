"""Makes the golden files of tests/models: tiny random models and their logits according to Hugging Face transformers.

Run it where torch (CPU) and transformers >= 5.24 are installed; jaxserve's tests only read the files it makes:

    python tests/golden/make_golden.py

Each `<case>.npz` holds `config` (the text of a config.json as published checkpoints have it), `w:<name>` (int8: the
checkpoint's tensors in units of STEP, so that a weight is one byte and yet exact in every float type), and per prompt
`tokens_<i>` (int32 [T]) and `logits_<i>` (float32 [T, V], the whole prompt, computed in float32). `configs_v5.json` has
every case's config as transformers 5 writes it, where RoPE's fields are laid out differently.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

STEP = 2.0**-6
PROMPT_LENGTHS = (40, 23)
MIN_ROUTER_GAP = 1e-4  # a tie between experts would be decided by rounding
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
QWEN2 = SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
QWEN3 = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "head_dim": 32}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GEMMA2 = SMALL | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 10,
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
CASES = {
    "llama2": LLAMA | {"num_key_value_heads": 4},
    "llama3": LLAMA
    | {
        "tie_word_embeddings": True,
        "rope_scaling": {  # with head_dim 16 the frequencies fall into all three of its ranges
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": QWEN2 | {"tie_word_embeddings": True, "rope_theta": 1000000.0, "use_sliding_window": False},
    "qwen2_sliding": QWEN2
    | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": QWEN3 | {"rope_theta": 1000000.0},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_raw": QWEN3_MOE | {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "mistral": SMALL
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "sliding_window": 8},
    "gemma2": GEMMA2,
    "gemma2_wide": GEMMA2
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 256}
    | {"num_key_value_heads": 1, "query_pre_attn_scalar": 256},
    "gemma3": SMALL
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "num_hidden_layers": 8,  # 5 local, 1 global, 2 local
        "head_dim": 16,
        "query_pre_attn_scalar": 10,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
}


def random_weights(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fills all parameters with normal values on the grid of STEP, so large that wrong code shows in the logits."""
    zero_centred = model.config.model_type.startswith("gemma")  # Gemma multiplies by 1 + weight
    for name, weight in model.named_parameters():
        std, mean = (0.3, 0.0 if zero_centred else 1.0) if "norm" in name else (0.5 if "bias" in name else 0.15, 0.0)
        values = torch.randn(weight.shape, generator=generator) * std + mean
        weight.data = (values / STEP).round().clamp(-127, 127) * STEP


def watch_routers(model: torch.nn.Module) -> list[float]:
    """A list that will hold, for every router call, the least gap between the last chosen expert and the next."""
    gaps: list[float] = []

    def note(router, inputs, output):
        probs = output[0].softmax(-1).sort(-1, descending=True).values
        gaps.append(float((probs[:, router.top_k - 1] - probs[:, router.top_k]).min()))

    for name, module in model.named_modules():
        if name.endswith("mlp.gate") and hasattr(module, "top_k"):
            module.register_forward_hook(note)
    return gaps


def checkpoint(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The tensors under the names of a published checkpoint, as int8 multiples of STEP."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    units = {name: tensor / STEP for name, tensor in tensors.items()}
    assert all((value == value.astype(np.int8)).all() for value in units.values())
    return {f"w:{name}": value.astype(np.int8) for name, value in units.items()}


@torch.no_grad()
def make(case: str, config: dict, seed: int) -> dict:
    """Writes `<case>.npz`; returns the config in transformers 5's layout."""
    generator = torch.Generator().manual_seed(seed)
    hf_config = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    random_weights(model, generator)
    gaps = watch_routers(model)
    arrays = {"config": np.array(json.dumps(config))}
    for i, length in enumerate(PROMPT_LENGTHS):
        tokens = torch.randint(config["vocab_size"], (1, length), generator=generator)
        logits = model(tokens, use_cache=False).logits[0]
        arrays |= {f"tokens_{i}": tokens[0].numpy().astype(np.int32), f"logits_{i}": logits.numpy()}
    assert min(gaps, default=1.0) > MIN_ROUTER_GAP, f"{case}: experts are nearly tied, choose another seed"
    path = Path(__file__).with_name(f"{case}.npz")
    np.savez_compressed(path, **arrays, **checkpoint(model))
    spread = np.std(arrays["logits_0"])
    print(f"{case:14} {path.stat().st_size:7} bytes, logits std {spread:.2f}, router gap {min(gaps, default=1.0):.1e}")
    return AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()


def main() -> None:
    configs = {case: make(case, config, seed) for seed, (case, config) in enumerate(CASES.items())}
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(config)}" for case, config in configs.items())
    Path(__file__).with_name("configs_v5.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()

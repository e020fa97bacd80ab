"""A tiny random Llama in a Hugging Face folder, with a real byte-level tokenizer and a chat template."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from jaxserve import LLM

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Paged attention keeps keys and values in pages; the scheduler hands them out.",
    "Pack my box with five dozen liquor jugs, then serve tokens one step at a time.",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def make_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def random_weights(vocab_size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    d, f = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    head = d // CONFIG["num_attention_heads"]
    kv = CONFIG["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    tensors = {"model.embed_tokens.weight": rng.normal(size=(vocab_size, d)), "model.norm.weight": np.ones(d)}
    for i in range(CONFIG["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = rng.normal(size=shape) * 2 / np.sqrt(shape[1])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(d)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 7, "max_new_tokens": 5}))
    save_file(random_weights(vocab_size, np.random.default_rng(0)), folder / "model.safetensors")
    return str(folder)


TEST_OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "page_size": 8,
    "num_pages": 400,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "warm_up": "off",
}


@pytest.fixture(scope="session")
def make_llm(tiny_model, tmp_path_factory):
    """`make_llm(**options)` gives an `LLM` over the tiny model; all are closed at the end, and compile only once."""
    made: list[LLM] = []
    cache = str(tmp_path_factory.mktemp("compiled"))

    def make(**options) -> LLM:
        made.append(LLM(tiny_model, **(TEST_OPTIONS | {"compilation_cache_dir": cache} | options)))
        device = made[-1].llm_engine.core.runner.device
        for kind, kv in device.kv.items():  # what nobody wrote must not be read
            pages = {"k": jnp.full_like(kv.k, jnp.nan), "v": jnp.full_like(kv.v, jnp.nan)}
            device.kv[kind] = dataclasses.replace(kv, **pages)
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def llm(make_llm) -> LLM:
    """One engine for all tests that leave it as they found it."""
    return make_llm()


@pytest.fixture(autouse=True)
def pool_balances(request):
    """Whatever a test did to the shared engine, no page and no request may be left behind."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").llm_engine
        while engine.has_unfinished_requests():
            engine.step()
        pool = engine.core.scheduler.pool
        pool.check()
        assert pool.num_held == 0
        assert engine.get_num_unfinished_requests() == 0

"""A model whose weights are a formula: it finds what followed a key earlier in the text, at any distance.

How it works. The hidden state has four parts of 64 channels. A key's embedding has the key's code (+1 and -1, from a
generator with a fixed seed) in the first, a value's has the value's code in the second, and every token has ones in the
last; filler has nothing else.

- Layer 0 has a window of two tokens. Its queries and keys are made of the ones alone, in the one pair of channels that
  rotates, so that a score depends on the distance alone; the query is turned so that the token before wins. What it
  reads there, the first part, goes to the third part: now a token knows whether a key came before it, and which.
- Layer 1 does nothing, so that policies that leave the first two layers dense hold in the lookup.
- Layer 2, the only one that sees all positions, is the lookup: its query is the first part, its key the third, its
  value the second; it adds the value that it finds to the second part, eight times as strong as a key's own code.
  Pairs of channels 32 to 63 hold the codes; at a rope_theta of 1e30 they turn by 1e-15 a position or less: nothing.

All else is zero. The logits are products with the embeddings (tied): after a key that had a value the value wins. It is
a Mistral, which is a Llama with windows: nothing in the engine knows of it.
"""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jaxserve.evaluation.tasks import Question, Sample, Task
from jaxserve.tokenizer import Tokenizer

RETRIEVAL_MODEL = "retrieval"
MAX_POSITIONS = 131072
NUM_KEYS, NUM_VALUES = 32768, 1024
FILLER = "."
PART = 64  # channels of a code
HEAD_DIM = 2 * PART
HIDDEN = 4 * PART
KEY, VALUE, BEFORE, ONES = (slice(i * PART, (i + 1) * PART) for i in range(4))
IN_HEAD = np.r_[PART // 2 : PART, PART + PART // 2 : HEAD_DIM]  # a head's channels that do not turn
SHARPNESS = 60.0  # score of a match, in nats over filler
LOUDNESS = 8.0  # of a value that was found, over codes of embeddings
NUM_QUESTIONS = 16  # about each text

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "dtype": "bfloat16",
    "vocab_size": 1 + NUM_KEYS + NUM_VALUES,
    "hidden_size": HIDDEN,
    "intermediate_size": PART,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e30,
    "sliding_window": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}


def write(folder: Path) -> None:
    """Writes config.json, model.safetensors and a tokenizer, whose tokens are words: `.`, `k0`, `k1`, ..., `v0`, ..."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in _weights().items()}
    save_file(tensors, folder / "model.safetensors")
    words = [FILLER, *(f"k{i}" for i in range(NUM_KEYS)), *(f"v{i}" for i in range(NUM_VALUES))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=FILLER))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend).save(folder)


def lookup(length: int, seed: int, every: int = 32) -> Sample:
    """`length` records of a key and its value, one in `every` tokens of filler, and questions about some of them."""
    rng = random.Random(seed)
    keys = rng.sample(range(NUM_KEYS), length)
    records = [Question(f" k{key}", f" v{rng.randrange(NUM_VALUES)}") for key in keys]
    filler = f" {FILLER}" * (every - 2)
    text = FILLER + "".join(f"{key}{value}{filler}" for key, value in records)
    return Sample(text, rng.sample(records, min(NUM_QUESTIONS, length)))


def crowded_lookup(length: int, seed: int) -> Sample:
    """As `lookup`, a record every four tokens: a page holds so many keys that bounds of its channels say little."""
    return lookup(length, seed, every=4)


TASKS: Mapping[str, Task] = {"lookup": lookup, "crowded lookup": crowded_lookup}


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    embed = np.zeros((CONFIG["vocab_size"], HIDDEN))
    embed[1 : 1 + NUM_KEYS, KEY] = _codes(rng, NUM_KEYS)
    embed[1 + NUM_KEYS :, VALUE] = _codes(rng, NUM_VALUES)
    embed[:, ONES] = 1.0
    tensors = {"model.embed_tokens.weight": embed, "model.norm.weight": np.ones(HIDDEN)}
    for i, attention in enumerate((_previous_token(), {}, _lookup())):
        shapes = {
            "self_attn.q_proj": (HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEAD_DIM),
            "mlp.gate_proj": (CONFIG["intermediate_size"], HIDDEN),
            "mlp.up_proj": (CONFIG["intermediate_size"], HIDDEN),
            "mlp.down_proj": (HIDDEN, CONFIG["intermediate_size"]),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = attention.get(name[-6:], np.zeros(shape))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(HIDDEN)
    return tensors


def _codes(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], size=(count, PART))


def _after_norm(num_parts: int) -> float:
    """What the norm makes of a one where so many parts are ones in magnitude, and the others nothing."""
    return math.sqrt(HIDDEN / (num_parts * PART))


def _previous_token() -> dict[str, np.ndarray]:
    """Scores `c cos(distance - 1 / 2 - pi / 2)`: as far above 0 one token back as below it at the token itself."""
    q, k, v, o = _empty()
    k[0, ONES] = 1 / PART
    angle = (1 + math.pi) / 2
    for channel, part in ((0, math.cos(angle)), (PART, -math.sin(angle))):
        q[channel, ONES] = SHARPNESS * math.sqrt(HEAD_DIM) / PART * part
    v[IN_HEAD, KEY] = np.eye(PART) / _after_norm(2)
    o[BEFORE, IN_HEAD] = np.eye(PART)
    return {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o}


def _lookup() -> dict[str, np.ndarray]:
    """Scores SHARPNESS where the key before a value, of three parts, is the key of the query, of two."""
    q, k, v, o = _empty()
    q[IN_HEAD, KEY] = np.eye(PART) * SHARPNESS * math.sqrt(HEAD_DIM) / PART / _after_norm(2)
    k[IN_HEAD, BEFORE] = np.eye(PART) / _after_norm(3)
    v[IN_HEAD, VALUE] = np.eye(PART) / _after_norm(3)
    o[VALUE, IN_HEAD] = np.eye(PART) * LOUDNESS
    return {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o}


def _empty() -> tuple[np.ndarray, ...]:
    """Weights of q, k, v and o, all zero."""
    return (*(np.zeros((HEAD_DIM, HIDDEN)) for _ in range(3)), np.zeros((HIDDEN, HEAD_DIM)))

"""Makes demo_greedy.json: what transformers, in float32, writes with the demo model's dequantised weights.

Run it where torch (CPU), transformers >= 5.24, gguf and jinja2 are installed; jaxserve's tests only read the result:

    python tests/golden/make_demo_golden.py .../SmolLM2-135M-Instruct.Q4_1.gguf

Weights, tokenizer and chat template all come from that file. Decoding is greedy, one prompt at a time, for 64 tokens
or up to and including <|im_end|> (id 2, the only token that ends a text). `margins[i]` is the distance in logits
between the chosen token i and the runner-up: where it is tiny, two correct programs may differ.
"""

import json
import sys
from pathlib import Path

import gguf
import jinja2
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

MAX_TOKENS = 64
EOS = 2
SPECIAL = 3  # GGUF's token type for control tokens
TENSORS = {  # GGUF's names within a block -> Hugging Face's within a layer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LONG = " ".join(f"Item {i} costs {i * 7 % 90 + 3} euros and weighs {i * 13 % 40 + 1} grams." for i in range(1, 31))
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, Neil Armstrong",
    "La lune est belle ce soir et",
    "水は",
    "Water",
    'SELECT name, age FROM users WHERE age > 30 AND city = "Lyon',
    "Naïve café 🙂 résumé: 100% of\tthe  time",
    "<html>\n<head>\n<title>",
    "Q: What is 17 + 25?\nA:",
    LONG + " The heaviest item is",
]
CHATS = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about rain."}],
    [{"role": "user", "content": "List three fruits that are red."}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Is the sky blue?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [{"role": "user", "content": "Summarise in one sentence: " + LONG}],
]


def read_tokenizer(fields: dict) -> Tokenizer:
    """SmolLM's tokenizer: byte-level BPE, GPT-2's splitting, every digit a token of its own."""
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"].contents()
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == SPECIAL
        ]
    )
    return tokenizer


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q and k are stored for interleaved rotary pairs (2i, 2i+1); transformers rotates pairs (i, i + H/2)."""
    out, width = weight.shape
    return weight.reshape(num_heads, out // num_heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def read_model(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        scope, _, rest = tensor.name.removesuffix(".weight").partition(".")
        if scope == "blk":
            layer, kind = rest.split(".")
            weight = unpermute(weight, heads[kind]) if kind in heads else weight
            state[f"model.layers.{layer}.{TENSORS[kind]}.weight"] = torch.from_numpy(weight)
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[scope]
            state[f"{name}.weight"] = torch.from_numpy(weight)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    assert not missing
    assert not unexpected
    return model


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, and how far each was ahead of the second."""
    tokens, margins, cache, step = [], [], None, prompt
    while len(tokens) < MAX_TOKENS and tokens[-1:] != [EOS]:
        output = model(torch.tensor([step]), cache=cache, use_cache=True)
        cache = output.cache
        first, second = output.logits[0, -1].topk(2).values.tolist()
        step = [int(output.logits[0, -1].argmax())]
        tokens += step
        margins.append(round(first - second, 5))
    return tokens, margins


def main() -> None:
    reader = gguf.GGUFReader(sys.argv[1])
    tokenizer = read_tokenizer(reader.fields)
    model = read_model(reader)
    template = jinja2.Environment().from_string(reader.fields["tokenizer.chat_template"].contents())
    rendered = [template.render(messages=messages, add_generation_prompt=True) for messages in CHATS]
    cases = []
    for prompt, messages in zip(PROMPTS + rendered, [None] * len(PROMPTS) + CHATS, strict=True):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        tokens, margins = generate(model, ids)
        case = {"prompt": prompt, "prompt_token_ids": ids, "token_ids": tokens, "margins": margins}
        case["text"] = tokenizer.decode(tokens)
        cases.append(case if messages is None else case | {"messages": messages})
        print(f"{len(ids):4} + {len(tokens):2} tokens, least margin {min(margins):.4f}: {case['text'][:60]!r}")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    Path(__file__).with_name("demo_greedy.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

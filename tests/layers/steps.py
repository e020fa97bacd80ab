"""Small models and steps for the tests of the decoder stack."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.decoder import forward
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch, init_kv_cache
from jaxserve.models import Model, get_model

PAGE_SIZE, MAX_PAGES = 4, 8

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA = LLAMA | {  # two kinds of layers, in a pattern that the layer count cuts
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}


MOE = LLAMA | {  # a token picks one expert
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}


def make(hf: dict) -> tuple[Model, dict, dict[str, KVCache]]:
    """A model, random float32 params, and a cache of NaN for 4 sequences."""
    model = get_model(hf)
    params = model.init(jax.random.key(0), jnp.float32)
    kv = init_kv_cache(model.config, num_pages=4 * MAX_PAGES + 1, page_size=PAGE_SIZE, dtype=jnp.float32)
    return model, params, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv)


def page_table(num_seqs: int) -> np.ndarray:
    return 1 + np.arange(num_seqs * MAX_PAGES, dtype=np.int32).reshape(num_seqs, MAX_PAGES)[:, ::-1]


def step(decode: list[tuple[int, int]], prefill: list[tuple[int, list[int]]], table: np.ndarray) -> StepBatch:
    """Decode rows are (token, position) of sequences 0, 1 ...; prefill rows (start, tokens) of the ones after them."""
    rows = [(s, position, token) for s, (token, position) in enumerate(decode)]
    for s, (start, tokens) in enumerate(prefill, start=len(decode)):
        rows += [(s, start + j, token) for j, token in enumerate(tokens)]
    seq, positions, tokens = np.asarray(rows, np.int32).T
    cut = len(decode)
    ends = [start + len(tokens) for start, tokens in prefill]
    regions = (
        AttentionBatch(page_table=table[:cut], kv_lens=np.asarray([p + 1 for _, p in decode], np.int32)),
        AttentionBatch(
            page_table=table[cut : cut + len(prefill)],
            kv_lens=np.asarray(ends, np.int32),
            cu_q_lens=np.cumsum([0, *(len(tokens) for _, tokens in prefill)]).astype(np.int32),
        ),
    )
    batch = StepBatch(
        token_ids=tokens,
        positions=positions,
        page_ids=table[seq, positions // PAGE_SIZE],
        page_offsets=positions % PAGE_SIZE,
        decode=regions[0] if decode else None,
        prefill=regions[1] if prefill else None,
    )
    return jax.tree.map(jnp.asarray, batch)


def rows_and_cache(model: Model, params: dict):
    """`forward` without its count of experts."""

    def run(*args, **options):
        return forward(model, params, *args, **options)[:2]

    return run

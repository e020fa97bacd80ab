"""A pass over a text says what decoding says, also under policies that go other ways than Quest."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, weights
from jaxserve.evaluation.watch import Reader
from jaxserve.layers.sparse import Blasst, CompactAttention, FlashPrefill, Kascade, SparseAttention

PROMPT = np.random.default_rng(3).integers(3, 300, 70).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FOLLOWS = Kascade(least=24, anchors=(0, 1), heads=((0, 1), (1, 0), (1, 1)))
POLICIES = {
    "kascade": SparseAttention(decode=FOLLOWS, prefill=FOLLOWS),
    "compact": SparseAttention(
        decode=FlashPrefill(alpha=1, sinks=0, window=0), prefill=CompactAttention(alpha=1, sinks=0, window=0)
    ),
    "blasst": SparseAttention(decode=Blasst(threshold_scale_factor=75.0), prefill=Blasst(threshold_scale_factor=75.0)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_a_pass_over_a_text_says_what_decoding_says(tiny_model, name):
    loaded = weights.load(tiny_model, dtype=jnp.float32, progress=False)
    options = {"dtype": "float32", "max_model_len": 96, "page_size": 8, "num_pages": 26, "max_num_seqs": 2}
    llm = LLM(tiny_model, sparse_attention=POLICIES[name], warm_up="off", **options)
    answer = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    reader = Reader(loaded, max_tokens=96, page_size=8)
    found, dense = (reader.ask(reader.read(PROMPT, sparse), answer) for sparse in (POLICIES[name], None))
    assert found.says(answer)
    assert found.kl_from(dense) > 1e-4
    assert found.recall < 1

"""Under sparse attention too, tokens do not depend on how the work was cut, batched, cached, pre-empted or laid out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import DENSE, folder_of

from jaxserve import LLM, SamplingParams
from jaxserve.layers.sparse import Quest, SparseAttention, StreamingLLM

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 160,
    "page_size": 8,
    "num_pages": 26,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "warm_up": "off",
}
WHOLE = {"max_num_batched_tokens": 128, "enable_prefix_caching": False, "async_scheduling": False}
QUEST = Quest(budget=24, layers=(0, None))  # three pages of eight tokens
ANSWERS = SparseAttention(decode=dataclasses.replace(QUEST, layers=(1, None)))
BOTH = SparseAttention(decode=QUEST, prefill=StreamingLLM(sinks=4, window=12, layers=(0, 1)))
SAME = SparseAttention(decode=QUEST, prefill=QUEST)
POLICIES = {"answers": ANSWERS, "both": BOTH, "same": SAME}
FAST = ("answers", "both")
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 300, n).tolist() for n in (100, 71, 80)]
PROMPTS.append(PROMPTS[0][:50] + PROMPTS[1][:20])  # shares a prefix


NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in POLICIES]


def run(llm, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Engines whose metadata, like their pages, are not numbers until they are written."""
    root = tmp_path_factory.mktemp("sparse")
    model, cache = folder_of(DENSE, root / "model"), str(root / "compiled")
    made = []

    def start(sparse, **options):
        made.append(LLM(model, sparse_attention=sparse, **(OPTIONS | {"compilation_cache_dir": cache} | options)))
        device = made[-1].llm_engine.core.runner.device
        device.kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan, device=x.sharding), device.kv)
        return made[-1]

    yield start
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def alone(start):
    """Tokens by policies: each prompt by itself, in one piece, without cache or overlap."""
    found = {}

    def of(sparse):
        if sparse not in found:
            llm = start(sparse, **WHOLE)
            found[sparse] = [run(llm, [prompt])[0] for prompt in PROMPTS]
        return found[sparse]

    return of


@pytest.fixture(scope="module")
def crowded(start):
    """Engines by policies, with little room and small steps."""
    found = {}

    def of(sparse):
        if sparse not in found:
            found[sparse] = start(sparse)
        return found[sparse]

    return of


def check(llm, expected):
    assert run(llm) == expected
    assert run(llm) == expected  # a second time: with a filled prefix cache, over pages that others had
    metrics = llm.get_metrics()
    assert metrics["jaxserve:num_preemptions"] > 0
    if llm.llm_engine.core.scheduler.cache.enabled:
        assert metrics["jaxserve:prefix_cache_hits"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_policies_change_what_the_model_says(alone, name):
    """Else the tests below could not fail."""
    assert all(a != b for a, b in zip(alone(POLICIES[name]), alone(None), strict=True))
    assert len({tuple(tokens) for tokens in alone(POLICIES[name])}) == len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_mates_chunks_prefix_hits_or_preemption(alone, crowded, name):
    check(crowded(POLICIES[name]), alone(POLICIES[name]))


@pytest.mark.parametrize("options", [{"prefill": "layered"}, {"enable_prefix_caching": False}], ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in POLICIES])
def test_tokens_do_not_depend_on(start, alone, name, options):
    check(start(POLICIES[name], **options), alone(POLICIES[name]))

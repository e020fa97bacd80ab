"""Under sparse attention too, tokens do not depend on how the work was cut, batched, cached, pre-empted or laid out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.layers.sparse import Quest, SparseAttention, StreamingLLM

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL = {"max_model_len": 160, "num_pages": 200, "max_num_seqs": 4}
QUEST = Quest(budget=24, layers=(1, None))  # three pages of eight tokens
STREAMING = StreamingLLM(sinks=4, window=12, layers=(0, 2))
ANSWERS = SparseAttention(decode=QUEST)
BOTH = SparseAttention(decode=QUEST, prefill=STREAMING)
SAME = SparseAttention(decode=STREAMING, prefill=STREAMING)
POLICIES = {"answers": ANSWERS, "both": BOTH, "same": SAME}
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 300, n).tolist() for n in (1, 16, 33, 64, 100)]
PROMPTS.append(PROMPTS[-1][:50] + PROMPTS[0])  # shares a prefix


def run(llm, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def start(make_llm):
    """Engines whose metadata, like their pages, is not a number until it is written."""

    def start(sparse, **options):
        llm = make_llm(**(SMALL | {"sparse_attention": sparse} | options))
        device = llm.llm_engine.core.runner.device
        for kind, kv in device.kv.items():
            if kv.meta is not None:
                device.kv[kind] = dataclasses.replace(kv, meta=jnp.full_like(kv.meta, jnp.nan))
        return llm

    return start


@pytest.fixture(scope="module")
def dense(make_llm):
    return run(make_llm(**SMALL))


@pytest.fixture(scope="module")
def alone(start):
    """Tokens by name of the policies: each prompt by itself, in one piece, without cache or overlap."""
    found = {}

    def of(name):
        if name not in found:
            options = {"max_num_batched_tokens": 256, "enable_prefix_caching": False, "async_scheduling": False}
            llm = start(POLICIES[name], **options)
            found[name] = [run(llm, [prompt])[0] for prompt in PROMPTS]
        return found[name]

    return of


@pytest.mark.parametrize("name", POLICIES)
def test_policies_change_what_the_model_says(alone, dense, name):
    """Else the tests below could not fail."""
    assert alone(name) != dense
    assert len({tuple(tokens) for tokens in alone(name)}) == len(PROMPTS)


@pytest.mark.parametrize("policy", [Quest(budget=160, layers=(0, None)), StreamingLLM(window=160)], ids=str)
def test_a_policy_that_selects_all_pages_is_dense(start, dense, policy):
    assert run(start(policy)) == dense
    assert run(start(SparseAttention(decode=policy, prefill=policy))) == dense


OPTIONS = [
    {"max_num_batched_tokens": 16},
    {"num_pages": 26},
    {"num_pages": 26, "max_num_batched_tokens": 16, "prefill": "layered"},
    {"num_pages": 26, "enable_prefix_caching": False, "async_scheduling": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_do_not_depend_on(start, alone, name, options):
    llm = start(POLICIES[name], **options)
    assert run(llm) == alone(name)
    assert run(llm) == alone(name)  # a second time: with a filled prefix cache, over pages that others had
    metrics = llm.get_metrics()
    if "num_pages" in options:
        assert metrics["jaxserve:num_preemptions"] > 0
    if options.get("enable_prefix_caching", True):
        assert metrics["jaxserve:prefix_cache_hits"] > 0

"""The engine over a KV cache in float8."""

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.pallas_kernels.paged_attention.types import FP8

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
OPTIONS = {"max_model_len": 160, "num_pages": 500, "kv_cache_dtype": "fp8", "max_num_seqs": 4}
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 300, n).tolist() for n in (1, 33, 100)]
PROMPTS.append(PROMPTS[-1][:50] + PROMPTS[0])  # shares a prefix


def run(llm) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, [GREEDY, SEEDED, GREEDY, SEEDED], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(make_llm):
    """Without a prefix cache, overlap or want of pages."""
    return run(make_llm(enable_prefix_caching=False, async_scheduling=False, **OPTIONS))


def test_tokens_do_not_depend_on_prefix_cache_preemption_or_chunks(make_llm, plain):
    llm = make_llm(**(OPTIONS | {"num_pages": 22, "max_num_batched_tokens": 16, "max_num_seqs": 4}))
    assert run(llm) == plain
    assert run(llm) == plain  # now from the prefix cache
    metrics = llm.get_metrics()
    assert metrics["jaxserve:prefix_cache_hits"] > 0
    assert metrics["jaxserve:num_preemptions"] > 0
    llm.close()


def test_the_pages_are_in_float8_and_that_changes_what_the_model_says(make_llm, plain):
    llm = make_llm(**(OPTIONS | {"kv_cache_dtype": "fp8"}))
    assert run(llm) == plain
    assert all(kv.k.dtype == kv.v.dtype == FP8 for kv in llm.llm_engine.core.runner.device.kv.values())
    assert run(make_llm(**(OPTIONS | {"kv_cache_dtype": "auto"}))) != plain


def test_the_same_memory_holds_twice_the_tokens_of_bfloat16(make_llm):
    num_pages = [
        make_llm(num_pages=None, kv_cache_memory_bytes=1 << 20, **options).llm_engine.core.runner.config.num_pages
        for options in (
            {"kv_cache_dtype": "fp8"},
            {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
            {"dtype": "bfloat16"},
            {"dtype": "float32"},
        )
    ]
    page_bytes = 8 * 2 * 3 * 2 * 8  # tokens, keys and values, layers, heads, head_dim
    assert num_pages == [(1 << 20) // (page_bytes * width) for width in (1, 1, 2, 4)]

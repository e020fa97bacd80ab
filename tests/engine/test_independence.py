"""Float32 tokens do not depend on how the work was cut, batched, cached, pre-empted or overlapped."""

import numpy as np
import pytest

from jaxserve import SamplingParams

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {"max_model_len": 160, "num_pages": 500}
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 300, n).tolist() for n in (1, 7, 16, 33, 64, 100)]
PROMPTS.append(PROMPTS[-1][:50] + PROMPTS[0])  # shares a prefix


def run(llm, prompts=PROMPTS, mates=()):
    """Greedy and seeded tokens of `prompts`, generated together with `mates`."""
    params = [GREEDY] * len(prompts) + [SEEDED] * len(prompts) + [SEEDED] * len(mates)
    outputs = llm.generate([*prompts, *prompts, *mates], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs[: 2 * len(prompts)]]


@pytest.fixture(scope="module")
def alone(make_llm):
    """Each prompt by itself, in one piece, without cache or overlap."""
    llm = make_llm(
        max_num_batched_tokens=256, enable_prefix_caching=False, async_scheduling=False, page_size=16, **OPTIONS
    )
    greedy = [llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS]
    return greedy + [llm.generate([p], SEEDED, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 8},
        {"page_size": 16},
        {"page_size": 64, "num_pages": 100},
        {"long_prefill_token_threshold": 16},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 256, "enable_chunked_prefill": False},
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        {"num_pages": 26},
        {"num_pages": 26, "async_scheduling": False, "enable_prefix_caching": False},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on(make_llm, alone, options):
    llm = make_llm(**(OPTIONS | options))
    assert run(llm) == alone
    assert run(llm) == alone  # a second time, now with a filled prefix cache
    if options.get("num_pages") == 26:
        assert llm.get_metrics()["jaxserve:num_preemptions"] > 0
    llm.close()


@pytest.mark.parametrize("num_mates", [0, 7, 31])
def test_tokens_do_not_depend_on_batch_mates(make_llm, alone, num_mates):
    llm = make_llm(max_num_seqs=32, **OPTIONS)
    mates = [rng.integers(3, 300, n % 40 + 1).tolist() for n in range(num_mates)]
    for i in (1, 4):
        assert run(llm, [PROMPTS[i]], mates) == [alone[i], alone[len(PROMPTS) + i]]
    llm.close()


def test_prompts_of_this_file_give_different_texts(alone):
    """Else the tests above could not fail."""
    assert len({tuple(t) for t in alone}) == len(alone)
    assert all(len(set(t)) > 2 for t in alone)

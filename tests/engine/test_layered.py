"""Layered prefill in the engine: the tokens of whole prompts, whatever the groups and whoever leaves meanwhile."""

import pytest

from jaxserve import SamplingParams
from jaxserve.scheduler import layered

PROMPTS = [[7 + i + j % 11 for j in range(length)] for i, length in enumerate((40, 3, 21, 9, 60, 1))]


@pytest.fixture
def layered_llm(make_llm, monkeypatch):
    """An engine whose cohorts have a group for every `tokens` of their tokens."""

    def make(tokens, **options):
        monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", tokens)
        return make_llm(**{"prefill": "layered", **options})

    return make


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def greedy(num_tokens=12, **options):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 32}, {"num_pages": 14, "max_model_len": 80}, {"async_scheduling": False}]
)
@pytest.mark.parametrize("tokens", [8, 24, 200])
def test_tokens_are_those_of_whole_prompts(make_llm, layered_llm, tokens, options):
    with make_llm() as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy()))
    with layered_llm(tokens, **options) as llm:
        found = llm.generate(PROMPTS, greedy())
        spans = {(step.layer_lo, step.layer_hi) for step in llm.recent_steps() if step.num_prefill_tokens}
    assert tokens_of(found) == expected
    assert (len(spans) > 1) == (tokens < 100)


def test_prompt_logprobs_come_with_the_last_group(make_llm, layered_llm):
    params = greedy(2, prompt_logprobs=1)
    with make_llm() as llm:
        expected = llm.generate(PROMPTS[:3], params)
    with layered_llm(8) as llm:
        found = llm.generate(PROMPTS[:3], params)
    for one, other in zip(found, expected, strict=True):
        assert [d and {k: round(v.logprob, 4) for k, v in d.items()} for d in one.prompt_logprobs] == [
            d and {k: round(v.logprob, 4) for k, v in d.items()} for d in other.prompt_logprobs
        ]


def test_who_leaves_between_two_groups_disturbs_nobody(make_llm, layered_llm):
    with make_llm() as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy()))
    with layered_llm(8) as llm:
        engine = llm.llm_engine
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, greedy())
        engine.step()
        engine.abort_request("2")
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert {i: output.outputs[0].token_ids for i, output in outputs.items()} == {
        str(i): tokens for i, tokens in enumerate(expected) if i != 2
    }

"""The demo model's greedy text against transformers', float32 on the same dequantised weights.

tests/golden/make_demo_golden.py says how the expected tokens were made. A text is compared up to the first token whose
lead over the runner-up is so small that rounding may decide it.
"""

import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams

CASES = json.loads((Path(__file__).parent / "golden" / "demo_greedy.json").read_text())
LEAST_MARGIN = 1e-3  # in logits
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def first_difference(case: dict, token_ids: list[int]) -> int | None:
    """Where the tokens leave the expected ones without the excuse of a near tie."""
    for i, (expected, margin) in enumerate(zip(case["token_ids"], case["margins"], strict=True)):
        if i >= len(token_ids) or token_ids[i] != expected:
            return None if margin < LEAST_MARGIN else i
    return None if len(token_ids) == len(case["token_ids"]) else len(case["token_ids"])


@pytest.fixture(scope="module")
def llm():
    few_programs = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "warm_up": "off"}
    made = LLM("smollm2-135m", dtype="float32", max_model_len=1024, num_pages=512, **few_programs)
    yield made
    made.close()


def test_prompts_become_the_same_tokens(llm):
    tokenizer = llm.get_tokenizer()
    for case in CASES:
        if "messages" in case:
            ids = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=True)
        else:
            ids = tokenizer.encode(case["prompt"])
        assert ids == case["prompt_token_ids"], case["prompt"]


def test_greedy_text_of_twenty_prompts_equals_that_of_transformers(llm):
    outputs = llm.generate([case["prompt"] for case in CASES], GREEDY, use_tqdm=False)
    differences = {
        case["prompt"][:40]: i
        for case, output in zip(CASES, outputs, strict=True)
        if (i := first_difference(case, output.outputs[0].token_ids)) is not None
    }
    assert not differences
    same = [case for case, o in zip(CASES, outputs, strict=True) if o.outputs[0].token_ids == case["token_ids"]]
    texts = {output.prompt: output.outputs[0].text for output in outputs}
    whole_characters = [case["text"].removesuffix("\ufffd") for case in same]  # the last token may end within one
    assert [texts[case["prompt"]] for case in same] == whole_characters


def test_a_text_ends_where_transformers_ends_it(llm):
    case = next(case for case in CASES if case["token_ids"][-1] == 2)
    output = llm.generate(case["prompt"], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (case["token_ids"], "stop")


def test_a_wrong_token_is_found_unless_it_was_a_near_tie():
    case = {"token_ids": [5, 6, 7], "margins": [2.0, 0.5, 0.0005]}
    assert first_difference(case, [5, 6, 7]) is None
    assert first_difference(case, [5, 6, 8]) is None
    assert first_difference(case, [5, 9, 7]) == 1
    assert first_difference(case, [5]) == 1
    assert first_difference(case, [5, 6, 7, 7]) == 3

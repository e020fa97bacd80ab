"""Structured output with a vocabulary and a model that were not made for a test."""

import json
import re

import pytest

from jaxserve import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "string", "format": "date"},
        "children": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
        "height": {"type": "integer", "minimum": 30, "maximum": 250},
    },
    "required": ["name", "born", "children", "height"],
    "additionalProperties": False,
}
REGEX = r"\+[0-9]{2} [0-9]{3,5}-[0-9]{4,7}"
CHOICE = ["red", "green", "blue", "the colour of the sky"]
FORMS = [{"json": SCHEMA, "disable_any_whitespace": True}, {"regex": REGEX}, {"choice": CHOICE}]


@pytest.mark.full
def test_the_demo_model_keeps_to_every_form():
    params = [SamplingParams(max_tokens=250, seed=i, structured_outputs=FORMS[i % 3]) for i in range(48)]
    few_programs = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "warm_up": "off"}
    with LLM("smollm2-135m", max_model_len=512, **few_programs) as llm:
        outputs = llm.generate(["About a person: "] * 48, params, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    assert {sample.finish_reason for sample in samples} == {"stop"}
    people = [json.loads(sample.text) for sample in samples[::3]]
    assert all(set(person) == set(SCHEMA["required"]) and 30 <= person["height"] <= 250 for person in people)
    assert all(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", person["born"]) for person in people)
    assert all(re.fullmatch(REGEX, sample.text) for sample in samples[1::3])
    assert all(sample.text in CHOICE for sample in samples[2::3])
    assert len({sample.text for sample in samples}) > 20

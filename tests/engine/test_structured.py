"""Answers in a given form, from a model that would write anything: temperature 1 and random weights."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from forms import FORMS, FREE, REGEX, SCHEMA, generate, is_in_form, params, tokens_of
from hypothesis import given, settings, strategies as st

import jaxserve
from jaxserve import AsyncLLM, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.grammars import Grammars


@pytest.mark.parametrize("name", FORMS)
def test_a_finished_answer_has_the_form(llm, name):
    prompts = [[7 * i + 3, 5 * i + 9] for i in range(16)]
    outputs = generate(llm, prompts, [params(FORMS[name], seed=i, temperature=2.0) for i in range(16)])
    samples = [output.outputs[0] for output in outputs]
    finished = [sample.text for sample in samples if sample.finish_reason == "stop"]
    assert len(finished) >= 12
    assert all(is_in_form(name, text) for text in finished), finished
    assert {sample.finish_reason for sample in samples} <= {"stop", "length"}
    assert len(set(finished)) > 1
    assert all(sample.stop_reason is None for sample in samples)


def test_without_the_form_the_model_writes_something_else(llm):
    """Else the tests above could not fail."""
    outputs = generate(llm, ["The quick"] * 8, [SamplingParams(seed=i, max_tokens=20) for i in range(8)])
    assert not any(re.fullmatch(REGEX, output.outputs[0].text) for output in outputs)


def test_an_object_of_any_kind_and_the_whitespace_asked_for(llm):
    forms = [
        {"json_object": True, "disable_any_whitespace": True},
        {"json": SCHEMA, "whitespace_pattern": " {2}", "disable_additional_properties": True},
    ]
    outputs = generate(llm, ["The"] * 24, [params(forms[i % 2], seed=i) for i in range(24)])
    finished = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(finished) > 4
    assert all(isinstance(json.loads(text), dict) for text in finished)


def mixed_batch():
    """All forms, greedy and seeded, between free rows."""
    forms = [params(form, seed=i) for i, form in enumerate(FORMS.values())]
    greedy = [params(form, temperature=0.0, max_tokens=20) for form in FORMS.values()]
    return [p for constrained in [*forms, *greedy] for p in (constrained, FREE)]


@pytest.fixture(scope="module")
def undisturbed(make_llm):
    """The batch one by one, without overlap."""
    llm = make_llm(async_scheduling=False, enable_prefix_caching=False)
    return [tokens_of(generate(llm, ["The quick brown"], p))[0] for p in mixed_batch()]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_pages": 20}, {"num_pages": 20, "async_scheduling": False}],
    ids=str,
)
def test_tokens_do_not_depend_on_overlap_batch_mates_or_pre_emption(make_llm, undisturbed, options):
    llm = make_llm(**options)
    batch = mixed_batch()
    assert tokens_of(generate(llm, ["The quick brown"] * len(batch), batch)) == undisturbed
    if "num_pages" in options:
        assert llm.get_metrics()["jaxserve:num_preemptions"] > 0
    assert undisturbed[1] == undisturbed[3]  # the free rows
    llm.close()


def test_every_row_gets_a_token_a_step_under_overlap(llm):
    """A row under a grammar waits for its mask inside a step, and neither skips one nor holds up others."""
    engine = llm.llm_engine
    counted = params({"regex": "[ab]{20}"}, seed=1, output_kind=RequestOutputKind.DELTA)
    generate(llm, "The", counted)  # compiled
    engine.add_request("grammar", "The", counted)
    engine.add_request("free", "The", FREE)
    counts = {"grammar": [], "free": []}
    for _ in range(12):
        for output in engine.step():
            if output.request_id == "grammar":
                counts["grammar"].append(len(output.outputs[0].token_ids))
            else:
                counts["free"].append(len(output.outputs[0].token_ids))
    engine.abort_request(["grammar", "free"])
    assert counts["grammar"][:8] == [1] * 8
    assert counts["free"][:8] == list(range(1, 9))


def test_samples_of_one_request_differ_and_equal_lone_runs(llm):
    form = FORMS["json"]
    many = generate(llm, "The quick", params(form, n=4, seed=70, max_tokens=60))[0]
    for i, sample in enumerate(many.outputs):
        assert sample.token_ids == tokens_of(generate(llm, "The quick", params(form, seed=70 + i, max_tokens=60)))[0]
    assert len({sample.text for sample in many.outputs}) == 4


def test_deltas_of_several_samples_add_up(llm):
    engine, form = llm.llm_engine, FORMS["regex"]
    whole = generate(llm, "The quick", params(form, n=3, seed=4))[0]
    engine.add_request("d", "The quick", params(form, n=3, seed=4, output_kind=RequestOutputKind.DELTA))
    texts, ends = ["", "", ""], [[], [], []]
    while engine.has_unfinished_requests():
        for output in engine.step():
            indices = [sample.index for sample in output.outputs]
            assert len(set(indices)) == len(indices)
            for sample in output.outputs:
                texts[sample.index] += sample.text
                ends[sample.index] += [sample.finish_reason] if sample.finish_reason else []
    assert texts == [sample.text for sample in whole.outputs]
    assert ends == [["stop"]] * 3


def test_logprobs_are_those_of_the_model_and_cover_each_token(llm):
    sample = generate(llm, "The quick", params({"choice": ["yes", "no"]}, logprobs=2, seed=1))[0].outputs[0]
    assert len(sample.logprobs) == len(sample.token_ids) > 0
    raw = generate(llm, "The quick", SamplingParams(logprobs=2, max_tokens=1, seed=1))[0].outputs[0].logprobs[0]
    best = max(candidate.logprob for candidate in raw.values() if candidate.rank == 1)
    assert max(candidate.logprob for candidate in sample.logprobs[0].values()) == pytest.approx(best, rel=1e-5)


def test_an_end_is_allowed_only_where_the_form_is_complete(llm):
    eos = 2
    always = params({"regex": "[ab]{3,50}"}, logit_bias={eos: 100}, seed=0)
    sample = generate(llm, "The", always)[0].outputs[0]
    assert re.fullmatch("[ab]{3,4}", sample.text)  # a token may hold two characters
    assert (sample.finish_reason, sample.token_ids[-1]) == ("stop", eos)
    longer = generate(llm, "The", params({"regex": "[ab]{3,50}"}, logit_bias={eos: 100}, seed=0, min_tokens=10))
    assert len(longer[0].outputs[0].token_ids) == 11
    endless = params({"regex": "[ab]{3,8}"}, logit_bias={eos: 100}, seed=0, ignore_eos=True)
    sample = generate(llm, "The", endless)[0].outputs[0]
    assert re.fullmatch("[ab]{8}", sample.text)
    assert sample.finish_reason == "stop"


def test_max_tokens_and_stop_strings_still_cut(llm):
    cut = generate(llm, "The", params({"regex": "[ab]{50}"}, max_tokens=5))[0].outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    stopped = generate(llm, "The", params({"regex": "aaaa-bbbb"}, stop="-"))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("aaaa", "stop", "-")
    by_id = generate(llm, "The", params({"regex": "a-b"}, stop_token_ids=[llm.get_tokenizer().token_to_id("-")]))
    assert by_id[0].outputs[0].text == "a"


def test_a_slot_forgets_the_grammar_of_its_last_owner(llm):
    edited = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, frequency_penalty=0.1)
    before = tokens_of(generate(llm, "The", edited))[0]
    generate(llm, ["The"] * 8, params({"regex": "[ab]{9}"}))  # every slot
    assert tokens_of(generate(llm, "The", edited))[0] == before


def test_a_shifted_mask_is_noticed(llm, monkeypatch):
    """The checks above have teeth: a mask that is off by one token gives other texts."""
    masks = Grammars.masks

    def shifted(self, seq_ids):
        bits = np.unpackbits(masks(self, seq_ids).view(np.uint8), axis=1, bitorder="little")
        return np.packbits(np.roll(bits, 1, axis=1), axis=1, bitorder="little").view(np.uint32)

    monkeypatch.setattr(Grammars, "masks", shifted)
    outputs = generate(llm, ["The quick"] * 4, [params(FORMS["regex"], seed=i) for i in range(4)])
    assert not any(re.fullmatch(REGEX, output.outputs[0].text) for output in outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}  # it does not follow its grammar


atoms = st.sampled_from(["a", "b", "[abc]", "(ab|c)", ".", r"\d", "é", "[^a]"])
regexes = st.lists(st.tuples(atoms, st.sampled_from(["", "?", "+", "*", "{2}", "{1,3}"])), min_size=1, max_size=4)


@given(regexes, st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_any_small_regex_is_matched_as_python_matches_it(llm, parts, seed):
    regex = "".join(atom + times for atom, times in parts)
    sample = generate(llm, "The", params({"regex": regex}, seed=seed, max_tokens=30))[0].outputs[0]
    assert sample.finish_reason in ("stop", "length")
    if sample.finish_reason == "stop":
        assert re.fullmatch(regex, sample.text), (regex, sample.text)


def test_async_llm_gives_the_same_and_refuses_the_same(tiny_model, llm):
    batch = [params(form, seed=i) for i, form in enumerate(FORMS.values())] + [FREE]
    options = {"dtype": "float32", "max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        async_llm = AsyncLLM(tiny_model, **options, num_pages=100, max_num_seqs=8, warm_up="off")

    async def last(prompt, sampling_params, request_id):
        return [output async for output in async_llm.generate(prompt, sampling_params, request_id)][-1]

    async def main():
        with pytest.raises(RequestError, match="regex cannot be used"):
            await last("The quick", params({"regex": "a(b"}), "bad")
        twice = [last("The", params({"regex": "a[bc]{9}"}), "same id") for _ in range(2)]
        kinds = {type(result) for result in await asyncio.gather(*twice, return_exceptions=True)}
        assert kinds == {RequestError, RequestOutput}
        calls = (last("The quick", p, str(i)) for i, p in enumerate(batch))
        outputs = await asyncio.gather(*calls)
        costly = await last("The", params({"regex": "(a{1000}){1000}"}), "costly")
        for _ in range(500):
            if not (metrics := await async_llm.get_metrics())["jaxserve:kv_cache_usage_perc"]:
                break
            await asyncio.sleep(0.02)
        return outputs, costly.outputs[0], metrics

    try:
        outputs, costly, metrics = asyncio.run(main())
    finally:
        async_llm.shutdown()
    assert tokens_of(outputs) == tokens_of(generate(llm, ["The quick"] * len(batch), batch))
    assert costly.finish_reason == "error"
    assert metrics["jaxserve:kv_cache_usage_perc"] == 0


def test_the_example_of_the_docs_runs(llm, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.setattr(jaxserve, "LLM", lambda *_, **__: contextlib.nullcontext(llm), raising=False)
    example = example.replace("max_tokens=200", "max_tokens=90")  # what the tiny model has room for
    exec(compile(example, "structured_output.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] in ("good", "bad")

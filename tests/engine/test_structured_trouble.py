"""Grammars that are bad, slow, costly or contradictory, and requests that end under them."""

import re
import threading

import llguidance
import numpy as np
import pytest
from forms import FORMS, FREE, generate, is_in_form, params, tokens_of

from jaxserve import RequestError, SamplingParams
from jaxserve.grammars import Grammars
from jaxserve.step_future import StepFuture


def test_a_dead_end_is_an_error_of_its_own_request(llm):
    a, b = (llm.get_tokenizer().token_to_id(letter) for letter in "ab")
    batch = [
        params({"regex": "ab"}, allowed_token_ids=[a]),
        params({"regex": "ab"}, allowed_token_ids=[a, b]),
        params({"regex": "ab"}, bad_words=["b"], allowed_token_ids=[a, b]),
        FREE,
    ]
    outputs = [output.outputs[0] for output in generate(llm, ["The"] * 4, batch)]
    assert [sample.finish_reason for sample in outputs] == ["error", "stop", "error", "length"]
    assert [sample.text for sample in outputs[:3]] == ["a", "ab", "a"]
    assert "no token is left" in outputs[0].stop_reason
    assert outputs[3].token_ids == tokens_of(generate(llm, "The", FREE))[0]


def test_a_dead_end_without_a_grammar_speaks_of_none(llm):
    a = llm.get_tokenizer().token_to_id("a")
    sample = generate(llm, "The", SamplingParams(allowed_token_ids=[a], bad_words=["a"]))[0].outputs[0]
    assert sample.finish_reason == "error"
    assert sample.stop_reason == "no token is left that the sampling parameters allow"


def test_a_grammar_too_costly_to_follow_ends_its_request_with_the_reason(llm):
    costly = params({"regex": "(a{1000}){1000}"})
    output, free = (o.outputs[0] for o in generate(llm, ["The", "The"], [costly, FREE]))
    assert (output.finish_reason, free.finish_reason) == ("error", "length")
    assert "too many" in output.stop_reason
    assert "<" not in output.stop_reason


@pytest.mark.parametrize("form", [{"regex": "a(b"}, {"grammar": "start: nothing"}, {"json": {"type": "list"}}], ids=str)
def test_a_bad_grammar_is_refused_and_the_engine_goes_on(llm, form):
    engine = llm.llm_engine
    engine.add_request("good", "The", FREE)
    engine.step()
    with pytest.raises(RequestError, match="cannot be used"):
        engine.add_request("bad", "The", params(form))
    with pytest.raises(RequestError, match="cannot be used"):
        generate(llm, ["The", "The"], [FREE, params(form)])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {o.request_id: o.outputs[0].finish_reason for o in outputs if o.finished} == {"good": "length"}


def compile_gate(monkeypatch):
    gate, compile = threading.Event(), Grammars._compile

    def gated(self, form):
        assert gate.wait(60)
        return compile(self, form)

    monkeypatch.setattr(Grammars, "_compile", gated)
    return gate


def test_others_run_while_a_grammar_compiles(llm, monkeypatch):
    gate = compile_gate(monkeypatch)
    engine = llm.llm_engine
    engine.add_request("first", "The", params({"regex": "first [ab]{3}"}))
    engine.add_request("free", "The", FREE)
    finished = []
    while "free" not in finished:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["free"]
    assert engine.step() == []  # waits a moment, and comes back
    gate.set()
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["free", "first"]


def test_a_request_may_end_while_its_grammar_compiles(llm, monkeypatch):
    gate = compile_gate(monkeypatch)
    engine = llm.llm_engine
    engine.add_request("aborted", "The", params({"regex": "second [ab]{3}"}, n=3))
    engine.add_request("late", "The", params({"regex": "second [ab]{3}"}), deadline=0.0)
    engine.add_request("served", "The", params({"regex": "second [ab]{3}"}))
    late = [output for _ in range(3) for output in engine.step()]
    assert [(output.request_id, output.outputs[0].finish_reason) for output in late] == [("late", "abort")]
    aborted = engine.abort_request("aborted")
    assert [sample.finish_reason for sample in aborted[-1].outputs] == ["abort"] * 3
    gate.set()
    texts = {}
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
    assert list(texts) == ["served"]
    assert re.fullmatch("second [ab]{3}", texts["served"])


def test_random_aborts_in_any_state_leave_finished_answers_in_form(llm):
    engine, rng, names = llm.llm_engine, np.random.default_rng(3), [*FORMS, "free"]
    asked, finished, ids = {}, [], iter(range(10**6))
    for _ in range(60):
        for _ in range(rng.integers(0, 3)):
            name, request_id = names[rng.integers(len(names))], str(next(ids))
            sampling = FREE if name == "free" else params(FORMS[name], n=int(rng.integers(1, 3)), max_tokens=60)
            engine.add_request(request_id, "The quick"[: rng.integers(1, 9)], sampling)
            asked[request_id] = name
        for _ in range(rng.integers(0, 6)):
            finished += [output for output in engine.step() if output.finished]
        if rng.random() < 0.3:
            engine.abort_request(list(asked)[rng.integers(len(asked))])
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    checked = [
        is_in_form(asked[output.request_id], sample.text)
        for output in finished
        for sample in output.outputs
        if sample.finish_reason == "stop" and asked[output.request_id] != "free"
    ]
    assert len(checked) > 15
    assert all(checked)
    assert not engine.core._grammars


def test_a_grammar_that_fails_in_the_engine_fails_its_requests_only(llm, monkeypatch):
    def fails(self, form):
        raise MemoryError("as planted")

    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "_compile", fails)
        outputs = generate(llm, ["The", "The"], [params({"regex": "third"}, n=2), FREE])
    assert [sample.finish_reason for sample in outputs[0].outputs] == ["error", "error"]
    assert outputs[0].outputs[0].stop_reason == "the grammar cannot be used: as planted"
    assert outputs[1].outputs[0].finish_reason == "length"
    core = llm.llm_engine.core
    assert not core._grammars  # nothing is left of them


def test_a_grammar_without_any_sentence_says_so(llm):
    sample = generate(llm, "The", params({"json": {"$ref": "#"}}))[0].outputs[0]
    assert sample.finish_reason == "error"
    assert sample.stop_reason == "the grammar cannot be used: it leaves no text that may come next"


def test_a_grammar_is_compiled_once_and_old_ones_are_forgotten(llm, monkeypatch):
    compiled, compile = [], Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, form: compiled.append(form.regex) or compile(self, form))
    monkeypatch.setattr("jaxserve.grammars.MAX_CACHED", 3)
    llm.llm_engine.core._grammars._cache.clear()
    for regex in ("o1", "o1", "o2", "o3", "o1", "o4", "o2"):
        generate(llm, "The", params({"regex": regex}))
    assert compiled == ["o1", "o2", "o3", "o4", "o2"]


def test_two_first_grammars_read_the_vocabulary_once(llm, monkeypatch):
    together, second, read = threading.Barrier(2), threading.Event(), []
    real, compile = llguidance.LLTokenizer, Grammars._compile

    def meet(self, form):
        together.wait(60)
        return compile(self, form)

    def tokenizer(*arguments, **options):
        read.append(1)
        if len(read) == 2:
            second.set()
        second.wait(0.2)  # for one that must not come
        return real(*arguments, **options)

    monkeypatch.setattr(Grammars, "_compile", meet)
    monkeypatch.setattr(llguidance, "LLTokenizer", tokenizer)
    monkeypatch.setattr(llm.llm_engine.core, "_grammars", Grammars(llm.get_tokenizer(), 320, [2]))
    generate(llm, ["The", "The"], [params({"regex": "x1"}), params({"regex": "x2"})])
    llm.llm_engine.core._grammars.close()
    assert len(read) == 1


def test_an_interrupted_step_of_constrained_rows_is_read_again(llm, monkeypatch):
    whole = tokens_of(generate(llm, "The", params(FORMS["json"], seed=3)))[0]
    engine, result, calls = llm.llm_engine, StepFuture.result, []

    def interrupted(self):
        calls.append(self)
        if len(calls) in (3, 6, 7):
            raise KeyboardInterrupt
        return result(self)

    monkeypatch.setattr(StepFuture, "result", interrupted)
    engine.add_request("a", "The", params(FORMS["json"], seed=3))
    engine.add_request("b", "The", FREE)
    outputs, interrupts = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    assert outputs["a"].outputs[0].token_ids == whole


def test_a_model_without_tokenizer_or_with_one_that_has_no_pieces_is_told(llm, monkeypatch):
    engine = llm.llm_engine
    with monkeypatch.context() as patch:
        patch.setattr(engine._inputs, "_tokenizer", None)
        with pytest.raises(RequestError, match="structured_outputs must be None: this model has no tokenizer"):
            engine.add_request("x", [5, 6], params({"regex": "a"}))
    with monkeypatch.context() as patch:
        patch.setitem(vars(llm.get_tokenizer()), "pieces", None)
        with pytest.raises(RequestError, match="not every token of this model is a piece of text"):
            engine.add_request("x", [5, 6], params({"regex": "a"}))
    core = engine._inputs.process([5, 6], params({"regex": "a"}), now=0.0)[0]
    with monkeypatch.context() as patch:
        patch.setattr(engine.core._grammars, "_tokenizer", None)
        with pytest.raises(RequestError, match="this model has no tokenizer"):
            engine.core.add_request(core)

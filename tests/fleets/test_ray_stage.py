"""What one replica of the Ray Data stage makes of a table, over a token core without a model and without a cluster."""

import asyncio

import pyarrow as pa
import pytest
from echo_core import ascii_tokenizer

from jaxserve import EngineDeadError, ParameterError, SamplingParams
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.ray import data
from jaxserve.ray.data import Generate, row_seed

GONE = "no token is left, as planted"


class FakeLLM:
    """Answers each prompt with its seed; a prompt that is "end" ends as an error, "die" ends the engine."""

    def __init__(self, model, **options):
        self.asked = []

    def get_default_sampling_params(self):
        return SamplingParams(max_tokens=100)

    async def get_tokenizer(self):
        return ascii_tokenizer()

    async def generate(self, prompt, params, request_id):
        self.asked.append((prompt, params))
        if prompt == "die":
            raise EngineDeadError("as planted")
        finish = ("error", GONE) if prompt == "end" else ("stop", None)
        sample = CompletionOutput(
            index=0, text=str(params.seed), token_ids=[1], finish_reason=finish[0], stop_reason=finish[1]
        )
        yield RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=[1], outputs=[sample], finished=True)


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr(data, "AsyncLLM", FakeLLM)
    return lambda **options: Generate("demo", options, {})


def answers(stage, rows):
    async def run():
        return [table async for table in stage(pa.Table.from_pylist(rows))]

    (table,) = asyncio.run(run())
    return table.to_pylist()


def test_a_malformed_row_costs_itself_alone(stage):
    chat = [{"role": "user", "content": "hi"}]
    texts = answers(stage(), [{"messages": ["hi"]}, {"messages": [None]}])
    assert all("a message must be a dict" in row["error"] for row in texts)
    assert answers(stage(), [{"messages": chat}])[0]["error"] is None
    assert answers(stage(), [{"messages": "hi"}])[0]["error"]


def test_a_row_that_the_engine_gives_up_says_why(stage):
    good, bad = answers(stage(), [{"prompt": "a"}, {"prompt": "end"}])
    assert (good["error"], good["finish_reason"]) == (None, "stop")
    assert (bad["error"], bad["generated_text"], bad["finish_reason"]) == (GONE, None, None)


def test_a_dead_engine_is_no_answer(stage, monkeypatch):
    class Ended(BaseException):
        pass

    def end(code):
        raise Ended

    monkeypatch.setattr(data.os, "_exit", end)
    with pytest.raises(Ended):
        answers(stage(), [{"prompt": "die"}])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "output_kind"])
def test_what_no_column_shows_is_refused(stage, name):
    (row,) = answers(stage(), [{"prompt": "a", "sampling_params": {name: 1}}])
    assert f"{name} must be left out in a dataset" in row["error"]


@pytest.mark.parametrize("wrong", [{"temprature": 1}, {"temperature": 7}, {"n": 2}, {"logprobs": 1}], ids=str)
def test_a_mistake_in_the_stages_parameters_is_told_at_its_start(stage, wrong):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        stage(**wrong)


def test_rows_draw_by_what_they_hold_and_not_by_where_they_run(stage):
    rows = [{"id": i, "prompt": "a"} for i in range(4)]
    texts = {row["id"]: row["generated_text"] for row in answers(stage(), rows)}
    assert len(set(texts.values())) == 4
    assert {row["id"]: row["generated_text"] for row in answers(stage(), rows[::-1])} == texts
    (own,) = answers(stage(), [{"prompt": "a", "sampling_params": {"seed": 5}}])
    assert own["generated_text"] == "5"
    assert answers(stage(seed=6), [{"prompt": "a"}])[0]["generated_text"] == "6"
    assert row_seed({"prompt": "a\ud800"}) < 2**62


def test_what_arrow_filled_in_with_null_was_not_asked_for(stage):
    replica = stage()
    biased, plain = {"65": 1.0}, {"66": 2.0}  # one struct of both keys in Arrow
    answers(replica, [{"prompt": "a", "sampling_params": {"logit_bias": bias}} for bias in (biased, plain)])
    assert [params.logit_bias for _, params in replica._llm.asked] == [{65: 1.0}, {66: 2.0}]
    part = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "url": "y"}]}]
    assert data._without_nulls(pa.array([part]).to_pylist()[0]) == part

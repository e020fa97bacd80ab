"""Output lines have the form of OpenAI's batch API."""

import json
import time

import pytest

from jaxserve.batch.answers import answer, failure
from jaxserve.batch.rows import BadRow, Row
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput


def line_of(kind, text="AB", logprobs=None, options=None):
    row = Row(number=4, custom_id="a", kind=kind, prompt="hi", model=None, options=options or {})
    tokens = [ord(letter) for letter in text]
    sample = CompletionOutput(index=0, text=text, token_ids=tokens, finish_reason="stop", logprobs=logprobs)
    output = RequestOutput(
        request_id="batch-4", prompt=None, prompt_token_ids=[1, 2, 3], outputs=[sample, sample], finished=True
    )
    return json.loads(answer(row, output, "demo"))


def logprobs_of(text):
    return [{ord(c): Logprob(-1.0, 2, c), 0: Logprob(-0.5, 1, "\0")} for c in text]


@pytest.mark.parametrize(("kind", "name"), [("chat", "chat.completion"), ("completion", "text_completion")])
def test_an_answer_is_a_completion_of_its_kind(kind, name):
    line = line_of(kind)
    body = line["response"]["body"]
    assert (line["id"], line["custom_id"], line["error"]) == ("batch_req_4", "a", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "batch-4")
    assert (body["object"], body["model"], len(body["choices"])) == (name, "demo", 2)
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert abs(body["created"] - time.time()) < 60
    choice = body["choices"][0]
    assert (choice["message"] == {"role": "assistant", "content": "AB"}) if kind == "chat" else choice["text"] == "AB"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)


def test_chat_logprobs_hold_the_sampled_token_and_the_top():
    line = line_of("chat", "A", logprobs_of("A"), {"logprobs": 1})
    (entry,) = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("A", -1.0, [65])
    assert [top["token"] for top in entry["top_logprobs"]] == ["\0"]


def test_completion_logprobs_are_lists_by_token():
    logprobs = line_of("completion", "AB", logprobs_of("AB"))["response"]["body"]["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["A", "B"], [-1.0, -1.0])
    assert logprobs["top_logprobs"][0] == {"A": -1.0, "\0": -0.5}


def test_an_id_that_is_no_text_comes_back_as_it_was():
    row = BadRow(number=2, custom_id="\ud800é\n", code="invalid_request", message="no")
    line = failure(row)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "id": "batch_req_2",
        "custom_id": "\ud800é\n",
        "response": None,
        "error": {"code": "invalid_request", "message": "no"},
    }

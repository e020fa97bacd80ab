"""What a row may look like, and what is said of one that may not."""

import json

import pytest
from echo_core import ascii_tokenizer

from jaxserve.batch.rows import BadRow, BatchRequest, Row, RowReader, parse_row, row_seed
from jaxserve.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def parse(row, number=0):
    return parse_row((number, row if isinstance(row, bytes) else json.dumps(row).encode()))


def read(row, number=0, repeated=(), seed=0):
    reader = RowReader(
        model_name="demo",
        tokenizer=ascii_tokenizer(),
        defaults=SamplingParams(temperature=0.5),
        seed=seed,
        repeated=frozenset(repeated),
    )
    return reader((number, json.dumps(row).encode()))


JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("row", "kind", "custom_id"),
    [
        ({"prompt": "a"}, "completion", "row-7"),
        ({"prompt": [1, 2], "custom_id": "x"}, "completion", "x"),
        (CHAT, "chat", "row-7"),
        (BATCH, "completion", "a"),
        (BATCH | {"url": "/v1/chat/completions", "body": CHAT}, "chat", "a"),
    ],
)
def test_a_rows_kind_follows_its_url_or_its_fields(row, kind, custom_id):
    parsed = parse(row, 7)
    assert isinstance(parsed, Row)
    assert (parsed.number, parsed.kind, parsed.custom_id) == (7, kind, custom_id)


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        (b"{", "invalid_json", "the row is not JSON: "),
        (b'{"prompt": "\xff"}', "invalid_json", "the row is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "invalid_json", "the row is nested too deeply"),
        ([1], "invalid_json", "a row must be a JSON object, got list"),
        ({"custom_id": 7, "prompt": "a"}, "invalid_request", "custom_id must be a string, got int"),
        ({"custom_id": "a"}, "invalid_request", "prompt must be a non-empty string or list of token ids"),
        ({"prompt": ""}, "invalid_request", "prompt must be a non-empty string"),
        ({"prompt": ["a", "b"]}, "invalid_request", "prompt must be one string or one list of token ids"),
        ({"prompt": [1, True]}, "invalid_request", "prompt must be one string or one list of token ids"),
        ({"prompt": "a", "stream": True}, "invalid_request", "stream must be false in a batch"),
        ({"messages": "hi"}, "invalid_request", "messages must be a non-empty list"),
        (CHAT | {"logprobs": 3}, "invalid_request", "logprobs must be true or false in a chat"),
        (CHAT | {"top_logprobs": 3}, "invalid_request", "top_logprobs=3 needs logprobs=true"),
        (CHAT | {"response_format": {"type": "yaml"}}, "invalid_request", "response_format must be"),
        (CHAT | {"response_format": JSON, "structured_outputs": {"regex": "a"}}, "invalid_request", "exclude each"),
        ({"prompt": "a", "prompt_logprobs": 2}, "invalid_request", "prompt_logprobs must be left out in a batch"),
        ({"prompt": "a", "output_kind": 1}, "invalid_request", "output_kind must be left out in a batch"),
        (
            {"prompt": "a", "max_completion_tokens": 2, "max_tokens": 3},
            "invalid_request",
            "max_tokens must be left out: max_tokens is given, too, by another name",
        ),
        (BATCH | {"url": "/v1/embeddings"}, "invalid_request", "url must be one of /v1/chat/completions, /v1/comp"),
        (BATCH | {"url": []}, "invalid_request", r"url must be one of /v1/chat/completions, /v1/completions, got []"),
        (BATCH | {"method": "GET"}, "invalid_request", "method must be 'POST', got 'GET'"),
        (BATCH | {"body": []}, "invalid_request", "body must be a JSON object, got list"),
        (BATCH | {"extra": 1}, "invalid_request", "custom_id, method, url, body and nothing else, got 'extra' too"),
        *[
            ({k: v for k, v in BATCH.items() if k != name}, "invalid_request", f"{name} is missing")
            for name in ("custom_id", "method", "url")
        ],
    ],
)
def test_an_unreadable_row_says_why(row, code, message):
    parsed = parse(row)
    assert isinstance(parsed, BadRow)
    assert parsed.code == code
    assert message in parsed.message


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ({"prompt": "a", "model": "gpt-4"}, "invalid_request", "model must be 'demo', the one that is loaded, got"),
        ({"prompt": "a", "temprature": 1}, "invalid_request", "temprature must be left out: it is no sampling param"),
        ({"prompt": "a", "temprature": None}, "invalid_request", "did you mean temperature?"),
        ({"prompt": "a", "temperature": 9}, "invalid_request", "temperature must be in [0, 2], got 9"),
        ({"prompt": "a", "truncate_prompt_tokens": 3}, "not_supported", "truncate_prompt_tokens is not supported yet"),
        ({"messages": [{"content": "a"}]}, "invalid_request", "a message must be a dict like"),
        ({"messages": ["role", 1]}, "invalid_request", "a message must be a dict like"),
    ],
)
def test_a_row_that_this_model_cannot_serve_says_why(row, code, message):
    found = read({**row, "custom_id": "x"})
    assert isinstance(found, BadRow)
    assert (found.code, found.custom_id) == (code, "x")
    assert message in found.message


def test_the_second_row_with_an_id_is_an_error_and_the_first_is_none():
    row = {"custom_id": "same", "prompt": "a"}
    assert isinstance(read(row, 3, repeated={8}), BatchRequest)
    again = read(row, 8, repeated={8})
    assert (again.code, again.custom_id) == ("duplicate_custom_id", "same")
    assert again.message == "custom_id must be one that no row before this has, got 'same'"


def test_the_models_defaults_hold_where_a_row_is_silent_or_says_null():
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "max_tokens", "logprobs", "stream", "response_format"))
    for extra in ({}, nulls):
        plain, chat = read({"prompt": "a", **extra}).params, read({**CHAT, **extra}).params
        assert (plain.temperature, chat.temperature) == (0.5, 0.5)
        assert (plain.max_tokens, chat.max_tokens) == (16, None)  # a chat goes on until its end
        assert plain.output_kind is RequestOutputKind.FINAL_ONLY
    assert read({"prompt": "a", "temperature": 0.0}).params.temperature == 0.0


def test_openais_names_are_understood():
    body = {"max_completion_tokens": 5, "user": "me", "logprobs": True, "response_format": {"type": "text"}}
    params = read(BATCH | {"url": "/v1/chat/completions", "body": {**CHAT, **body}}).params
    assert (params.max_tokens, params.logprobs) == (5, 0)
    assert read({"prompt": "a", "max_tokens": None, "max_completion_tokens": 5}).params.max_tokens == 5


def test_a_seed_of_its_own_is_kept_and_others_follow_from_the_rows_number():
    assert read({"prompt": "a", "seed": 5}, 3).params.seed == 5
    seeds = [read({"prompt": "a"}, number, seed=seed).params.seed for number in range(50) for seed in (0, 1)]
    assert len(set(seeds)) == 100
    assert seeds == [row_seed(seed, number) for number in range(50) for seed in (0, 1)]
    assert row_seed(0, 0) == 3844709723569550360  # the same in every version: a job may be resumed by a newer one


def test_a_response_format_asks_for_structured_outputs():
    row = parse_row((0, json.dumps({"prompt": "a", "response_format": JSON}).encode()))
    assert isinstance(row, Row)
    assert row.options == {"structured_outputs": StructuredOutputsParams(json_object=True)}

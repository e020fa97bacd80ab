"""The HTTP server over the real engine: the same text as in process, real logprobs, real limits, and no page kept."""

import json
import re

import openai
import pytest
from http_server import raw_request, running

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.server.options import ServerOptions

OPTIONS = {"dtype": "float32", "max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 64, "warm_up": "off"}
IDLE = {"jaxserve:num_requests_running": 0, "jaxserve:num_requests_waiting": 0}
PROMPT = "The quick brown"
MESSAGES = [{"role": "user", "content": "Pack my box"}]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("compiled"))

    def load() -> AsyncLLM:
        return AsyncLLM(
            tiny_model, **OPTIONS, num_pages=100, max_num_seqs=4, max_num_queued_reqs=6, compilation_cache_dir=cache
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        with running(ServerOptions(served_model_name="tiny", port=0), load=load) as it:
            yield it


@pytest.fixture(scope="module")
def client(server):
    with server.client(max_retries=0) as client:
        yield client


@pytest.mark.full
def test_text_and_logprobs_are_the_engines(server, client, llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    (sample,) = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    options = {"temperature": 0, "max_tokens": 12, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    (choice,) = client.completions.create(model="tiny", prompt=PROMPT, **options).choices
    assert choice.text == sample.text
    expected = [sample.logprobs[i][token].logprob for i, token in enumerate(sample.token_ids)]
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    chunks = client.completions.create(model="tiny", prompt=PROMPT, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == sample.text


@pytest.mark.full
def test_a_chat_goes_through_the_models_template(client, llm):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    (sample,) = llm.chat(MESSAGES, params)[0].outputs
    options = {"temperature": 0, "max_tokens": 10, "logprobs": True, "extra_body": {"ignore_eos": True}}
    (choice,) = client.chat.completions.create(model="tiny", messages=MESSAGES, **options).choices
    assert choice.message.content == sample.text
    said = bytes(byte for position in choice.logprobs.content for byte in position.bytes)
    assert said.decode(errors="replace") == sample.text


def test_a_seed_repeats_the_text_and_sample_i_has_seed_plus_i(client):
    def texts(**options):
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=1.0, **options)
        return [choice.text for choice in answer.choices]

    first, second = texts(seed=5, n=2)
    assert first != second
    assert (texts(seed=5), texts(seed=6)) == ([first], [second])


def test_the_models_own_defaults_hold_until_overridden(client):
    assert client.completions.create(model="tiny", prompt=PROMPT, seed=1).usage.completion_tokens <= 5
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 9


def test_a_prompt_seen_before_is_counted_as_cached(client):
    for _ in range(2):
        usage = client.completions.create(model="tiny", prompt=[7] * 30, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == 24


def test_more_than_the_queue_holds_is_refused_and_later_taken(server, client):
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
    with raw_request(server.port, "/v1/completions", body | {"n": 6, "temperature": 1.0}):
        server.settled(**{"jaxserve:num_requests_running": 4})
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt=PROMPT, n=6)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
    server.settled(**IDLE)
    assert client.completions.create(model="tiny", prompt=PROMPT, n=6).choices[5].finish_reason


def test_clients_that_leave_give_their_pages_back(server):
    for stream in (True, False):
        body = {"prompt": [9] * 60, "max_tokens": 60, "ignore_eos": True, "stream": stream}
        with raw_request(server.port, "/v1/completions", body):
            server.settled(**{"jaxserve:num_requests_running": 1})
        server.settled(**IDLE, **{"jaxserve:kv_cache_usage_perc": 0})


def test_a_schema_and_a_regex_hold_over_http(client):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    options = {"temperature": 1.0, "max_tokens": 100, "seed": 3}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, **options)
    assert chat.choices[0].finish_reason == "stop"
    assert json.loads(chat.choices[0].message.content)["n"] in (1, 2, 3)
    extra = {"structured_outputs": {"regex": "[ab]{3}"}}
    chunks = client.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body=extra, **options)
    assert re.fullmatch("[ab]{3}", "".join(chunk.choices[0].text for chunk in chunks))


def test_the_metrics_tell_how_long_the_start_took(server):
    text = server.ask("GET", "/metrics")[1]
    for part in ("load", "engine"):
        (value,) = re.findall(rf'^jaxserve:start_{part}_seconds{{model_name="tiny"}} (.*)$', text, flags=re.MULTILINE)
        assert 0.0 < float(value) < 600.0

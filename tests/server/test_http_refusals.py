"""Bad requests, keys, limits, ids: every refusal has its status and OpenAI's body, and harms nobody."""

import asyncio
import http.client
import json
import socket

import httpx
import openai
import pytest
from echo_core import echo
from http_server import raw_request, running
from observed_echo import observed_echo

from jaxserve import AsyncLLM, ParameterError
from jaxserve.server import openapi
from jaxserve.server.app import build_app
from jaxserve.server.options import ServerOptions
from jaxserve.server.protocol import Ignored

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
DEEP = b'{"prompt":"a","metadata":' + b"[" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": "a", "tempreature": 1}, "tempreature", "unknown field 'tempreature'"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        (COMPLETIONS, {"max_tokens": 1}, None, "missing required field `prompt`"),
        (COMPLETIONS, {"prompt": []}, "prompt", "an empty list"),
        (COMPLETIONS, {"prompt": ""}, None, "the prompt is empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "a list of int and str"),
        (COMPLETIONS, {"prompt": [[1], []]}, None, "the prompt is empty"),
        (COMPLETIONS, {"prompt": [1, 500]}, "prompt", "token ids in the vocabulary"),
        (COMPLETIONS, {"prompt": [1] * 4096 + ["a"]}, "prompt", "at most 4096 token ids or 2048 prompts, got 4097"),
        (COMPLETIONS, {"prompt": [[1] * 4096 + [-1]]}, None, "max_model_len is 4096"),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt", "at most 2048"),
        (COMPLETIONS, {"prompt": ["a"] * 100, "n": 50}, "n", "100 x 50"),
        (COMPLETIONS, {"prompt": "a", "n": 129}, "n", "at most 128"),
        (
            COMPLETIONS,
            {"prompt": "a", "n": 100, "allowed_token_ids": [1] * 50_000},
            "allowed_token_ids",
            "1 x 100 x 50000",
        ),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "an integer >= 0"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 5000}, "stop_token_ids", "at most 4096 entries"),
        (COMPLETIONS, {"prompt": "a" * 4096}, None, "max_model_len is 4096"),
        (COMPLETIONS, {"prompt": "a" * 100_000}, None, "100000 characters"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "got 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "7"}, "max_tokens", "got `str`"),
        (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, "top_p", "got 1.5"),
        (COMPLETIONS, {"prompt": "a", "temperature": 0, "n": 2}, "n", "temperature is 0"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "an integer in"),
        (COMPLETIONS, {"prompt": "a", "priority": 2**70}, None, "cannot reach the engine"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "got 21"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "got 'x'"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, "stop", "non-empty"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "True"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "needs stream"),
        (
            COMPLETIONS,
            {"prompt": "a", "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "must be",
        ),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"regex": "("}},
            None,
            "structured_outputs.regex cannot be used",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "exclude each other",
        ),
        (COMPLETIONS, {"prompt": "refuse"}, None, "refused, as planted"),
        (COMPLETIONS, {"prompt": ["ok", "refuse"], "stream": True}, None, "refused, as planted"),
        (COMPLETIONS, b"{", None, "the body must be a JSON object"),
        (COMPLETIONS, b"[]", None, "got `array`"),
        (COMPLETIONS, b'{"prompt":"\xff"}', None, "UTF-8"),
        (COMPLETIONS, b'{"prompt":"\\ud800"}', None, "the body must be"),
        (COMPLETIONS, DEEP, None, "the body must be"),
        (CHAT, {"messages": []}, "messages", "at least one message"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0]", "missing required field `role`"),
        (CHAT, {"messages": [{"role": "user", "contents": "a"}]}, "messages[0].contents", "unknown field"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens", "got -1"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "got -1"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most max_logprobs (20)"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", ""),
        (CHAT, {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True}, "messages", "one"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages",
            "must be JSON",
        ),
    ],
)
def test_a_bad_request_is_400_and_names_the_field(server, path, body, param, words):
    status, answer, _ = server.ask("POST", path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]
    server.settled(running=0)


def test_openais_fields_without_meaning_here_are_taken(server):
    body = {"prompt": "abc", "max_tokens": 3} | {name: {"any": ["thing"]} for name in Ignored.__struct_fields__}
    assert server.ask("POST", COMPLETIONS, body)[0] == 200


def test_null_is_the_default(server):
    status, answer, _ = server.ask("POST", COMPLETIONS, {"prompt": "abc", "max_tokens": None, "n": None, "stop": None})
    assert (status, len(answer["choices"]), answer["usage"]["completion_tokens"]) == (200, 1, 16)


def test_a_full_queue_is_503_with_a_time_to_wait(server):
    for stream in (False, True):
        status, answer, headers = server.ask("POST", COMPLETIONS, {"prompt": "full", "stream": stream})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "queue_full", "1")
    with server.client(max_retries=0) as client, pytest.raises(openai.InternalServerError, match="queue is full"):
        client.completions.create(model="echo", prompt="full")


def test_another_model_path_or_method(server):
    status, answer, _ = server.ask("POST", COMPLETIONS, {"model": "gpt", "prompt": "a"})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    status, answer, _ = server.ask("GET", "/v1/embeddings")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer, headers = server.ask("GET", COMPLETIONS)
    assert (status, headers["allow"]) == (405, "POST")
    assert answer["error"]["message"]


def test_an_unknown_model_is_an_answer_like_any_other(server, caplog):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.connect()
    connection.auto_open = False
    for path, status in (("/v1/models/other", 404), ("/v1/models/echo", 200)):
        connection.request("GET", path, headers={"X-Request-Id": "my-id"})
        response = connection.getresponse()
        assert (response.status, response.headers["x-request-id"]) == (status, "my-id")
        response.read()
    connection.close()
    assert caplog.text == ""


def test_a_request_id_comes_back_and_an_odd_one_does_not(server):
    for path in ("/health", "/nowhere", COMPLETIONS):
        assert server.ask("GET", path, X_Request_Id="my-id")[2]["x-request-id"] == "my-id"
    for odd in ("a b", "x" * 129, ""):
        assert "x-request-id" not in server.ask("GET", "/health", X_Request_Id=odd)[2]


@pytest.fixture(scope="module")
def guarded():
    """Two keys and a short limit."""
    options = ServerOptions(served_model_name="m", port=0, api_keys=("key-1", "key-2"), max_request_bytes=1000)
    with running(options, load_observed) as it:
        yield it


def load_observed() -> AsyncLLM:
    return AsyncLLM.over(observed_echo, {})


def test_a_key_is_asked_for_but_where_probes_look(guarded):
    for path in ("/health", "/ready", "/version", "/metrics", "/", "/live.json"):
        assert guarded.ask("GET", path)[0] == 200
    for path in ("/v1/models", "/openapi.json", "/nowhere", "/health/", "/health/../v1/models"):
        status, answer, headers = guarded.ask("GET", path)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
    for key in ("Bearer key-3", "Bearer ", "key-1", "Basic key-1", "Bearer key-1x", "Bearer k\xe9y"):
        assert guarded.ask("GET", "/v1/models", Authorization=key)[0] == 401
    for key in ("Bearer key-1", "bearer key-2"):
        assert guarded.ask("GET", "/v1/models", Authorization=key)[0] == 200


def test_the_client_sends_its_key(guarded):
    with guarded.client(api_key="key-2") as client:
        assert client.models.list().data[0].id == "m"
    with guarded.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError, match="is wrong"):
        client.completions.create(model="m", prompt="a")


def test_observers_see_every_output_of_a_request():
    seen = []

    async def talk() -> tuple[str, int]:
        llm = load_observed()
        try:
            app = build_app(
                llm, ServerOptions(served_model_name="m"), observers=[lambda output, _: seen.append(output)]
            )
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                whole = await client.post(COMPLETIONS, json={"prompt": ["abc", "de"], "max_tokens": 3})
                split = len(seen)
                await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 3, "stream": True})
        finally:
            llm.shutdown()
        return whole.json()["id"], split

    request_id, split = asyncio.run(talk())
    whole, streamed = seen[:split], seen[split:]
    assert {output.request_id for output in whole} == {f"{request_id}-0", f"{request_id}-1"}
    assert all(output.finished for output in whole)
    assert streamed[-1].finished
    assert "".join(output.outputs[0].text for output in streamed) == "abc"
    assert streamed[-1].metrics.finished_time is not None


def test_metrics_and_the_live_page_see_the_requests(guarded):
    def counts() -> tuple[int, int]:
        text = guarded.ask("GET", "/metrics")[1]
        (line,) = (line for line in text.splitlines() if line.startswith("jaxserve:time_to_first_token_seconds_count"))
        return int(float(line.rpartition(" ")[2])), guarded.ask("GET", "/live.json")[1]["ttft"]["count"]

    before = counts()
    body = {"model": "m", "prompt": ["abc", "de"], "max_tokens": 3}
    guarded.ask("POST", COMPLETIONS, body, Authorization="Bearer key-1")
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 2]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_413_with_and_without_a_declared_length(guarded, chunked):
    body = json.dumps({"prompt": "a" * 2000}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    data = iter([body[:500], body[500:]]) if chunked else body
    headers = {"Authorization": "Bearer key-1"}
    connection.request("POST", COMPLETIONS, data, headers, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "request_too_large"
    connection.close()


def test_a_length_of_many_digits_is_a_number_too(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    for zeros, status in ((b"0" * 5000, b"200"), (b"9" * 5000, b"413")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            length = b"%b%d" % (zeros, len(body))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %b\r\n\r\n" % length + body
            )
            answer = connection.recv(1 << 16)
            assert answer.split()[1] in (status, b"400"), answer  # h11 takes no such length at all


def test_a_declared_length_is_refused_before_the_body_comes(guarded):
    with raw_request(guarded.port, COMPLETIONS, None) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer key-1\r\nContent-Length: 9999999\r\n\r\n"
        )
        connection.recv(1 << 16)  # 401 for the first
        connection.sendall(head.encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"served_model_name": ""}, "served_model_name must be a name"),
        ({"port": 1 << 16}, "port must be in"),
        ({"max_request_bytes": 0}, "max_request_bytes must be at least 1"),
        ({"drain_timeout_s": 0.0}, "drain_timeout_s must be seconds"),
        ({"api_keys": ("secret key",)}, "api_keys must be made of printable ASCII without spaces, got '<hidden>'"),
    ],
)
def test_bad_server_options_are_named(options, message):
    with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
        ServerOptions(**{"served_model_name": "m", **options})


def test_the_document_describes_every_field(server):
    status, document, _ = server.ask("GET", "/openapi.json")
    assert status == 200
    assert document == openapi.schema()
    schemas = document["components"]["schemas"]
    assert {"prompt", "messages"} <= {
        *schemas["CompletionRequest"]["required"],
        *schemas["ChatCompletionRequest"]["required"],
    }
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    open_paths = [path for path, item in document["paths"].items() if item.get("get", {}).get("security") == []]
    assert open_paths == ["/health", "/ready", "/version"]
    assert {"temperature", "user", "stop", "echo"} <= set(schemas["CompletionRequest"]["properties"])


def test_without_a_tokenizer_only_token_ids_are_taken():
    with running(
        ServerOptions(served_model_name="m", port=0), load=lambda: AsyncLLM.over(echo, {"tokenizer": False})
    ) as it:
        status, answer, _ = it.ask("POST", COMPLETIONS, {"prompt": "abc"})
        assert (status, "no tokenizer" in answer["error"]["message"]) == (400, True)
        assert it.ask("POST", CHAT, {"messages": HELLO})[0] == 400
        status, answer, _ = it.ask("POST", COMPLETIONS, {"prompt": [97], "max_tokens": 2, "logprobs": 0})
        assert (status, answer["choices"][0]["logprobs"]["tokens"]) == (200, ["token_id:97"] * 2)

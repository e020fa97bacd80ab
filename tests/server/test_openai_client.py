"""What OpenAI's own client sees: texts, streams, usage, logprobs, samples, models."""

import asyncio

import openai
import pytest
from echo_core import ascii_tokenizer

from jaxserve.server import prompts
from jaxserve.server.protocol import ChatCompletionRequest, ChatMessage
from jaxserve.tokenizer import Tokenizer

IGNORED = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def ask(text):
    return [{"role": "user", "content": text}]


def test_a_completion_has_text_a_reason_and_usage(client):
    answer = client.completions.create(model="echo", prompt="abc", max_tokens=7, **{"user": "u", "temperature": 0})
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "abcabca", "length")]
    assert (answer.object, answer.model) == ("text_completion", "echo")
    assert answer.id.startswith("cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)
    assert client.completions.create(model="echo", prompt="a").usage.completion_tokens == 16  # SamplingParams' own


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "xyz"], ["aba", "aba", "xyz", "xyz"]),
        ([104, 105], ["hih", "hih"]),
        ([[104, 105], [106]], ["hih", "hih", "jjj", "jjj"]),
    ],
)
def test_each_prompt_has_its_n_samples_in_order(client, prompt, texts):
    for stream in (False, True):
        answer = client.completions.create(model="echo", prompt=prompt, n=2, max_tokens=3, stream=stream)
        found = dict.fromkeys(range(len(texts)), "")
        for part in answer if stream else [answer]:
            for choice in part.choices:
                found[choice.index] += choice.text
        assert list(found.values()) == texts


def test_a_completion_stream_ends_with_a_reason_and_then_usage(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, usage = client.completions.create(model="echo", prompt="abc", max_tokens=7, **options)
    assert "".join(c.choices[0].text for c in [*chunks, last]) == "abcabca"
    assert {c.choices[0].finish_reason for c in chunks} == {None}
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens, usage.usage.total_tokens) == (3, 7, 10)
    assert len({(c.id, c.created, c.model, c.object) for c in [*chunks, last, usage]}) == 1


def test_a_stop_string_ends_the_text_before_it(client):
    for stop in ("de", ["x", "de"]):
        (choice,) = client.completions.create(model="echo", prompt="abcdef", stop=stop, max_tokens=99).choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abc", "stop", "de")
    chunks = client.completions.create(model="echo", prompt="abcdef", stop="de", max_tokens=99, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_completion_logprobs_name_the_token_and_the_likeliest(client):
    (whole,) = client.completions.create(model="echo", prompt="ab", max_tokens=3, logprobs=2).choices
    found = whole.logprobs
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["a", "b", "a"], [-0.5] * 3, [0, 1, 2])
    assert found.top_logprobs[1] == {"b": -0.5, "c": -1.0}
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(model="echo", prompt="ab", max_tokens=3, logprobs=2, stream=True)
    ]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(found, name)


def test_a_chat_answer_is_a_message(client):
    answer = client.chat.completions.create(
        model="echo", messages=ask("abc"), max_completion_tokens=4, max_tokens=9, **IGNORED
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abca", "length")
    assert (answer.object, answer.usage.total_tokens) == ("chat.completion", 7)
    assert answer.id.startswith("chatcmpl-")


def test_a_chat_without_a_limit_may_fill_the_context(client):
    answer = client.chat.completions.create(model="echo", messages=ask("a" * 4000))
    assert answer.usage.completion_tokens == 96


def test_text_parts_are_joined_and_other_parts_refused(client):
    content = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    answer = client.chat.completions.create(model="echo", messages=ask(content), max_tokens=4)
    assert answer.choices[0].message.content == "ab\nc"
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(openai.BadRequestError, match="'image_url'") as caught:
        client.chat.completions.create(model="echo", messages=ask(image))
    assert caught.value.param == "messages[0].content[0].type"


def test_a_chat_stream_is_role_then_text_then_reason_then_usage(client):
    chunks = list(
        client.chat.completions.create(
            model="echo",
            messages=ask("abc"),
            n=2,
            max_tokens=5,
            temperature=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usage = chunks.pop()
    assert (usage.choices, usage.usage.completion_tokens, usage.usage.prompt_tokens) == ([], 10, 3)
    for index in (0, 1):
        first, *middle, last = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
        assert "".join(choice.delta.content for choice in middle) == "abcab"
        assert {(choice.delta.role, choice.finish_reason) for choice in middle} == {(None, None)}
        assert (last.delta.content, last.finish_reason) == (None, "length")


def test_chat_logprobs_have_bytes_and_the_top(client):
    options = {"messages": ask("ab"), "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="echo", **options).choices[0].logprobs.content
    assert [(p.token, p.logprob, p.bytes) for p in whole] == [("a", -0.5, [97]), ("b", -0.5, [98])]
    assert [(p.token, p.logprob) for p in whole[0].top_logprobs] == [("a", -0.5), ("b", -1.0)]
    chunks = client.chat.completions.create(model="echo", stream=True, **options)
    assert [p for c in chunks for p in (c.choices[0].logprobs.content if c.choices[0].logprobs else ())] == whole
    only = client.chat.completions.create(model="echo", messages=ask("ab"), max_tokens=1, logprobs=True)
    assert only.choices[0].logprobs.content[0].top_logprobs == []


def test_the_async_client_runs_many_streams_at_once(server):
    async def one(client, text):
        stream = await client.chat.completions.create(model="echo", messages=ask(text), max_tokens=40, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        texts = [f"<{i}>" for i in range(20)]
        async with server.async_client() as client:
            assert await asyncio.gather(*(one(client, text) for text in texts)) == [(t * 40)[:40] for t in texts]

    asyncio.run(main())


def test_a_stream_that_the_client_closes_is_aborted(server, client):
    aborted = server.metrics()["aborted"]
    with client.completions.create(model="echo", prompt="abc", max_tokens=4000, stream=True) as stream:
        next(iter(stream))
    server.settled(running=0, aborted=aborted + 1)


def test_models_are_listed_and_found_by_id(client):
    (card,) = client.models.list().data
    assert (card.id, card.object, card.max_model_len) == ("echo", "model", 4096)
    assert client.models.retrieve("echo") == card
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


def test_vllms_names_go_in_extra_body(client):
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 1, "stop_token_ids": [1], "priority": 3}
    extra |= {"cache_salt": "s", "skip_special_tokens": False, "repetition_penalty": 1.1, "bad_words": ["z"]}
    answer = client.completions.create(
        model="echo", prompt="ab", max_tokens=2, logit_bias={"97": 1}, seed=4, extra_body=extra
    )
    assert answer.choices[0].text == "ab"


def test_tools_that_the_template_does_not_know_and_forced_ones_are_refused(client):
    tools = {"tools": [TOOL], "max_tokens": 3}
    answer = client.chat.completions.create(model="echo", messages=ask("abc"), tool_choice="none", **tools)
    assert answer.choices[0].message.content == "abc"
    with pytest.raises(openai.BadRequestError, match="knows no tools") as caught:
        client.chat.completions.create(model="echo", messages=ask("abc"), tool_choice="auto", **tools)
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="echo", messages=ask("abc"), tools=[TOOL], tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_tools_reach_a_template_that_knows_them():
    source = "{{ messages[0].content }}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
    tokenizer = Tokenizer(ascii_tokenizer().backend, chat_template=source)
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content="hi")], tools=[TOOL])
    assert prompts._render(tokenizer, request) == f"hi[{TOOL['function']['name']}]"

"""From what a request holds to token ids. Work that grows with the text runs in a thread: running streams go on."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import RequestError
from jaxserve.input_processor import Prompt
from jaxserve.server.errors import bad_request, unsupported
from jaxserve.server.protocol import ChatCompletionRequest, ChatMessage
from jaxserve.tokenizer import Tokenizer

MAX_PROMPTS = 2048  # of one request
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")


async def of_completion(given: str | Sequence[Any], llm: AsyncLLM) -> list[Prompt]:
    """A text, token ids, or several of one kind, as lists of token ids.

    Raises:
        ApiError: 400, no prompt at all, too many, or kinds mixed.
        RequestError: a text that cannot be a prompt.
    """
    items = [given] if isinstance(given, str) else given
    max_model_len = llm.limits.max_model_len
    if len(items) > max(MAX_PROMPTS, max_model_len):  # do not even look at them
        most = f"{max_model_len} token ids or {MAX_PROMPTS} prompts"
        raise bad_request(f"prompt must hold at most {most}, got {len(items)}", "prompt")
    kinds = {type(item) for item in items}
    if len(kinds) != 1:
        found = "an empty list" if not kinds else "a list of " + " and ".join(sorted(kind.__name__ for kind in kinds))
        raise bad_request(f"prompt must be text, token ids, or a list of texts or of token ids, got {found}", "prompt")
    if kinds == {int}:
        return [list(items)]
    if len(items) > MAX_PROMPTS:
        raise bad_request(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(items)}", "prompt")
    if kinds == {list}:
        return list(items)
    tokenizer = await _tokenizer(llm)
    return await asyncio.to_thread(lambda: [_encode(tokenizer, text, max_model_len) for text in items])


async def of_chat(request: ChatCompletionRequest, llm: AsyncLLM) -> Prompt:
    """The conversation in the model's chat template, as token ids.

    Raises:
        ApiError: 400, the model has no template, or the template refuses the messages.
        RequestError: a conversation that cannot be a prompt.
    """
    reserved = next((name for name in request.chat_template_kwargs or () if name in RESERVED), None)
    if reserved is not None:
        raise unsupported(f"chat_template_kwargs must not hold {reserved!r}", "chat_template_kwargs")
    tokenizer = await _tokenizer(llm)
    max_model_len = llm.limits.max_model_len
    return await asyncio.to_thread(
        lambda: _encode(tokenizer, _render(tokenizer, request), max_model_len, add_special_tokens=False)
    )


async def _tokenizer(llm: AsyncLLM) -> Tokenizer:
    try:
        return await llm.get_tokenizer()
    except ValueError as error:
        raise RequestError(f"{error}: give prompts as lists of token ids, to /v1/completions") from error


def _encode(tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool = True) -> list[int]:
    if len(text) > max_model_len * tokenizer.longest_token:  # do not even tokenise it
        raise RequestError(
            f"the prompt has {len(text)} characters, more than max_model_len {max_model_len} tokens hold; shorten it"
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _render(tokenizer: Tokenizer, request: ChatCompletionRequest) -> str:
    tools = None if request.tool_choice == "none" else request.tools
    if tools and "tools" not in (tokenizer.chat_template or ""):
        raise bad_request("this model's chat template knows no tools; leave them out", "tools")
    goes_on = bool(request.continue_final_message)
    try:
        text = tokenizer.apply_chat_template(
            [_as_dict(message) for message in request.messages],
            add_generation_prompt=not goes_on
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            continue_final_message=goes_on,
            tools=tools,
            **(request.chat_template_kwargs or {}),
        )
    except Exception as error:  # a template is foreign code, and may fail in any way on messages of any kind
        raise bad_request(str(error) or type(error).__name__, "messages") from error
    assert isinstance(text, str)  # without tokenize=True
    return text


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    """As templates expect it: only what was given, and the arguments of a tool call as an object."""
    turn = msgspec.to_builtins(message)
    for call in turn.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError as error:
                raise ValueError(f"the arguments of a tool call must be JSON: {error}") from error
    return turn

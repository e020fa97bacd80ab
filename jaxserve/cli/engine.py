"""What the commands do with an engine: start it, stream from it, put streams in order."""

import contextlib
import dataclasses
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.exceptions import RequestError

if TYPE_CHECKING:
    from jaxserve import LLM, AsyncLLM, LLMEngine, RequestOutput, SamplingParams
    from jaxserve.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256  # the library's 16 is too short to read


def start(options: Mapping[str, Any]) -> "LLM":
    """The engine with these options (those of `ENGINE_OPTIONS`)."""
    from jaxserve import LLM

    return LLM(**options)


def start_async(options: Mapping[str, Any]) -> "AsyncLLM":
    """As `start`, in a process of its own."""
    from jaxserve import AsyncLLM

    return AsyncLLM(**options)


@contextlib.contextmanager
def profiled(llm: "LLM", directory: Path | None) -> Iterator[None]:
    """Profiles what runs inside, also when it fails; None = does nothing."""
    if directory is None:
        yield
        return
    llm.start_profile(directory)
    try:
        yield
    finally:
        llm.stop_profile()


def require_text(name: str, text: str) -> None:
    """Raises ValueError where an argument came as bytes that are not text (Python hides them as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be UTF-8 text, got {text!r}") from error


def sampling_params(engine: "LLMEngine", options: Mapping[str, Any], **fixed: Any) -> "SamplingParams":
    """The model's own defaults, overridden by what the user gave, and then by the command.

    Raises:
        ParameterError: an option is out of range.
        OSError, ValueError: --structured-outputs is neither JSON nor a file with it.
    """
    given = {"max_tokens": DEFAULT_MAX_TOKENS, **options, **fixed}
    if "structured_outputs" in given:
        given["structured_outputs"] = _json_of("--structured-outputs", given["structured_outputs"])
    return dataclasses.replace(engine.default_sampling_params, **given)


def _json_of(name: str, given: str) -> Any:
    """What `given` holds: the text of a JSON object, or the path of a file with one."""
    try:
        return json.loads(given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON, or a file with it, got {given[:200]!r}: {error}") from error


def chat_prompt(engine: "LLMEngine", messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation in the model's chat template, ready for the assistant's turn.

    Raises:
        RequestError: the model has no tokenizer or no template, or the template refuses the messages.
    """
    tokenizer = tokenizer_of(engine)
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except ValueError as error:
        raise RequestError(str(error)) from error
    assert isinstance(text, str)  # without tokenize=True
    return tokenizer.encode(text, add_special_tokens=False)  # the template wrote them


def tokenizer_of(engine: "LLMEngine") -> "Tokenizer":
    """The engine's tokenizer.

    Raises:
        RequestError: the model has none.
    """
    if engine.tokenizer is None:
        raise RequestError("this model has no tokenizer, so it cannot take text; name one with --tokenizer")
    return engine.tokenizer


def stream(
    engine: "LLMEngine", prompts: Mapping[str, list[int]], params: "SamplingParams"
) -> Generator["RequestOutput", None, None]:
    """Runs all prompts (token ids by request id) together and yields outputs as they come.

    Closing the iterator, or an error in it, aborts what still runs.
    """
    try:
        for request_id, token_ids in prompts.items():
            engine.add_request(request_id, token_ids, params)
        while engine.has_unfinished_requests():
            yield from engine.step()
    finally:
        engine.abort_request(list(prompts))


def in_order(outputs: Iterable["RequestOutput"], request_ids: Sequence[str]) -> Iterator["RequestOutput"]:
    """Yields all outputs of the first request, then all of the second, and so on.

    Those of the first unfinished request pass at once; those of later ones wait for their turn.
    """
    waiting: dict[str, list[RequestOutput]] = {request_id: [] for request_id in request_ids}
    turn = iter(request_ids)
    current = next(turn, None)
    for output in outputs:
        waiting[output.request_id].append(output)
        while current is not None and waiting[current]:
            ready, waiting[current] = waiting[current], []
            yield from ready
            if not ready[-1].finished:
                break
            current = next(turn, None)

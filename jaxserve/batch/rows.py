"""One line of the input: what it asks for, or what is wrong with it.

A row is a plain `{"prompt": ...}` or `{"messages": [...]}` with sampling options beside it, or a row of OpenAI's batch
API (`custom_id`, `method`, `url`, `body`). Nothing here raises: a bad row costs only its own line.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxserve.exceptions import COSTS_ITS_ROW, ParameterError, why_refused
from jaxserve.sampling_params import RequestOutputKind, SamplingParams, structured_outputs_of
from jaxserve.tokenizer import Tokenizer

URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_FIELDS = ("custom_id", "method", "url", "body")
_RENAMED = {"max_completion_tokens": "max_tokens"}
_IGNORED = ("user",)  # says who asked; means nothing to an engine
_WITHOUT_ANSWER = ("prompt_logprobs", "output_kind")  # known to an engine
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A readable row: `prompt` is text, token ids, or the messages of a chat."""

    number: int
    custom_id: str
    kind: Literal["chat", "completion"]
    prompt: str | list[Any]
    model: str | None
    options: dict[str, Any]  # of SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be served. `code` is a word for programs, `message` says why and the way out."""

    number: int
    custom_id: str
    code: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """What a row asks of the engine. The prompt of a chat is what the chat template made of it."""

    row: Row
    prompt: str | list[int]
    params: SamplingParams


class RowReader:
    """Makes requests of lines, for one model. Used by several threads."""

    def __init__(
        self, *, model_name: str, tokenizer: Tokenizer | None, defaults: SamplingParams, seed: int, repeated: frozenset
    ):
        self._model_name, self._tokenizer = model_name, tokenizer
        self._defaults, self._seed, self._repeated = vars(defaults), seed, repeated

    def __call__(self, numbered: tuple[int, bytes]) -> BatchRequest | BadRow:
        row = parse_row(numbered)
        if isinstance(row, BadRow):
            return row
        if row.number in self._repeated:
            message = f"custom_id must be one that no row before this has, got {row.custom_id!r}"
            return BadRow(number=row.number, custom_id=row.custom_id, code="duplicate_custom_id", message=message)
        try:
            return self._request(row)
        except COSTS_ITS_ROW as error:
            return refused(row, error)

    def _request(self, row: Row) -> BatchRequest:
        if row.model not in (None, self._model_name):
            raise ValueError(f"model must be {self._model_name!r}, the one that is loaded, got {row.model!r}")
        params = SamplingParams.of(**{**self._defaults, **row.options, "output_kind": RequestOutputKind.FINAL_ONLY})
        if params.seed is None:  # of the row alone, so that a run that was interrupted draws the same
            params = dataclasses.replace(params, seed=row_seed(self._seed, row.number))
        return BatchRequest(row=row, prompt=self._prompt(row), params=params)

    def _prompt(self, row: Row) -> str | list[int]:
        if row.kind == "completion":
            return row.prompt
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompts as lists of token ids")
        messages: Any = row.prompt  # the template checks them
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert isinstance(text, str)  # without tokenize=True
        return text


def refused(row: Row, error: Exception) -> BadRow:
    """The row, with what stood against it."""
    code = "not_supported" if isinstance(error, NotImplementedError) else "invalid_request"
    return BadRow(number=row.number, custom_id=row.custom_id, code=code, message=why_refused(error))


def row_seed(seed: int, number: int) -> int:
    """The seed of a row that names none: 62 bits, far from those of other rows."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()) >> 2


def default_custom_id(number: int) -> str:
    """The id of a row that names none."""
    return f"row-{number}"


def parse_row(numbered: tuple[int, bytes]) -> Row | BadRow:
    """One line of the input. Never raises: what cannot be read becomes a `BadRow`."""
    number, line = numbered
    custom_id, code = default_custom_id(number), "invalid_json"
    try:
        row = _json_object(line)
        code = "invalid_request"
        custom_id = _custom_id(row, custom_id)
        kind, body = _unwrap(row) if "body" in row else _plain(row)
        return _row(number, custom_id, kind, body)
    except RecursionError:
        return BadRow(number=number, custom_id=custom_id, code=code, message="the row is nested too deeply")
    except NotImplementedError as error:
        return BadRow(number=number, custom_id=custom_id, code="not_supported", message=str(error))
    except COSTS_ITS_ROW as error:
        return BadRow(number=number, custom_id=custom_id, code=code, message=why_refused(error))


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ones
        raise ValueError(f"the row is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


def _custom_id(row: Mapping[str, Any], default: str) -> str:
    custom_id = row.get("custom_id", default)
    if not isinstance(custom_id, str):
        raise ValueError(f"custom_id must be a string, got {type(custom_id).__name__}")
    return custom_id


def _plain(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = {name: value for name, value in row.items() if name != "custom_id"}
    return "chat" if "messages" in body else "completion", body


def _unwrap(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind and body of a row of OpenAI's batch API."""
    for name in _FIELDS:
        if name not in row:
            raise ValueError(f"a row with a body must have {', '.join(_FIELDS)}; {name} is missing")
    unknown = [name for name in row if name not in _FIELDS]
    if unknown:
        raise ValueError(f"a row with a body must have {', '.join(_FIELDS)} and nothing else, got {unknown[0]!r} too")
    url, method, body = row["url"], row["method"], row["body"]
    if not isinstance(url, str) or url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {url!r}")
    if method != "POST":
        raise ValueError(f"method must be 'POST', got {method!r}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object, got {type(body).__name__}")
    return URLS[url], body


def _row(number: int, custom_id: str, kind: Any, body: dict[str, Any]) -> Row:
    field = "messages" if kind == "chat" else "prompt"
    options: dict[str, Any] = {}
    for name, value in body.items():
        ours = _RENAMED.get(name, name)
        if name in _IGNORED or (value is None and ours in _SAMPLING):  # null: the default
            continue
        if name in _WITHOUT_ANSWER:
            raise ParameterError(name, value, "left out in a batch, whose answers have no place for it")
        if ours in options:
            raise ParameterError(name, value, f"left out: {ours} is given, too, by another name")
        options[ours] = value
    prompt, model = options.pop(field, None), options.pop("model", None)
    if options.pop("stream", False):
        raise ValueError("stream must be false in a batch")
    if not isinstance(prompt, list if kind == "chat" else str | list) or not prompt:
        raise ValueError(f"{field} must be a non-empty {'list' if kind == 'chat' else 'string or list of token ids'}")
    if kind == "completion" and isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise ValueError("prompt must be one string or one list of token ids; give each prompt its own row")
    _structure(options)
    if kind == "chat":
        _chat_options(options)
    return Row(number=number, custom_id=custom_id, kind=kind, prompt=prompt, model=model, options=options)


def _structure(options: dict[str, Any]) -> None:
    """Makes OpenAI's `response_format` ours in place."""
    form = structured_outputs_of(options.pop("response_format", None), options.pop("structured_outputs", None))
    if form is not None:
        options["structured_outputs"] = form


def _chat_options(options: dict[str, Any]) -> None:
    """OpenAI's chat names and defaults, made into ours in place."""
    options.setdefault("max_tokens", None)  # until the context is full
    wanted, top = options.pop("logprobs", None), options.pop("top_logprobs", None)
    if not isinstance(wanted, bool | None):
        raise ValueError(f"logprobs must be true or false in a chat, got {wanted!r}; its number is top_logprobs")
    if top is not None and not wanted:
        raise ValueError(f"top_logprobs={top!r} needs logprobs=true")
    if wanted:
        options["logprobs"] = top or 0

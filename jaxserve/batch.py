"""Batch jobs: a JSONL file of prompts in, a JSONL file of answers out, in the order of the input.

A row is a plain `{"prompt": ...}` or `{"messages": [...]}`, sampling options beside it, or a row of OpenAI's batch API
(`custom_id`, `method`, `url`, `body`). Each row gets one line back: `custom_id`, and `response` or `error`. A bad row
costs only its own line. Rows are read through Grain, a few ahead of the engine; the file is never whole in memory.
"""

import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grain
import numpy as np

from jaxserve.exceptions import EngineDeadError, JaxserveError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import LLMEngine

URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_RENAMED = {"max_completion_tokens": "max_tokens"}
_IGNORED = ("user",)  # says who asked; means nothing to an engine
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
# What a hostile row may run into; a defect of ours among these costs the row, not the job.
_COSTS_ITS_ROW = (
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    JaxserveError,
)


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
    """A row that cannot be served; `message` says why."""

    number: int
    custom_id: str
    message: str


@dataclasses.dataclass(kw_only=True, slots=True)
class Totals:
    """What a run did so far."""

    num_rows: int
    done: int = 0
    failed: int = 0  # of `done`
    first_failure: str | None = None  # the row's id and the reason, in one line
    prompt_tokens: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.elapsed_s if self.elapsed_s else 0.0


class JsonLines:
    """Random access to the non-empty lines of a file, as Grain asks of a source: item i is (i, line)."""

    def __init__(self, path: Path):
        self.path = path
        starts, lengths, at = [], [], 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    starts.append(at)
                    lengths.append(len(line))
                at += len(line)
        self._starts, self._lengths = np.array(starts, np.int64), np.array(lengths, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        with self.path.open("rb") as file:  # opened anew each time: Grain's threads share this object
            file.seek(self._starts[index])
            return int(index), file.read(self._lengths[index])

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def parse_row(numbered: tuple[int, bytes]) -> Row | BadRow:
    """One line of the input. Never raises: what cannot be read becomes a `BadRow`."""
    number, line = numbered
    custom_id = f"row-{number}"
    try:
        try:
            row = json.loads(line)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ones
            raise ValueError(f"the row is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
        custom_id = str(row.pop("custom_id", custom_id))
        kind, body = _unwrap(row) if "body" in row else ("chat" if "messages" in row else "completion", row)
        return _row(number, custom_id, kind, body)
    except RecursionError:
        return BadRow(number=number, custom_id=custom_id, message="the row is nested too deeply")
    except ValueError as error:
        return BadRow(number=number, custom_id=custom_id, message=str(error))


def _unwrap(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    url, method, body = row.get("url"), row.get("method", "POST"), row["body"]
    if not isinstance(url, str) or url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {url!r}")
    if method != "POST":
        raise ValueError(f"method must be 'POST', got {method!r}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object, got {type(body).__name__}")
    return URLS[url], body


def _row(number: int, custom_id: str, kind: Any, body: dict[str, Any]) -> Row:
    field = "messages" if kind == "chat" else "prompt"
    named = [(_RENAMED.get(name, name), value) for name, value in body.items() if name not in _IGNORED]
    options = {name: value for name, value in named if value is not None or name not in _SAMPLING}  # null: the default
    prompt, model = options.pop(field, None), options.pop("model", None)
    if options.pop("stream", False):
        raise ValueError("stream must be false in a batch")
    if not isinstance(prompt, list if kind == "chat" else str | list) or not prompt:
        raise ValueError(f"{field} must be a non-empty {'list' if kind == 'chat' else 'string or list of token ids'}")
    if kind == "completion" and isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise ValueError("prompt must be one string or one list of token ids; give each prompt its own row")
    if kind == "chat":
        _chat_options(options)
    return Row(number=number, custom_id=custom_id, kind=kind, prompt=prompt, model=model, options=options)


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


class Batch:
    """One run over a file. Iterating gives the output rows, in the order of the input; `totals` grows meanwhile.

    At most `max_in_flight` rows are in the engine; finished rows wait only for slower ones before them.
    """

    def __init__(self, engine: "LLMEngine", rows: JsonLines, *, model_name: str, max_in_flight: int = 64):
        self._engine, self._rows, self._model_name = engine, rows, model_name
        self._max_in_flight = max_in_flight
        self._running: dict[str, Row] = {}
        self._finished: dict[int, dict[str, Any]] = {}
        self.totals = Totals(num_rows=len(rows))

    def __iter__(self) -> Generator[dict[str, Any]]:
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._max_in_flight)
        rows = iter(grain.MapDataset.source(self._rows).map(parse_row).to_iter_dataset(options))
        try:
            next_number = 0
            while next_number < len(self._rows):
                self._fill(rows)
                if self._running:
                    self._step()
                while next_number in self._finished:
                    yield self._finished.pop(next_number)
                    next_number += 1
        finally:
            self._engine.abort_request(list(self._running))
            rows.close()

    def _fill(self, rows: Iterator[Row | BadRow]) -> None:
        while len(self._running) < self._max_in_flight and (row := next(rows, None)) is not None:
            if isinstance(row, BadRow):
                self._fail(row, row.message)
                continue
            try:
                self._submit(row)
            except EngineDeadError:  # nobody is left to answer the other rows
                raise
            except _COSTS_ITS_ROW as error:
                self._fail(row, _message(error))

    def _submit(self, row: Row) -> None:
        if row.model not in (None, self._model_name):
            raise ValueError(f"model must be {self._model_name!r}, the one that is loaded, got {row.model!r}")
        defaults = vars(self._engine.default_sampling_params)
        params = SamplingParams.of(**{**defaults, **row.options, "output_kind": RequestOutputKind.FINAL_ONLY})
        prompt = self._chat_prompt(row.prompt) if row.kind == "chat" else row.prompt
        request_id = f"batch-{row.number}"
        self._engine.add_request(request_id, prompt, params)
        self._running[request_id] = row

    def _chat_prompt(self, messages: Any) -> list[int]:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompts as lists of token ids")
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        assert isinstance(token_ids, list)
        return token_ids

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                row = self._running.pop(output.request_id)
                self._finished[row.number] = _answer(row, output, self._model_name)
                self.totals.done += 1
                self.totals.prompt_tokens += len(output.prompt_token_ids)
                self.totals.generated_tokens += sum(len(sample.token_ids) for sample in output.outputs)

    def _fail(self, row: Row | BadRow, message: str) -> None:
        self.totals.done += 1
        self.totals.failed += 1
        self.totals.first_failure = self.totals.first_failure or " ".join(f"{row.custom_id}: {message}".split())
        error = {"code": "invalid_request", "message": message}
        self._finished[row.number] = _line(row.custom_id, None, error)


def _message(error: Exception) -> str:
    ours = isinstance(error, ValueError | NotImplementedError | JaxserveError)
    return str(error) if ours else f"{type(error).__name__}: {error}"  # a bare KeyError says only the key


def run_batch(
    engine: "LLMEngine",
    rows: JsonLines,
    target: Path,
    *,
    model_name: str,
    on_row: Callable[[Totals], None] = lambda totals: None,
) -> Totals:
    """Answers every row into `target`, calling `on_row` after each; returns the totals.

    Raises:
        ValueError: `target` is the file that the rows come from.
    """
    if target.exists() and target.samefile(rows.path):
        raise ValueError(f"the output must be another file than the input, got {target} for both")
    batch = Batch(engine, rows, model_name=model_name)
    start = time.monotonic()
    # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    with (
        target.open("w", encoding="utf-8", errors="backslashreplace") as file,
        contextlib.closing(iter(batch)) as lines,
    ):
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            batch.totals.elapsed_s = time.monotonic() - start
            on_row(batch.totals)
    return batch.totals


# ------------------------------------------------------------------------------------- answers, in OpenAI's words


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _answer(row: Row, output: RequestOutput, model_name: str) -> dict[str, Any]:
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    body = {
        "id": output.request_id,
        "object": "chat.completion" if row.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [_choice(row, sample) for sample in output.outputs],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return _line(row.custom_id, {"status_code": 200, "request_id": output.request_id, "body": body}, None)


def _choice(row: Row, sample: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": sample.index, "finish_reason": sample.finish_reason}
    if row.kind == "chat":
        choice["message"] = {"role": "assistant", "content": sample.text}
        choice["logprobs"] = None if sample.logprobs is None else {"content": _chat_logprobs(row, sample)}
    else:
        choice["text"] = sample.text
        choice["logprobs"] = None if sample.logprobs is None else _completion_logprobs(sample)
    return choice


def _chat_logprobs(row: Row, sample: CompletionOutput) -> list[dict[str, Any]]:
    content = []
    for token, candidates in zip(sample.token_ids, sample.logprobs or (), strict=True):
        top = [_entry(c.decoded_token, c.logprob) for c in candidates.values() if c.rank <= row.options["logprobs"]]
        content.append({**_entry(candidates[token].decoded_token, candidates[token].logprob), "top_logprobs": top})
    return content


def _entry(token: str | None, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list((token or "").encode())}


def _completion_logprobs(sample: CompletionOutput) -> dict[str, Any]:
    pairs = list(zip(sample.token_ids, sample.logprobs or (), strict=True))
    return {
        "tokens": [candidates[token].decoded_token for token, candidates in pairs],
        "token_logprobs": [candidates[token].logprob for token, candidates in pairs],
        "top_logprobs": [{c.decoded_token: c.logprob for c in candidates.values()} for _, candidates in pairs],
    }

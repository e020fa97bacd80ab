"""The lines of the output, in the form of OpenAI's batch API."""

import json
import time
from typing import Any

from jaxserve.batch.rows import BadRow, Row
from jaxserve.outputs import CompletionOutput, RequestOutput


def answer(row: Row, output: RequestOutput, model_name: str) -> bytes:
    """The line of a row that was served."""
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
    return _line(row, {"status_code": 200, "request_id": output.request_id, "body": body}, None)


def failure(row: BadRow) -> bytes:
    """The line of a row that could not be served."""
    return _line(row, None, {"code": row.code, "message": row.message})


def _line(row: Row | BadRow, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    line = {"id": f"batch_req_{row.number}", "custom_id": row.custom_id, "response": response, "error": error}
    # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    return (json.dumps(line, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


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

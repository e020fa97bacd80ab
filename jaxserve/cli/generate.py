"""`jaxserve generate`: prompts in, text out."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, ProfileOption, takes
from jaxserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from jaxserve import LLMEngine, RequestOutput


@takes(engine=ENGINE_OPTIONS, sampling=SAMPLING_OPTIONS)
def generate(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    profile: ProfileOption = None,
) -> None:
    """Continue each prompt, or answer it with --chat. The text streams to stdout.

    Several prompts run together in one batch; their texts are printed in the order of the prompts.
    """
    texts = read_prompts(prompt or [], prompt_file)
    kind = RequestOutputKind.FINAL_ONLY if as_json else RequestOutputKind.DELTA
    write = JsonWriter(texts) if as_json else TextWriter(texts)
    # One batch needs few programs: compiling all of them beside it would only slow it down.
    with driver.start({"warm_up": "off", **engine}) as llm, driver.profiled(llm, profile):
        llm_engine = llm.llm_engine
        prompts = {str(i): encode(llm_engine, text, chat=chat) for i, text in enumerate(texts)}
        params = driver.sampling_params(llm_engine, sampling, output_kind=kind)
        outputs = driver.stream(llm_engine, prompts, params)
        for output in driver.in_order(outputs, list(prompts)):
            write(int(output.request_id), output)


def encode(engine: "LLMEngine", text: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt as it is, or as a user's turn in the model's chat template."""
    if chat:
        return driver.chat_prompt(engine, [{"role": "user", "content": text}])
    return driver.tokenizer_of(engine).encode(text)


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts given one by one, then those of the file; its empty lines are no prompts.

    Raises:
        ValueError: there is none, or one is not UTF-8 text.
    """
    for prompt in prompts:
        driver.require_text("--prompt", prompt)
    try:
        lines = file.read_text(encoding="utf-8").split("\n") if file else []  # splitlines would cut at U+2028, too
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text: {error}") from error
    found = [*prompts, *(line for line in lines if line.strip())]
    if not found:
        raise ValueError("no prompt to answer: give --prompt TEXT or a --prompt-file that is not empty")
    return found


class TextWriter:
    """Prints text as it comes. With several prompts, a line with the prompt comes before each text."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts = prompts
        self._titled = -1 if len(prompts) > 1 else 0  # the last prompt whose title is printed

    def __call__(self, index: int, output: "RequestOutput") -> None:
        if index > self._titled:
            self._titled = index
            print(f"[{index + 1}/{len(self._prompts)}] {self._prompts[index]}")
        sample = output.outputs[0]
        print(sample.text, end="\n" if output.finished else "", flush=True)
        if sample.finish_reason == "error":
            print(f"error: {sample.stop_reason}", file=sys.stderr)


class JsonWriter:
    """Prints each finished request as one line of JSON."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts = prompts

    def __call__(self, index: int, output: "RequestOutput") -> None:
        sample = output.outputs[0]
        record = {
            "prompt": self._prompts[index],
            "text": sample.text,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "metrics": metrics_of(output),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)


def metrics_of(output: "RequestOutput") -> dict[str, Any]:
    """Counts and times (milliseconds) of one finished request; a time that it never reached is None."""
    times = output.metrics
    num_tokens = len(output.outputs[0].token_ids)
    found: dict[str, Any] = {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": num_tokens,
        "num_cached_tokens": output.num_cached_tokens,
    }
    if times is None:
        return found
    ttft = _between_ms(times.arrival_time, times.first_token_time)
    e2el = _between_ms(times.arrival_time, times.last_token_time)
    return found | {
        "num_preemptions": times.num_preemptions,
        "queue_ms": _between_ms(times.arrival_time, times.first_scheduled_time),
        "ttft_ms": ttft,
        "tpot_ms": (e2el - ttft) / (num_tokens - 1)
        if ttft is not None and e2el is not None and num_tokens > 1
        else None,
        "e2el_ms": e2el,
    }


def _between_ms(start: float, end: float | None) -> float | None:
    return None if end is None else 1e3 * (end - start)

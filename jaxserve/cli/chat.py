"""`jaxserve chat`: a conversation in the terminal."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.generate import JsonWriter
from jaxserve.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, takes
from jaxserve.exceptions import RequestError
from jaxserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from jaxserve import LLMEngine, SamplingParams

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves."


@takes(engine=ENGINE_OPTIONS, sampling=SAMPLING_OPTIONS)
def chat(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="Text of the system message.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an answer.")] = False,
) -> None:
    """Talk with a model. Each line is a message, and the answer streams back."""
    driver.require_text("--system", system or "")
    print(HELP, file=sys.stderr)
    beginning = [{"role": "system", "content": system}] if system else []
    with driver.start(engine) as llm:
        kind = RequestOutputKind.CUMULATIVE if as_json else RequestOutputKind.DELTA
        params = driver.sampling_params(llm.llm_engine, sampling, output_kind=kind)
        messages = list(beginning)
        for line in read_lines():
            if line == "/reset":
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": line})
            try:
                text = answer(llm.llm_engine, messages, params, as_json=as_json)
                messages.append({"role": "assistant", "content": text})
            except RequestError as error:  # for instance a conversation beyond max_model_len
                messages.pop()
                print(f"error: {error} (/reset starts over)", file=sys.stderr)


def read_lines() -> Iterator[str]:
    """Lines from the terminal (with editing and history where Python has readline), until /exit or the end.

    Raises:
        ValueError: the input is not text.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise ValueError(f"the input must be text: {error}") from error
        if line == "/exit":
            return
        if line:
            yield line


def answer(
    engine: "LLMEngine", messages: list[dict[str, str]], params: "SamplingParams", *, as_json: bool = False
) -> str:
    """Writes the next turn to stdout, streaming or as one line of JSON, and returns it; Ctrl-C ends it early."""
    text, output = "", None
    outputs = driver.stream(engine, {"chat": driver.chat_prompt(engine, messages)}, params)
    with contextlib.closing(outputs), ctrl_c() as pressed:
        for output in outputs:
            new = output.outputs[0].text
            text = new if as_json else text + new
            if not as_json:
                print(new, end="", flush=True)
            if pressed.is_set():
                break
    if not as_json:
        print(flush=True)
    elif output is not None:
        JsonWriter([messages[-1]["content"]])(0, output)
    return text


@contextlib.contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, in place of an exception that would cut a step of the engine in two."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)

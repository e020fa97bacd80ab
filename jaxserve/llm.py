"""`LLM`: a model to call from a script or a notebook."""

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxserve.config import EngineConfig
from jaxserve.engine import LLMEngine
from jaxserve.exceptions import EngineDeadError, RequestError
from jaxserve.input_processor import Prompt
from jaxserve.metrics import StepRecord
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.tokenizer import Tokenizer

Message = dict[str, Any]


class LLM:
    """Offline generation with continuous batching. Calls from several threads take turns.

        llm = LLM("smollm2-135m")
        for output in llm.generate(["Hello", "The sea is"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Args:
        model: "smollm2-135m" (the demo model), a Hugging Face id or directory, a GGUF file or an Orbax checkpoint.
        options: any field of the classes in `jaxserve.config` (dtype, max_model_len, page_size, max_num_seqs,
            max_num_batched_tokens, enable_prefix_caching, quantization, kv_cache_dtype, load_format, ...).

    Raises:
        TypeError: an unknown option; the message lists the known ones.
        ValueError: options that do not fit the model or the machine.
        SystemExit: with `coordinator_address`, in other processes than 0, which it serves until that one has ended.
    """

    def __init__(self, model: str, **options: Any):
        self.llm_engine = LLMEngine(EngineConfig.of(model, **{"prioritize_prefill": True, **options}))
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns the finished outputs in the order of the prompts.

        Args:
            prompts: text or a list of token ids, or a list of either.
            sampling_params: one for all, or one a prompt; None = the model's defaults.
            use_tqdm: show a progress bar on a terminal or in a notebook (named as in vLLM).
            priority: one number a prompt, lower first, under scheduling_policy="priority".

        Raises:
            RequestError, ParameterError: one of the requests cannot be served; none of them is run.
        """
        batch = _as_prompts(prompts)
        params = self._as_params(sampling_params, len(batch))
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise ValueError(f"priority must hold one number a prompt ({len(batch)}), got {len(priorities)}")
        ids: list[str] = []
        with self._lock, interrupts_between_steps() as let_interrupt:
            try:
                for prompt, p, rank in zip(batch, params, priorities, strict=True):
                    request_id = f"generate-{next(self._ids)}"
                    self.llm_engine.add_request(request_id, prompt, _final_only(p), priority=rank)
                    ids.append(request_id)
                return self._run(ids, use_tqdm, let_interrupt)
            except BaseException as error:  # a bad prompt or Ctrl-C: leave nothing behind for the next call
                self.llm_engine.abort_request(ids)
                if not isinstance(error, EngineDeadError):
                    self.llm_engine.settle()
                raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, rendered by the model's chat template; else as `generate`."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        tokenizer = self.get_tokenizer()
        texts: list[Any] = [
            tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]  # the template wrote them
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; its `encode` gives a list of ids.

        Raises:
            RequestError: the model was loaded without one.
        """
        if self.llm_engine.tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompts as lists of token ids")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means for this model."""
        return self.llm_engine.default_sampling_params

    def get_metrics(self) -> dict[str, float]:
        """All counters and gauges of the engine by name."""
        return self.llm_engine.get_metrics()

    def recent_steps(self, since: int = 0) -> list[StepRecord]:
        """Records of the engine's last steps (at most 512), oldest first; only of those after step number `since`."""
        return self.llm_engine.recent_steps(since)

    def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Starts a JAX profiler trace, which `stop_profile` writes into `directory`; see docs/observability.md.

        Raises:
            RequestError: the directory cannot be made, or a profile runs already; the engine goes on.
        """
        self.llm_engine.start_profile(directory)

    def stop_profile(self) -> None:
        """Ends the profile and writes it, which may take seconds. Raises RequestError when none runs."""
        self.llm_engine.stop_profile()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached pages."""
        return self.llm_engine.reset_prefix_cache()

    def close(self) -> None:
        """Stops background work and frees the weights and the KV cache. Called by `with LLM(...) as llm`."""
        self.llm_engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _as_params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ValueError(f"sampling_params must be one for all or one a prompt ({count}), got {len(given)}")
        return list(given)

    def _run(self, ids: list[str], use_tqdm: bool, let_interrupt: Callable[[], None]) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        engine = self.llm_engine
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        shown = use_tqdm and (console.is_terminal or console.is_jupyter)  # elsewhere a bar leaves blank lines
        bar = Progress(*columns, console=console, transient=True, disable=not shown)
        with bar:
            task = bar.add_task("prompts", total=len(ids))
            while len(done) < len(ids):
                let_interrupt()
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        bar.advance(task)
        engine.settle()  # reads the overrun of the last step, so that the pool balances
        return [done[request_id] for request_id in ids]


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the given function is called, or the end: it must not cut a step of the engine in two."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    pressed: list[tuple[Any, Any]] = []

    def let_interrupt() -> None:
        if pressed:
            before(*pressed.pop())

    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield let_interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    let_interrupt()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a str, a list of token ids, or a list of either, got {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _final_only(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)

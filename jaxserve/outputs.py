"""What a request gives back: vLLM's names and meanings.

These are msgspec structs because an engine makes hundreds of them a step, and a dataclass costs five times as much.
They hold no cycles, so the garbage collector need not look at them (gc=False).
"""

import html
from typing import NamedTuple

import msgspec


class Logprob(NamedTuple):
    """One candidate at one position. `rank` counts from 1 = most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True, gc=False):
    """One of the n samples of a request.

    `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the stop string
    or stop token id that matched, None for EOS and for a complete grammar; after "error" it says why.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True, eq=False, weakref=True):
    """Times of one request in seconds on the engine's monotonic clock; None = not reached yet.

    All outputs of a request share the one object, which is up to date; observers know the request by it.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0  # of all samples so far
    inter_token_latencies: list[float] = []  # each gap between two tokens of a sample, as the engine gave them out


class RequestOutput(msgspec.Struct, kw_only=True, gc=False):
    """The state of one request: all of it, what is new, or its end, as `SamplingParams.output_kind` says."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    def _repr_html_(self) -> str:
        """How a notebook shows it: the prompt's end, and each sample after it."""
        prompt = f"[{len(self.prompt_token_ids)} tokens]" if self.prompt is None else self.prompt[-_MAX_SHOWN_CHARS:]
        rows = "".join(
            f"<div style='white-space:pre-wrap'><span style='opacity:.55'>{html.escape(prompt)}</span>"
            f"<b>{html.escape(sample.text)}</b></div><div style='opacity:.55;font-size:85%'>{_footnote(sample)}</div>"
            for sample in self.outputs
        )
        return f"<div style='line-height:1.5'>{rows}</div>"


_MAX_SHOWN_CHARS = 2000


def _footnote(sample: CompletionOutput) -> str:
    state = sample.finish_reason or "running"
    if sample.stop_reason is not None:
        state += f" at {sample.stop_reason!r}"
    return html.escape(f"sample {sample.index} · {len(sample.token_ids)} tokens · {state}")

"""From token updates to what callers read: text, stop strings, logprobs, the n samples of a request put together."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.core_types import CoreOutput, CoreRequest, TokenLogprobs
from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.exceptions import EngineDeadError
from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.tokenizer import Tokenizer
from jaxserve.tracing import RequestTracer


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sample of a request, as far as its tokens have arrived."""

    index: int
    seq_id: int
    request: "RequestState"
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None
    num_sent_tokens: int = 0  # for DELTA outputs
    num_sent_chars: int = 0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One request of a caller."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    metrics: RequestMetrics
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    num_unfinished: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    trace_context: Any = None  # where its spans belong; the tracer's


class OutputProcessor:
    """Pure host work. Owns the state of every request that has not had its last output."""

    def __init__(self, tokenizer: Tokenizer | None, tracer: RequestTracer | None = None):
        self._tokenizer, self._tracer = tokenizer, tracer
        self._sequences: dict[int, Sequence] = {}
        self._requests: dict[str, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        cores: list[CoreRequest],
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Starts to follow a request; `cores` are its n sequences.

        Raises:
            TypeError: trace_headers are no mapping.
        """
        if trace_headers is not None and not isinstance(trace_headers, Mapping):
            raise TypeError(f"trace_headers must be None or a mapping of names, got {type(trace_headers).__name__}")
        params = cores[0].params
        state = RequestState(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=cores[0].prompt_token_ids,
            params=params,
            kind=params.output_kind,
            metrics=RequestMetrics(arrival_time=cores[0].arrival_time),
            num_unfinished=len(cores),
            trace_context=None if self._tracer is None else self._tracer.context(trace_headers or {}),
        )
        for index, core in enumerate(cores):
            sequence = Sequence(
                index=index,
                seq_id=core.seq_id,
                request=state,
                detokenizer=self._detokenizer(core),
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            )
            state.sequences.append(sequence)
            self._sequences[core.seq_id] = sequence
        self._requests[request_id] = state

    def seq_ids(self, request_id: str) -> list[int]:
        """The sequences of a request that still run; empty for an unknown id."""
        state = self._requests.get(request_id)
        sequences = [] if state is None else state.sequences
        return [sequence.seq_id for sequence in sequences if sequence.finish_reason is None]

    def discard(self, request_id: str, error: BaseException) -> None:
        """Forgets a request that the core refused, or that ended with the engine."""
        for seq_id in self.seq_ids(request_id):
            del self._sequences[seq_id]
        state = self._requests.pop(request_id, None)
        if state is not None and self._tracer is not None:
            self._tracer.end(state, error)

    def close(self) -> None:
        """Ends the spans of requests that have not ended, and sends what is not sent yet."""
        for request_id in list(self._requests):
            self.discard(request_id, EngineDeadError("the engine was closed"))
        if self._tracer is not None:
            self._tracer.shutdown()

    def process(
        self, core_outputs: Iterable[CoreOutput], now: float
    ) -> tuple[list[RequestOutput], list[tuple[int, str]]]:
        """Takes one step's updates.

        Returns:
            the outputs that callers should see, and (seq_id, stop string) of sequences that the core must end.
        """
        outputs: list[RequestOutput] = []
        stopped: list[tuple[int, str]] = []
        shared: dict[str, dict[int, Sequence]] = {}  # requests of several samples: one output for all that moved
        for core in core_outputs:
            sequence = self._sequences.get(core.seq_id)
            if sequence is None:  # ended here by a stop string while a step was in flight
                continue
            state = sequence.request
            stop = self._append(sequence, core, now)
            if stop is not None and core.finish_reason is None:
                stopped.append((core.seq_id, stop))
            if sequence.finish_reason is not None:
                del self._sequences[core.seq_id]
                state.num_unfinished -= 1
            if state.kind is RequestOutputKind.FINAL_ONLY and state.num_unfinished:
                continue
            if len(state.sequences) > 1:
                shared.setdefault(state.request_id, {})[sequence.index] = sequence
            else:
                outputs.append(self._output(state, state.sequences, now))
        for request_id, sequences in shared.items():
            outputs.append(self._output(self._requests[request_id], list(sequences.values()), now))
        return outputs, stopped

    def _detokenizer(self, core: CoreRequest) -> IncrementalDetokenizer | None:
        params = core.params
        if not params.detokenize or self._tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            core.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=list(params.stop or ()),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _append(self, sequence: Sequence, core: CoreOutput, now: float) -> str | None:
        """Adds new tokens; returns the stop string that they complete, if any."""
        state, new = sequence.request, core.new_token_ids
        metrics = state.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = core.first_scheduled_time
        if new:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                state.num_cached_tokens = core.num_cached_tokens
            _count_tokens(sequence, len(new), now)
            sequence.token_ids += new
            if core.logprobs is not None and sequence.logprobs is not None:
                self._append_logprobs(sequence, core.logprobs)
        if core.prompt_logprobs is not None and state.prompt_logprobs is None:
            state.prompt_logprobs = [None if p is None else self._decoded(p) for p in core.prompt_logprobs]
        stop = None
        if sequence.detokenizer is not None and new:
            hide_last = core.finish_reason == "stop" and not state.params.include_stop_str_in_output
            stop = sequence.detokenizer.append(new[:-1] if hide_last else new)  # an EOS or stop id is no text
        if stop is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        elif core.finish_reason is not None:
            sequence.finish_reason, sequence.stop_reason = core.finish_reason, core.stop_reason
        if sequence.finish_reason is not None:
            metrics.num_preemptions += core.num_preemptions
        return stop

    def _append_logprobs(self, sequence: Sequence, logprobs: list[TokenLogprobs]) -> None:
        assert sequence.logprobs is not None
        assert sequence.cumulative_logprob is not None
        for position in logprobs:
            sequence.logprobs.append(self._decoded(position))
            sequence.cumulative_logprob += position.logprobs[0]

    def _decoded(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """The candidates at one position, the token itself first."""
        ranks = [position.rank, *range(1, len(position.token_ids))]
        candidates: dict[int, Logprob] = {}
        for token, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
            if token not in candidates:
                text = None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
                candidates[token] = Logprob(logprob, rank, text)
        return candidates

    def _output(self, state: RequestState, sequences: list[Sequence], now: float) -> RequestOutput:
        finished = not state.num_unfinished
        delta = state.kind is RequestOutputKind.DELTA
        if finished:
            state.metrics.finished_time = now
            del self._requests[state.request_id]
            if self._tracer is not None:
                self._tracer.end(state)
        completions = [completion(sequence, delta) for sequence in (sequences if delta else state.sequences)]
        prompt_logprobs = state.prompt_logprobs
        if delta:
            state.prompt_logprobs = None  # said once
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            metrics=state.metrics,
        )


def _count_tokens(sequence: Sequence, num_tokens: int, now: float) -> None:
    metrics = sequence.request.metrics
    metrics.num_generation_tokens += num_tokens
    if sequence.last_token_time is not None:
        metrics.inter_token_latencies.append(now - sequence.last_token_time)
    if num_tokens > 1:  # they came together
        metrics.inter_token_latencies += [0.0] * (num_tokens - 1)
    sequence.last_token_time = metrics.last_token_time = now


def completion(sequence: Sequence, delta: bool) -> CompletionOutput:
    """The sample so far, or what of it was not sent yet. Cumulative outputs share the growing token list."""
    finished = sequence.finish_reason is not None
    text = "" if sequence.detokenizer is None else sequence.detokenizer.text_ready(finished)
    token_ids, logprobs = sequence.token_ids, sequence.logprobs
    if delta:
        text, sequence.num_sent_chars = text[sequence.num_sent_chars :], len(text)
        sent, sequence.num_sent_tokens = sequence.num_sent_tokens, len(token_ids)
        token_ids = token_ids[sent:]
        logprobs = None if logprobs is None else logprobs[sent:]
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=sequence.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )

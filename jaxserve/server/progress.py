"""What each output of a running request adds to what was seen of it before, whatever the output's kind."""

import weakref
from typing import NamedTuple

from jaxserve.outputs import RequestMetrics, RequestOutput


class Progress(NamedTuple):
    """What is new in an output, in seconds."""

    first_token_s: float | None  # from arrival to the first token, if that is new
    gaps_s: list[float]  # between tokens of a sample, for the tokens that are new


class ProgressWatch:
    """Tells the latencies of every token once. Requests are known by their `RequestMetrics`, and forgotten with them:
    also those whose last output nobody takes, since the client has gone."""

    def __init__(self) -> None:
        self._num_gaps: weakref.WeakKeyDictionary[RequestMetrics, int] = weakref.WeakKeyDictionary()  # seen so far

    def __len__(self) -> int:
        return len(self._num_gaps)

    def advance(self, output: RequestOutput) -> Progress:
        times = output.metrics
        if times is None or times.first_token_time is None:
            return Progress(None, [])
        seen, gaps = self._num_gaps.get(times), times.inter_token_latencies
        if output.finished:
            self._num_gaps.pop(times, None)
        else:
            self._num_gaps[times] = len(gaps)
        return Progress(times.first_token_time - times.arrival_time if seen is None else None, gaps[seen or 0 :])

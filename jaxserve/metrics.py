"""What one engine counts, and its last steps: plain values, readable anywhere, no exporter needed.

Names of counters and gauges are vLLM's stems, where vLLM has them, behind `jaxserve:`.
"""

import bisect
import collections
import dataclasses
import itertools
from typing import NamedTuple

from jaxserve.scheduler import SchedulerStats, StepPlan

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper bounds of the buckets
NUM_STEP_RECORDS = 512


@dataclasses.dataclass(kw_only=True)
class EngineMetrics:
    """What the engine counts itself; the scheduler's and runner's numbers are joined in `as_dict`."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    iteration_tokens: int = 0  # tokens computed over all steps
    iteration_tokens_counts: list[int] = dataclasses.field(  # steps by the tokens that they computed
        default_factory=lambda: [0] * (len(ITERATION_TOKENS) + 1)
    )
    expert_bytes: int = 0  # of experts' weights that were read
    request_success: dict[str, int] = dataclasses.field(default_factory=dict)  # by finish reason

    def count_step(self, num_tokens: int, expert_bytes: int) -> None:
        self.num_steps += 1
        self.expert_bytes += expert_bytes
        self.iteration_tokens += num_tokens
        self.iteration_tokens_counts[bisect.bisect_left(ITERATION_TOKENS, num_tokens)] += 1

    def as_dict(self, **others: float) -> dict[str, float]:
        values: dict[str, float] = {
            "jaxserve:prompt_tokens": self.prompt_tokens,
            "jaxserve:generation_tokens": self.generation_tokens,
            "jaxserve:num_steps": self.num_steps,
            "jaxserve:iteration_tokens": self.iteration_tokens,
            "jaxserve:expert_bytes": self.expert_bytes,
        }
        cumulative = itertools.accumulate(self.iteration_tokens_counts)
        for bound, count in zip((*ITERATION_TOKENS, "+Inf"), cumulative, strict=True):
            values[f'jaxserve:iteration_tokens_bucket{{le="{bound}"}}'] = count
        for reason, count in sorted(self.request_success.items()):
            values[f'jaxserve:request_success{{finished_reason="{reason}"}}'] = count
        return values | {f"jaxserve:{name}": value for name, value in others.items()}


class StepRecord(NamedTuple):
    """One step, when its result had been read. Times in seconds on the engine's monotonic clock.

    With overlapped steps a step is planned while the one before still runs; `start_time` is then the end of that one,
    so that records follow each other and `duration_s` is the time that a decoding request waits for its next token.
    """

    step: int  # counts from 1
    start_time: float
    duration_s: float
    num_decode_rows: int
    num_prefill_rows: int  # sequences
    num_prefill_tokens: int
    layer_lo: int  # the prefill rows passed layers [lo, hi); 0, 0 without prefill rows
    layer_hi: int
    num_new_tokens: int  # that requests got from it
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float  # held pages / usable pages, 0 to 1
    expert_bytes: int  # of experts' weights that it read; 0 for a dense model

    @property
    def end_time(self) -> float:
        return self.start_time + self.duration_s


class StepRecorder:
    """Keeps the records of the last `NUM_STEP_RECORDS` steps."""

    def __init__(self, num_layers: int):
        self._num_layers = num_layers
        self._starts: collections.deque[float] = collections.deque()  # of steps in flight
        self._records: collections.deque[StepRecord] = collections.deque(maxlen=NUM_STEP_RECORDS)
        self._last_end = 0.0

    def start(self, now: float) -> None:
        """A step was planned at `now` and dispatched."""
        self._starts.append(now)

    def end(
        self, plan: StepPlan, stats: SchedulerStats, *, num_new_tokens: int, expert_bytes: int, now: float
    ) -> StepRecord:
        """The oldest step in flight was read at `now`; `stats` is what it left behind."""
        start = max(self._starts.popleft(), self._last_end)
        self._last_end = now
        lo, hi = (plan.span or (0, self._num_layers)) if plan.prefill else (0, 0)
        record = StepRecord(
            plan.step,
            start,
            now - start,
            len(plan.decode),
            len(plan.prefill),
            plan.num_prefill_tokens,
            lo,
            hi,
            num_new_tokens,
            stats.num_requests_running,
            stats.num_requests_waiting,
            stats.kv_cache_usage_perc,
            expert_bytes,
        )
        self._records.append(record)
        return record

    def recent(self, since: int = 0) -> list[StepRecord]:
        """The records of steps after number `since`, oldest first."""
        records = list(self._records)  # a copy, since another thread may step
        num_new = records[-1].step - since if records else 0  # their numbers follow each other
        return records[-num_new:] if num_new > 0 else []

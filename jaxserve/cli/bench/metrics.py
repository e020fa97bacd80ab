"""The numbers of a serving benchmark, from the times of its requests: pure arithmetic.

Times are seconds from the start of the run. Names and definitions are those of `vllm bench serve`:
TTFT = first token - arrival; E2EL = last token - arrival; TPOT = (E2EL - TTFT) / (tokens - 1), only of requests with
two tokens or more; ITL = every gap between two tokens of a request (tokens that came together are 0 apart).
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.metrics import StepRecord

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request of a run. `token_times_s` has one time for each output token; `failed` requests have none."""

    prompt_len: int
    arrival_s: float
    token_times_s: Sequence[float] = ()
    failed: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2el_s(self) -> float:
        return self.token_times_s[-1] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """0 for a single token."""
        gaps = len(self.token_times_s) - 1
        return (self.e2el_s - self.ttft_s) / gaps if gaps else 0.0

    @property
    def itls_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as `numpy.percentile`; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float], name: str, percents: Sequence[float] = (99,)) -> dict[str, float]:
    """`{"mean_NAME": ..., "median_NAME": ..., "std_NAME": ..., "p99_NAME": ...}`; std is the population's."""
    found = {
        f"mean_{name}": statistics.fmean(values) if values else math.nan,
        f"median_{name}": percentile(values, 50),
        f"std_{name}": statistics.pstdev(values) if values else math.nan,
    }
    return found | {f"p{percent:g}_{name}": percentile(values, percent) for percent in percents}


def samples_ms(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """All values of each metric in milliseconds, of the requests that completed."""
    done = [r for r in records if not r.failed]
    seconds = {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done if len(r.token_times_s) > 1],
        "itl": [gap for r in done for gap in r.itls_s],
        "e2el": [r.e2el_s for r in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def summary(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    percents: Sequence[float] = (99,),
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The result of a run under the field names of `vllm bench serve`.

    Rates are per second of `duration_s`. With `goodput_ms` (`{"ttft": 200}`), `request_goodput` is the rate and
    `goodput_attainment` the share of requests that completed and met every limit.
    """
    done = [r for r in records if not r.failed]
    tokens_in = sum(r.prompt_len for r in done)
    tokens_out = sum(len(r.token_times_s) for r in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration_s,
        "output_throughput": tokens_out / duration_s,
        "total_token_throughput": (tokens_in + tokens_out) / duration_s,
        "max_output_tokens_per_s": max_tokens_per_s(done),
        "max_concurrent_requests": max_concurrent(done),
    }
    if goodput_ms:
        good = sum(meets(r, goodput_ms) for r in done)
        result |= {"request_goodput": good / duration_s, "goodput_attainment": good / len(records)}
    for name, values in samples_ms(done).items():
        result |= spread(values, f"{name}_ms", percents)
    return result


def experts_read(steps: "Iterable[StepRecord]", num_requests: int) -> dict[str, float]:
    """The fields of a run's result on the weights of experts that its steps have read; none for a dense model."""
    num_bytes = [step.expert_bytes for step in steps]
    if not sum(num_bytes) or not num_requests:
        return {}
    return {
        "expert_bytes_per_step": statistics.fmean(num_bytes),
        "expert_bytes_per_request": sum(num_bytes) / num_requests,
    }


def meets(record: RequestRecord, goodput_ms: Mapping[str, float]) -> bool:
    """True where every named metric is at most its limit."""
    return all(1e3 * getattr(record, f"{name}_s") <= limit for name, limit in goodput_ms.items())


def max_concurrent(records: Iterable[RequestRecord]) -> int:
    """Most requests that had arrived and not finished at one moment; one ending as another comes is not beside it."""
    changes = sorted((time, step) for r in records for time, step in ((r.arrival_s, 1), (r.token_times_s[-1], -1)))
    running = most = 0
    for _, step in changes:
        running += step
        most = max(most, running)
    return most


def max_tokens_per_s(records: Iterable[RequestRecord]) -> int:
    """Output tokens of the busiest whole second of the run."""
    seconds: dict[int, int] = {}
    for record in records:
        for time in record.token_times_s:
            seconds[int(time)] = seconds.get(int(time), 0) + 1
    return max(seconds.values(), default=0)


def parse_percentiles(text: str) -> list[float]:
    """`"50,99.9"` -> `[50.0, 99.9]`.

    Raises:
        ValueError: not numbers in [0, 100], separated by commas.
    """
    try:
        percents = [float(percent) for percent in text.split(",")]
    except ValueError:
        percents = [math.nan]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ValueError(f"--metric-percentiles must be numbers in [0, 100], separated by commas, got {text!r}")
    return percents


def parse_goodput(limits: Iterable[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` -> `{"ttft": 200.0, "tpot": 50.0}`, in milliseconds.

    Raises:
        ValueError: not NAME:MS, an unknown or repeated NAME, or MS not above 0.
    """
    found: dict[str, float] = {}
    for limit in limits:
        name, _, text = limit.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in GOODPUT_METRICS or name in found or not 0 < value < math.inf:
            raise ValueError(
                f"goodput must be NAME:MS with each NAME ({', '.join(GOODPUT_METRICS)}) at most once and MS above 0, "
                f"got {limit!r}"
            )
        found[name] = value
    return found

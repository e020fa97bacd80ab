"""What the scheduler tells metrics."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics, under vLLM's names; the last three count since the start."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float  # held pages / usable pages, 0 to 1
    num_preemptions: int
    prefix_cache_queries: int  # tokens looked up at first admissions
    prefix_cache_hits: int  # tokens found then

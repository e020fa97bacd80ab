"""Scheduling in plain Python: no jax, no numpy, no I/O, no clock."""

from jaxserve.scheduler.chunked import ChunkedPrefill
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.layered import LayeredPrefill, prefill_policy
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.plan import Cohort, DecodeRow, PageUpdate, PrefillRow, RequestUpdate, StepPlan, StepResult
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.request import PoolTooSmall, QueueFull, Request, Status
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.stats import SchedulerStats

__all__ = [
    "ChunkedPrefill",
    "Cohort",
    "DecodeRow",
    "LayeredPrefill",
    "PagePool",
    "PageUpdate",
    "PoolTooSmall",
    "PrefillRow",
    "PrefixCache",
    "QueueFull",
    "Request",
    "RequestUpdate",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Status",
    "StepPlan",
    "StepResult",
    "prefill_policy",
]

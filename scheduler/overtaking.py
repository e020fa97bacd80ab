"""Who goes first among prompts that wait and cohorts that are between two groups of layers.

Every step ends at the border of a group, so a cohort may stop there, leave its rows on the device as they are, and go
on later. An order ranks jobs; the lowest goes first, and a cohort in flight goes on unless another job ranks lower.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

AGING = 10_000  # a second of waiting counts as much as so many tokens fewer


class Job(NamedTuple):
    """A prompt that has not begun, or a cohort in flight: then the best of what its members have."""

    priority: int  # lower goes first; 0 unless the scheduler's policy is "priority"
    arrival_time: float
    deadline: float  # infinite where there is none
    num_tokens: float  # left to compute, each counting by the share of the layers that it has yet to pass


Rank = tuple[float, ...]


class Order(NamedTuple):
    """Args:
    rank: of a job, now, and the seconds that a token takes.
    overtakes: jobs of one priority overtake each other; then, too, who joins a cohort may not make it take longer.
    """

    rank: Callable[[Job, float, float], Rank]
    overtakes: bool = True


def fcfs(job: Job, now: float, token_s: float) -> Rank:
    """All are equal, and among equals the cohort in flight goes first, then who came first."""
    return (job.priority,)


def shortest(job: Job, now: float, token_s: float) -> Rank:
    """The least left to do, with aging: what waits long enough is overtaken by nobody who came after it."""
    return job.priority, job.num_tokens + AGING * job.arrival_time


def slack(job: Job, now: float, token_s: float) -> Rank:
    """The earliest deadline that can still be met; who cannot meet theirs goes last (FlowPrefill, arXiv 2602.16603).

    Who has none goes after all who can still meet theirs, in the order of arrival.
    """
    is_late = job.deadline < math.inf and now + job.num_tokens * token_s > job.deadline
    return job.priority, is_late, job.deadline, job.arrival_time


ORDERS = {"fcfs": Order(fcfs, overtakes=False), "shortest": Order(shortest), "slack": Order(slack)}

"""One sequence on its way through the engine."""

import dataclasses
import enum


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence. The first block is given at arrival; the rest is the scheduler's own and changes only there.

    There are no phases: each step moves `num_computed_tokens` towards `num_tokens`.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # stop ids that are reported as stop_reason
    eos_token_ids: frozenset[int] = frozenset()  # end of sequence: stop_reason None; empty under ignore_eos
    priority: int = 0  # lower goes first
    arrival_time: float = 0.0
    deadline: float | None = None  # on the clock of `now`; later than this the request ends as "abort"
    cache_salt: str | None = None
    adapter: str | None = None
    skip_reading_prefix_cache: bool = False
    leader: "Request | None" = None  # n > 1: wait for the leader's published prompt pages
    sampling: object = None  # the runner's business

    status: Status = Status.WAITING
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose KV is written or in flight
    num_in_flight: int = 0  # sampled tokens that the device has and the host does not know yet
    num_cached_tokens: int = 0  # prefix hit at first admission
    epoch: int = 0
    slot: int = -1
    page_ids: list[int] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

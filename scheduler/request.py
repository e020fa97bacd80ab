"""One sequence on its way through the engine."""

import dataclasses
import enum
import sys
from typing import Any


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class PoolTooSmall(ValueError):
    """The prompt is larger than the whole page pool: it could wait for ever."""


class QueueFull(Exception):
    """The waiting queue is at its limit; try again later."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence. The first block is given at arrival; the rest is the scheduler's own and changes only there.

    There are no phases: each step moves `num_computed_tokens` towards `num_tokens`. `epoch` counts how often results of
    plans in flight became void (pre-emption, end): a commit takes only rows of the present epoch.
    """

    request_id: Any  # the caller's name for it; unread here
    prompt_token_ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # stop ids that are reported as stop_reason
    eos_token_ids: frozenset[int] = frozenset()  # end of sequence: stop_reason None; empty under ignore_eos
    arrival_time: float = 0.0  # on the clock of `now`
    priority: int = 0  # lower goes first
    deadline: float | None = None  # on the clock of `now`; later than this the request ends as "abort"
    cache_salt: str | None = None
    adapter: str | None = None
    skip_reading_prefix_cache: bool = False
    leader: "Request | None" = None  # n > 1: wait for the leader's published prompt pages
    held: bool = False  # waits, without standing in anybody's way, until `Scheduler.release`
    sampling: Any = None  # the runner's business

    # What the engine and the runner may read.
    status: Status = Status.WAITING
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose KV is written in all layers, or will be by steps in flight
    num_in_flight: int = 0  # sampled tokens that the device has and the host does not know yet
    num_cached_tokens: int = 0  # prefix hit at first admission
    epoch: int = 0
    slot: int = -1
    page_ids: list[int] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    # The scheduler's book-keeping, of no interest to others.
    num_prompt_tokens: int = dataclasses.field(init=False)
    order: tuple[int, int] = (0, 0)  # (priority, arrival number): low is served first, high is pre-empted first
    stops: dict[int, int | None] = dataclasses.field(init=False)  # token that ends the request -> stop_reason
    max_output_tokens: int = 0  # max_tokens, cut by max_model_len and the pool
    max_computed_tokens: int = 0  # the last output token is never computed
    capacity: int = 0  # tokens that page_ids hold
    pages_by_rank: list[int] = dataclasses.field(default_factory=list)
    last_step: int = 0  # the last step whose plan names this request
    page_keys: list[bytes] = dataclasses.field(default_factory=list)  # chained keys of full pages; outlive pre-emption
    num_published_pages: int = 0
    publish_at: int = sys.maxsize  # committed tokens at which the next page is full

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.stops = {token: token for token in self.stop_token_ids} | dict.fromkeys(self.eos_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    def set_limits(self, max_model_len: int, pool_len: int) -> None:
        """Cuts the output to what `max_model_len` and a pool of `pool_len` tokens can hold.

        Raises:
            ValueError: the prompt is empty or not shorter than `max_model_len`.
            PoolTooSmall: the prompt is larger than the pool.
        """
        num_prompt = self.num_prompt_tokens
        if not num_prompt:
            raise ValueError("prompt_token_ids must have at least one token, got none")
        if num_prompt >= max_model_len:
            raise ValueError(
                f"the prompt must be shorter than max_model_len {max_model_len} to leave room for one token, "
                f"got {num_prompt} tokens; shorten it or raise max_model_len"
            )
        if num_prompt > pool_len:
            raise PoolTooSmall(
                f"the prompt must fit the KV pool of {pool_len} tokens, got {num_prompt} tokens; shorten it or "
                f"enlarge the pool"
            )
        # The last token is never computed, so a request may grow one token beyond the pool; there it ends as "length".
        self.max_output_tokens = min(self.max_tokens, max_model_len - num_prompt, pool_len + 1 - num_prompt)
        self.max_computed_tokens = num_prompt + self.max_output_tokens - 1

    def token_slice(self, start: int, end: int) -> list[int]:
        """Tokens `[start, end)` of prompt and committed output, without building the whole."""
        cut = self.num_prompt_tokens
        if end <= cut:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(start - cut, 0) : end - cut]
        return self.prompt_token_ids[start:] + outputs if start < cut else outputs

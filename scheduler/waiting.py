"""The requests that have no slot yet."""

import bisect
import operator

from jaxserve.scheduler.request import QueueFull, Request

_ORDER = operator.attrgetter("order")


class WaitingQueue:
    """Waiting requests in their order. Followers of a leader stand aside until they are called, held requests until
    they are released.

    Pre-empted requests come back at their old place, which is in front of all that arrived after them.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._queue: list[Request] = []
        self._followers: dict[Request, list[Request]] = {}
        self._num_followers = 0
        self._held: dict[Request, None] = {}
        self._num_tokens = 0  # prompt tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._queue) + self._num_followers + len(self._held)

    def __iter__(self):
        yield from self._queue
        yield from self._held
        for followers in self._followers.values():
            yield from followers

    def check_room(self, request: Request) -> None:
        """Raises QueueFull if `request` would exceed a queue limit."""
        if self.max_requests is not None and len(self) >= self.max_requests:
            raise QueueFull(f"max_num_queued_reqs is {self.max_requests} and as many requests wait; try again later")
        num_tokens = self._num_tokens + request.num_prompt_tokens
        if (
            self.max_tokens is not None and num_tokens > self.max_tokens and len(self)
        ):  # an empty queue takes any prompt
            raise QueueFull(
                f"max_num_queued_tokens is {self.max_tokens}, {self._num_tokens} wait and this prompt has "
                f"{request.num_prompt_tokens}; try again later"
            )

    def first(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def head(self, count: int) -> list[Request]:
        return self._queue[:count]

    def push(self, request: Request) -> None:
        self._place(request)
        self._num_tokens += request.num_prompt_tokens

    def _place(self, request: Request) -> None:
        if request.held:
            self._held[request] = None
        else:
            bisect.insort(self._queue, request, key=_ORDER)

    def release(self, request: Request) -> None:
        """Nothing holds `request` any more but, maybe, its leader."""
        request.held = False
        if request in self._held:
            del self._held[request]
            self._place(request)

    def push_follower(self, request: Request, leader: Request) -> None:
        self._followers.setdefault(leader, []).append(request)
        self._num_followers += 1
        self._num_tokens += request.num_prompt_tokens

    def call_followers(self, leader: Request) -> None:
        """The leader's prompt is published, or the leader ended: nothing is left to wait for."""
        for request in self._followers.pop(leader, ()):
            request.leader = None
            self._place(request)
            self._num_followers -= 1

    def remove(self, request: Request) -> None:
        self._num_tokens -= request.num_prompt_tokens
        if request in self._held:
            del self._held[request]
            return
        if request.leader is None:
            index = bisect.bisect_left(self._queue, request.order, key=_ORDER)
            assert self._queue[index] is request
            del self._queue[index]
            return
        followers = self._followers[request.leader]
        followers.remove(request)
        self._num_followers -= 1
        if not followers:
            del self._followers[request.leader]
        request.leader = None

"""Prefix-aware routing: requests that begin alike go to the replica that has that beginning in its prefix cache."""

import collections
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

CHUNK = 256  # characters or tokens


class PrefixHomes[Replica]:
    """Which replica served which beginning last. Beginnings are whole chunks; the least recently used are forgotten."""

    def __init__(self, capacity: int = 100_000):
        self._capacity = capacity
        self._homes: collections.OrderedDict[bytes, Replica] = collections.OrderedDict()

    def order(self, prompt: str | Sequence[int], loads: Mapping[Replica, int], max_imbalance: int) -> list[Replica]:
        """The replicas, the best first: the home of the longest known beginning, unless it has over `max_imbalance`
        requests more than the least loaded one; the others by load."""
        by_load = sorted(loads, key=lambda replica: loads[replica])
        for key in reversed(list(beginnings(prompt))):
            home = self._homes.get(key)
            if home is not None and home in loads:
                if loads[home] - loads[by_load[0]] <= max_imbalance:
                    return [home, *(replica for replica in by_load if replica != home)]
                break
        return by_load

    def record(self, prompt: str | Sequence[int], replica: Replica) -> None:
        for key in beginnings(prompt):
            self._homes[key] = replica
            self._homes.move_to_end(key)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)


def beginnings(prompt: str | Sequence[int]) -> Iterator[bytes]:
    """A key for the first chunk, the first two, and so on; the rest of the prompt has none. A prompt shorter than one
    chunk counts as a chunk."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, max(len(prompt) - CHUNK, 0) + 1, CHUNK):
        digest.update(repr(prompt[start : start + CHUNK]).encode())
        yield digest.copy().digest()


class PrefixRouter(RequestRouter):
    """Ray Serve's router for `Engine.generate(prompt, ...)`. Each front end keeps its own `PrefixHomes`."""

    def initialize_state(self, max_imbalance: int = 16) -> None:
        self._max_imbalance = max_imbalance
        self._homes: PrefixHomes[ReplicaID] = PrefixHomes()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the first choice first."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {replica_id: self.replica_queue_len_cache.get(replica_id) or 0 for replica_id in replicas}
        prompt = "" if pending_request is None else _prompt(pending_request)
        order = self._homes.order(prompt, loads, self._max_imbalance)
        if order:
            self._homes.record(prompt, order[0])  # at once, so that a burst of like requests stays together
        return [[replicas[replica_id]] for replica_id in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._homes.record(_prompt(pending_request), replica_id)


def _prompt(request: PendingRequest) -> str | Sequence[int]:
    return request.args[0] if request.args else ""

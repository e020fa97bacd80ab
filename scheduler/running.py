"""The requests that hold a slot."""

from jaxserve.scheduler.plan import DecodeRow
from jaxserve.scheduler.request import Request


class RunningSet:
    """Slots, and the running requests by what they do next. Both dicts are in order, first served first.

    Each maps a request to the one decode row that it uses for as long as it keeps its slot.
    """

    def __init__(self, max_num_seqs: int):
        self.decoding: dict[Request, DecodeRow] = {}  # all known tokens are computed or in flight
        self.prefilling: dict[Request, DecodeRow] = {}  # known tokens are left to compute
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self):
        yield from self.decoding
        yield from self.prefilling

    def start(self, request: Request) -> None:
        """Gives a free slot.

        It may have an owner of before with a row in flight. That is safe: the device runs that row before it reads the
        new owner's state, and results are told apart by epoch, not by slot.
        """
        request.slot = self.free_slots.pop()
        _insert(self.prefilling, request, DecodeRow(request, request.epoch, request.slot))

    def start_decoding(self, request: Request) -> None:
        _insert(self.decoding, request, self.prefilling.pop(request))

    def stop(self, request: Request) -> None:
        """Takes the slot back."""
        del (self.decoding if request in self.decoding else self.prefilling)[request]
        self.free_slots.append(request.slot)
        request.slot = -1

    def row(self, request: Request) -> DecodeRow:
        return self.decoding.get(request) or self.prefilling[request]

    def last(self) -> Request:
        ends = [next(reversed(rows)) for rows in (self.decoding, self.prefilling) if rows]
        return max(ends, key=lambda request: request.order)


def _insert(rows: dict[Request, DecodeRow], request: Request, row: DecodeRow) -> None:
    in_order = not rows or next(reversed(rows)).order < request.order
    rows[request] = row
    if not in_order:  # rare: requests mostly come in order
        ordered = sorted(rows.items(), key=lambda item: item[0].order)
        rows.clear()
        rows.update(ordered)

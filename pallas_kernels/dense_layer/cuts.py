"""How a matmul is cut into units of work for the multiprocessors."""

import dataclasses
import functools
from typing import Any

MAX_ROWS = 16  # with more, the rows that every unit reads again take longer than what one kernel for all saves
BLOCK = 128  # inputs of a unit that are fetched at a time
MAX_WIDTH = 64  # columns of one half of a tile
MAX_SPLITS = 8
VECTOR = 512  # columns that a warpgroup adds up at a time, four a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Tiles of two halves of `width` columns, times `splits` equal ranges of the inputs.

    The halves are neighbours, or, if `gated`, gate and up of the same columns: twice `outputs` rows of weights.
    """

    inputs: int
    outputs: int
    width: int
    splits: int = 1
    gated: bool = False

    @property
    def units(self) -> int:
        return self.outputs // (self.width if self.gated else 2 * self.width) * self.splits

    def columns(self, tile: Any) -> tuple[Any, Any]:
        """First rows of the weights of a tile's halves."""
        if self.gated:
            return tile * self.width, self.outputs + tile * self.width
        return tile * 2 * self.width, (tile * 2 + 1) * self.width

    def turns(self, workers: int) -> int:
        """Units of the worker that has most."""
        return -(-self.units // workers)

    def time(self, workers: int) -> int:
        """Of that worker, in numbers of weights."""
        blocks = -(-self.inputs // BLOCK // self.splits)
        return self.turns(workers) * blocks * BLOCK * 2 * self.width


@functools.cache
def cut(inputs: int, outputs: int, workers: int, *, gated: bool = False) -> Cut | None:
    """The cut whose slowest worker is fastest, among equals the one with fewest and then widest units; None: none fits.

    What is gated is not split, since the activation needs whole sums.
    """
    if inputs % BLOCK:
        return None
    found = [
        Cut(inputs=inputs, outputs=outputs, width=width, splits=splits, gated=gated)
        for width in range(8, MAX_WIDTH + 1, 8)
        for splits in range(1, 1 if gated else MAX_SPLITS + 1) or (1,)
        if outputs % (width if gated else 2 * width) == 0 and splits <= inputs // BLOCK
    ]
    return min(found, key=lambda each: (each.time(workers), each.turns(workers), -each.width), default=None)


def chunk(num_rows: int, columns: int, workers: int) -> int:
    """Columns of a row that one worker adds up: as few as give no worker two such chunks, or else all."""
    sizes = [size for size in range(VECTOR, columns + 1, VECTOR) if columns % size == 0]
    return next((size for size in sizes if num_rows * columns // size <= workers), columns)

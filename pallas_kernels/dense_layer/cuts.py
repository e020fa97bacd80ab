"""How a matmul is cut into units of work for the multiprocessors."""

import dataclasses
import functools
from typing import Any

MAX_ROWS = 16  # with more, the rows that every unit reads again take longer than what one kernel for all saves
BLOCK = 128  # inputs of a unit that are fetched at a time
WIDTHS = range(32, 65, 8)  # columns of one half of a tile; narrower ones would read the rows too often
MAX_SPLITS = 8
VECTOR = 512  # columns that a warpgroup adds up at a time, four a thread


def fits_rows(num_rows: int) -> bool:
    """Whether a step of so many rows is one for this kernel."""
    return num_rows % 8 == 0 and 0 < num_rows <= MAX_ROWS


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
        """Most units that one worker has."""
        return -(-self.units // workers)

    def time(self, workers: int) -> int:
        """Weights that the slowest worker reads."""
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
        for width in WIDTHS
        for splits in ((1,) if gated else range(1, MAX_SPLITS + 1))
        if outputs % (width if gated else 2 * width) == 0 and splits <= inputs // BLOCK
    ]
    return min(found, key=lambda each: (each.time(workers), each.turns(workers), -each.width), default=None)


def chunk(num_rows: int, columns: int, workers: int) -> int:
    """As few columns as leave each worker at most one chunk of all rows; else whole rows."""
    sizes = [size for size in range(VECTOR, columns + 1, VECTOR) if columns % size == 0]
    return next((size for size in sizes if num_rows * columns // size <= workers), columns)

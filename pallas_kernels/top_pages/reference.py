"""The definition, one row at a time. Slow; the truth that tests compare with."""

import numpy as np
from jax import Array


def top_pages(scores: Array, num_pages: Array, most: int) -> np.ndarray:
    """The last page and the `most - 1` with the largest scores before it, of equal ones the first.

    Ascending, then -1.
    """
    values = np.asarray(scores)
    numbers = np.full((*values.shape[:2], most), -1)
    for row, n in enumerate(np.asarray(num_pages).tolist()):
        for head in range(values.shape[1]) if n else ():
            best = sorted(range(n - 1), key=lambda page: (-values[row, head, page], page))[: most - 1]
            found = [*sorted(best), n - 1]
            numbers[row, head, : len(found)] = found
    return numbers

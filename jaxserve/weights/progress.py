"""The progress bar of a load."""

import sys
from collections.abc import Iterable, Iterator

_WORTH_SHOWING_BYTES = 1 << 30  # smaller models load in a second or two


def with_progress[T](items: Iterable[T], description: str, *, num_items: int, total_bytes: int) -> Iterator[T]:
    """The items, with a bar on stderr that goes away at the end; none for small loads or where nobody looks."""
    if total_bytes < _WORTH_SHOWING_BYTES or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, num_items, console=Console(stderr=True), transient=True)

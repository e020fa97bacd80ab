"""The progress bar of a load."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Progress = Callable[..., Iterable[Any]]  # (items, total_bytes=...) -> the same items

_WORTH_SHOWING_BYTES = 1 << 30  # less loads in a second or two


def no_progress(items: Iterable[Any], *, total_bytes: int) -> Iterable[Any]:
    return items


def bar(description: str) -> Progress:
    """A bar on stderr that goes away when done; none for small loads or where stderr is not a terminal."""

    def progress(items: list[Any], *, total_bytes: int) -> Iterator[Any]:
        if total_bytes < _WORTH_SHOWING_BYTES or not sys.stderr.isatty():
            yield from items
            return
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description, console=Console(stderr=True), transient=True)

    return progress

"""How commands show a result: JSON for programs, a table for people."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def show(result: Mapping[str, Any], title: str, *, as_json: bool, file: Path | None = None) -> None:
    """Prints `result` as one JSON object or as a table of its single values; `file` gets the JSON in either case."""
    text = json.dumps(_without_nan(result), indent=2, ensure_ascii=False)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text, flush=True)
    else:
        table(_flat(result), title)


def require_writable(file: Path | None) -> None:
    """Raises OSError where `file` cannot be written, before a long run for it. Leaves the file as it was."""
    if file is None:
        return
    existed = file.exists()
    file.open("ab").close()
    if not existed:
        file.unlink()


def table(rows: Mapping[str, Any], title: str) -> None:
    """Prints a two-column table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", show_header=False)
    grid.add_column(style="bold")
    grid.add_column(justify="left" if any(isinstance(value, str) for value in rows.values()) else "right")
    for name, value in rows.items():
        grid.add_row(name, readable(value))
    Console().print(grid)


def progress(*columns: "ProgressColumn") -> "Progress":
    """A progress display on stderr; writes nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def readable(value: object) -> str:
    """A value for people: thousands separated, four significant digits, "-" for what is not there."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """Single values only: those of an inner mapping carry its name before theirs, lists are left to the JSON."""
    rows: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            rows |= {f"{name} {inner}": inner_value for inner, inner_value in _flat(value).items()}
        elif not isinstance(value, list):
            rows[name] = value
    return rows


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null takes its place."""
    if isinstance(value, Mapping):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

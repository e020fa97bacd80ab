"""How every benchmark reports: a table for people, then one line of JSON a row for machines."""

import dataclasses
import datetime
import json
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `peer` is what a peer, named in `name` or the benchmark's text, reached on the same work."""

    name: str
    value: float
    unit: str
    target: float | None = None  # the must: of `ratio` where there is a peer, else of `value`; None = nothing to reach
    peer: float | None = None
    stretch: float | None = None  # likewise
    lower_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer: above 1 is ahead."""
        if self.peer is None:
            return None
        return self.peer / self.value if self.lower_is_better else self.value / self.peer

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        if self.ratio is not None:
            return bool(self.ratio >= self.target)
        return bool(self.value <= self.target if self.lower_is_better else self.value >= self.target)

    def as_dict(self) -> dict[str, object]:
        names = ("name", "value", "unit", "peer", "ratio", "target", "met", "stretch")
        return {name: _rounded(getattr(self, name)) for name in names}


def report(rows: list[Row], *, title: str = "", save: Path | None = None) -> None:
    """Prints the table, then the lines of JSON; `save` is a file for these, after a line on what they were measured."""
    table = Table("name", "value", "unit", "peer", "ratio", "target", "met", "stretch", title=title)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.as_dict().values()))
    Console(width=140).print(table)
    lines = [json.dumps(row.as_dict()) for row in rows]
    print(*lines, sep="\n")
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text("\n".join([json.dumps(_setting()), *lines]) + "\n", encoding="utf-8")


def _setting() -> dict[str, str]:
    card = jax.devices()[0].device_kind
    return {"card": card, "jax": jax.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value

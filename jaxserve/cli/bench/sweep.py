"""The highest request rate at which enough requests stay within their limits."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.bench.metrics import summary
from jaxserve.cli.bench.plot import pyplot

if TYPE_CHECKING:
    from jaxserve.cli.bench.serve import Run

ATTAINMENT = 0.9  # the share of requests that must be good
PRECISION = 1.1  # the lowest rate that was too high, over the highest that was not
MOST_STEPS = 10  # doublings, or halvings, of the first rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep; times are milliseconds."""

    request_rate: float
    goodput_attainment: float
    request_throughput: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_itl_ms: float
    p99_itl_ms: float


def point(run: "Run", request_rate: float, limits_ms: Mapping[str, float]) -> Point:
    result = summary(run.records, run.duration_s, goodput_ms=limits_ms)
    return Point(
        request_rate=request_rate,
        **{field.name: result[field.name] for field in dataclasses.fields(Point) if field.name != "request_rate"},
    )


def sweep(measure: Callable[[float], Point], first_rate: float) -> list[Point]:
    """Points at doubled or halved rates until one is good enough and the next is not, then between the two.

    A rate is good enough if ATTAINMENT of its requests are. The last points are PRECISION apart, unless MOST_STEPS
    doublings found none that was too high, or as many halvings none that was good enough.
    """
    points = [measure(first_rate)]
    factor = 2.0 if _is_good(points[0]) else 0.5
    for _ in range(MOST_STEPS):
        points.append(measure(points[-1].request_rate * factor))
        if _is_good(points[-1]) != _is_good(points[0]):
            break
    while (low := highest_rate(points)) and (high := _lowest_bad(points)) and high > PRECISION * low:
        points.append(measure((low * high) ** 0.5))
    return sorted(points, key=lambda each: each.request_rate)


def _is_good(each: Point) -> bool:
    return each.goodput_attainment >= ATTAINMENT


def highest_rate(points: Sequence[Point]) -> float:
    """The highest rate below which all that were tried are good enough; 0 if there is none."""
    bad = _lowest_bad(points)
    return max((p.request_rate for p in points if bad is None or p.request_rate < bad), default=0.0)


def _lowest_bad(points: Sequence[Point]) -> float | None:
    return min((each.request_rate for each in points if not _is_good(each)), default=None)


def result(points: Sequence[Point]) -> dict[str, Any]:
    """What `bench serve --sweep-rate` reports."""
    return {
        "max_request_rate": highest_rate(points),
        "goodput_attainment_asked": ATTAINMENT,
        "sweep": [dataclasses.asdict(each) for each in points],
    }


def print_points(points: Sequence[Point]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*(field.name for field in dataclasses.fields(Point)), title="sweep", title_justify="left")
    for each in points:
        table.add_row(*(f"{value:.4g}" for value in dataclasses.astuple(each)))
    Console().print(table)


def draw_front(points: Sequence[Point], file: Path) -> None:
    """TTFT against the time between tokens, a point a rate."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
    axes.plot([p.mean_ttft_ms for p in points], [p.p99_itl_ms for p in points], color="tab:gray", zorder=1)
    for good, color in ((True, "tab:green"), (False, "tab:red")):
        some = [p for p in points if _is_good(p) == good]
        label = f"{'at least' if good else 'less than'} {ATTAINMENT:.0%} within the limits"
        axes.scatter([p.mean_ttft_ms for p in some], [p.p99_itl_ms for p in some], color=color, label=label, zorder=2)
    for p in points:
        axes.annotate(f" {p.request_rate:.3g}/s", (p.mean_ttft_ms, p.p99_itl_ms))
    axes.set(xlabel="mean time to first token, ms", ylabel="p99 time between tokens, ms", xscale="log")
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)

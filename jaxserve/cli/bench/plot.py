"""A picture of a serving benchmark: how the times are spread, and what the steps did."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.bench.metrics import METRICS, samples_ms
from jaxserve.cli.output import require_writable
from jaxserve.exceptions import how_to_install

if TYPE_CHECKING:
    from jaxserve.cli.bench.serve import Run

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def require_drawable(file: Path) -> None:
    """Says before a run what would stop `draw` after it.

    Raises:
        ValueError: matplotlib is not installed, or draws no such file.
        OSError: the file cannot be written.
    """
    known = pyplot().Figure().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ValueError(f"--plot must end in one of {', '.join(f'.{ending}' for ending in sorted(known))}, got {file}")
    require_writable(file)


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"--plot needs matplotlib: {how_to_install('plot')}") from None
    matplotlib.use("agg")  # no screen
    from matplotlib import pyplot as plt

    return plt


def draw(run: "Run", file: Path, *, goodput_ms: Mapping[str, float]) -> None:
    """Writes the picture in the format of the file's ending (png, svg, pdf).

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, axes = plt.subplot_mosaic(
        [list(METRICS), ["steps"] * 4, ["layers"] * 4, ["load"] * 4],
        figsize=(14, 10),
        height_ratios=[3, 3, 1.5, 3],
        layout="constrained",
    )
    for name, values in samples_ms(run.records).items():
        _histogram(axes[name], TITLES[name], values, goodput_ms.get(name))
    _steps(axes["steps"], run)
    _layers(axes["layers"], run)
    _load(axes["load"], run)
    for name in ("layers", "load"):
        axes[name].sharex(axes["steps"])
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _histogram(axes: Any, title: str, values: list[float], limit: float | None) -> None:
    axes.hist(values, bins=40)
    if limit is not None:
        axes.axvline(limit, color="tab:red", label=f"limit {limit:g} ms")
        axes.legend()
    axes.set(title=title, xlabel="ms", ylabel="count")


def _steps(axes: Any, run: "Run") -> None:
    """Each step as a bar over the time it took, as high as it was long."""
    from matplotlib import colormaps

    computed = [step.num_decode_rows + step.num_prefill_tokens for step in run.steps]
    most = max(computed, default=0) or 1
    colors = [colormaps["viridis"](tokens / most) for tokens in computed]
    _bars(axes, run, [1e3 * step.duration_s for step in run.steps], color=colors)
    axes.set(title=f"steps (colour: tokens computed, dark 0 to bright {most})", ylabel="ms")


def _layers(axes: Any, run: "Run") -> None:
    """The layers that each step's prefill rows passed."""
    spans = [step.layer_hi - step.layer_lo for step in run.steps]
    _bars(axes, run, spans, bottom=[step.layer_lo for step in run.steps], color="tab:orange")
    axes.set(ylabel="layers of prefill")


def _bars(axes: Any, run: "Run", heights: Sequence[float], **look: Any) -> None:
    starts = [step.start_time - run.start_time for step in run.steps]
    axes.bar(starts, heights, width=[step.duration_s for step in run.steps], align="edge", **look)


def _load(axes: Any, run: "Run") -> None:
    """What was in the engine and in its steps."""
    starts = [step.start_time - run.start_time for step in run.steps]
    lines = {
        "requests running": [step.num_requests_running for step in run.steps],
        "requests waiting": [step.num_requests_waiting for step in run.steps],
        "decode rows": [step.num_decode_rows for step in run.steps],
    }
    for label, values in lines.items():
        axes.step(starts, values, where="post", label=label)
    axes.set(xlabel="s from the start of the run", ylabel="requests, rows")
    tokens = axes.twinx()  # hundreds, where the others are a few
    tokens.fill_between(
        starts, [step.num_prefill_tokens for step in run.steps], step="post", color="tab:orange", alpha=0.3
    )
    tokens.set(ylabel="prefill tokens (shaded)", ylim=(0, None))
    axes.legend()

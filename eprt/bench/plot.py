"""Pictures of a report, by matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eprt.bench.report import Report
from eprt.errors import ConfigError
from eprt.layer import PHASES
from eprt.rounding import ceil_div

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of each bench: what names a line, and what is drawn.
_LINES = {
    "dispatch": ("transport", "p50_us"),
    "experts": ("executor", "us"),
    "router": ("router", "us"),
    "step": ("path", "step_p50_us"),
    "placement": ("placement", "layer_p50_us"),
}
_FLOORS = ("dispatch", "experts", "router")
_REMEDY = "plots need matplotlib: pip install 'eprt[plot]'"


def plot(report: Report, path: Path) -> None:
    """Write a picture of any bench's report; the file's ending names the format (png, svg, pdf).

    Raises ConfigError if matplotlib is missing, or can't write such a file.
    """
    figure = draw(report)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def draw(report: Report) -> Figure:
    """The picture, not yet written. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(_REMEDY) from error
    panels = _layer_panels(report) if report.bench == "layer" else _line_panels(report)
    figure = Figure(
        figsize=(6.4 * max(1, min(2, len(panels))), 4.2 * max(1, ceil_div(len(panels), 2))), layout="constrained"
    )
    for index, (title, panel) in enumerate(panels):
        axes = figure.add_subplot(ceil_div(len(panels), 2), min(2, len(panels)), index + 1)
        axes.set_title(title, fontsize=10)
        panel(axes)
    return figure


def _layer_panels(report: Report) -> list[tuple[str, Any]]:
    """Phases stacked for each number of tokens, and the layer beside its peer."""
    rows = report.rows
    several = len({(row["shape"], row["pair"]) for row in rows}) > 1
    labels = [f"{row['tokens']}\n{row['shape']}\n{row['pair']}" if several else str(row["tokens"]) for row in rows]
    places = range(len(rows))

    def phases(axes: Any) -> None:
        floor = [0.0] * len(rows)
        for phase in PHASES:
            heights = [row[f"{phase}_p50_us"] for row in rows]
            axes.bar(places, heights, bottom=floor, label=phase)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
        _label_bars(axes, labels)

    def peers(axes: Any) -> None:
        for shift, name in ((-0.2, "layer"), (0.2, "by_hand")):
            axes.bar([p + shift for p in places], [row[f"{name}_p50_us"] for row in rows], 0.4, label=name)
        _label_bars(axes, labels)

    what = f"{rows[0]['shape']}, {rows[0]['ranks']} ranks, {rows[0]['pair']}" if rows else "nothing measured"
    return [(f"time of each phase, p50: {what}", phases), ("layer beside the same steps by hand, host time", peers)]


def _label_bars(axes: Any, labels: list[str]) -> None:
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("microseconds")
    axes.legend(fontsize=8)


def _line_panels(report: Report) -> list[tuple[str, Any]]:
    """Time against tokens, one line a transport, executor, router or way of stepping; dashed: the floor if there is
    one."""
    dispatch, step = report.bench == "dispatch", report.bench == "step"
    series, value = _LINES[report.bench]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report.rows:
        title = str(row["model"] if step else row.get("shape"))
        if dispatch:
            title = f"hidden {row['hidden']}, top-{row['top_k']}, {row['routing']}"
        groups.setdefault(title, []).append(row)

    def drawer(rows: list[dict[str, Any]]) -> Any:
        def draw(axes: Any) -> None:
            for name in dict.fromkeys(row[series] for row in rows):
                points = sorted((row["tokens"], row[value]) for row in rows if row[series] == name)
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            if report.bench in _FLOORS:
                floors = {row["tokens"]: _floor(row, dispatch) for row in rows}
                axes.plot(*zip(*sorted(floors.items()), strict=True), "k--", linewidth=1, label="floor")
            tokens = sorted({row["tokens"] for row in rows})
            axes.set_xscale("log", base=2)
            axes.set_xticks(tokens, [str(n) for n in tokens])
            axes.set_yscale("log")
            axes.set_ylim(
                bottom=min(row[value] for row in rows) / 2
            )  # of a small batch's floor there is nothing to see
            axes.grid(alpha=0.3)
            axes.set_xlabel("tokens in" if report.bench in ("experts", "router") else "tokens a rank")
            axes.set_ylabel("microseconds")
            axes.legend(fontsize=7)

        return draw

    return [(title, drawer(rows)) for title, rows in groups.items()]


def _floor(row: dict[str, Any], dispatch: bool) -> float:
    return row["floor_us"] if dispatch else max(row["weights_us"], row["flops_us"])

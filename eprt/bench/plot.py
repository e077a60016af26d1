"""Draws a report by matplotlib (extra `plot`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eprt.bench.report import Report
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.files import drawn, new_figure, write_whole
from eprt.layer import PHASES
from eprt.rounding import ceil_div

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# For each bench, the column that names a line and the column that is drawn.
_LINES = {
    "dispatch": ("transport", "p50_us"),
    "experts": ("executor", "us"),
    "router": ("router", "us"),
    "step": ("path", "step_p50_us"),
    "placement": ("placement", "layer_p50_us"),
    "plan": ("pair", "us"),
}


def plot(report: Report, path: Path) -> None:
    """Writes a picture of any bench's report; the file's ending names the format (png, svg, pdf).

    Raises ConfigError if matplotlib is missing, or knows no such format; OSError where the file can't be written.
    """
    write_whole(path, drawn(draw(report), path, "--plot "))


def draw(report: Report) -> Figure:
    """Returns the picture, not yet written. Raises ConfigError if matplotlib is missing."""
    panels = _layer_panels(report) if report.bench == "layer" else _line_panels(report)
    rows, columns = max(1, ceil_div(len(panels), 2)), max(1, min(2, len(panels)))
    figure = new_figure(6.4 * columns, 4.2 * rows)
    for index, (title, panel) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(title, fontsize=10)
        panel(axes)
    return figure


def _layer_panels(report: Report) -> list[tuple[str, Any]]:
    """Draws phases stacked for each number of tokens, and the layer beside the same steps called directly."""
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

    def direct(axes: Any) -> None:
        for shift, name, label in ((-0.2, "layer", "layer"), (0.2, "by_hand", "called directly")):
            axes.bar([p + shift for p in places], [row[f"{name}_p50_us"] for row in rows], 0.4, label=label)
        _label_bars(axes, labels)

    what = f"{rows[0]['shape']}, ranks: {rows[0]['ranks']}, {rows[0]['pair']}" if rows else "nothing measured"
    return [
        (f"time of each phase, p50: {what}", phases),
        ("the layer beside the same steps called directly, host time", direct),
    ]


def _label_bars(axes: Any, labels: list[str]) -> None:
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("microseconds")
    axes.legend(fontsize=8)


def _line_panels(report: Report) -> list[tuple[str, Any]]:
    """Draws time against tokens, a line for each transport, executor, router or way of stepping."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report.rows:
        title = str(row["model"] if report.bench == "step" else row.get("shape"))
        if report.bench == "dispatch":
            title = f"hidden {row['hidden']}, top-{row['top_k']}, {row['routing']}"
        groups.setdefault(title, []).append(row)

    return [(title, partial(_draw_lines, report.bench, rows)) for title, rows in groups.items()]


def _draw_lines(bench: str, rows: list[dict[str, Any]], axes: Any) -> None:
    for name, points in measured_lines(bench, rows).items():
        style = "k--" if name == "roofline" else "o-"
        axes.plot(*zip(*sorted(points.items()), strict=True), style, markersize=3, label=name)
    bounds = lower_bounds(bench, rows)
    for (number_format, points), style in zip(bounds.items(), ("--", ":", "-.") * len(bounds), strict=False):
        label = "lower bound" if len(bounds) == 1 else f"lower bound of {number_format} weights"
        axes.plot(*zip(*sorted(points.items()), strict=True), f"k{style}", linewidth=1, label=label)
    tokens, value = sorted({row["tokens"] for row in rows}), _LINES[bench][1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(row[value] for row in rows) / 2)  # a small batch's lower bound is near zero
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens of all ranks" if bench in ("experts", "router") else "tokens per rank")
    axes.set_ylabel("microseconds")
    axes.legend(fontsize=7)


def measured_lines(bench: str, rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns microseconds by tokens of each line of one panel, by a name that says whose code it is."""
    series, value = _LINES[bench]
    formats = {row.get("weight_format") for row in rows}
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        name = _whose(bench, row[series])
        name += f", {row['weight_format']} weights" if len(formats) > 1 else ""
        lines.setdefault(name, {})[row["tokens"]] = row[value]
    return lines


def _whose(bench: str, name: str) -> str:
    if bench == "router":
        return {"eprt": "eprt", "torch": "plain torch"}[name]
    ours = bench == "placement" or name in {"dispatch": DISPATCHERS, "experts": EXECUTORS}.get(bench, ())
    ours = ours or (bench == "step" and not name.startswith("transformers"))
    return f"eprt: {name}" if ours else name.replace(" by hand", " called directly")


def lower_bounds(bench: str, rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns microseconds by tokens that no kernel of one panel can beat, for each number format of the weights.

    Of the link's rate for dispatch; else of reading the weights and of multiplying, at the rates of the same run.
    """
    bounds: dict[str, dict[int, float]] = {}
    for row in rows if bench in ("dispatch", "experts", "router") else ():
        us = row["floor_us"] if bench == "dispatch" else max(row["weights_us"], row["flops_us"])
        of_format = bounds.setdefault(row.get("weight_format", ""), {})
        of_format[row["tokens"]] = min(us, of_format.get(row["tokens"], us))
    return bounds

"""Draws rooms.svg: a token's way through the four rooms of a layer. `python docs/figures/rooms.py` (extra `plot`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOMS = (
    ("route", "router logits ->\nK expert ids and weights,\nids become slots", "#e8eef7"),
    ("dispatch", "tokens travel to the ranks\nthat hold their experts", "#e7f3ea"),
    ("experts", "gate/up, activation, down:\none fused function", "#fbf0e0"),
    ("combine", "weighted sums travel back,\nsummed over ranks", "#f6e8ee"),
)
BETWEEN = ("TopK", "FlatTokens or\nExpertMajorTokens", "expert outputs,\none row a row")
BACKENDS = (
    "one kernel, or torch",
    "none  torch  symm\nflashinfer  deepep",
    "one row of the\nexecutor table",
    "as dispatch",
)


def draw() -> Figure:
    figure = Figure(figsize=(11, 3.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 110)
    axes.set_ylim(0, 33)
    axes.axis("off")
    for number, ((name, text, colour), backends) in enumerate(zip(ROOMS, BACKENDS, strict=True)):
        x = 4 + 27 * number
        box = FancyBboxPatch((x, 11), 19, 13, boxstyle="round,pad=0.6", facecolor=colour, edgecolor="#555555")
        axes.add_patch(box)
        axes.text(x + 9.5, 21.5, name, ha="center", fontsize=13, weight="bold")
        axes.text(x + 9.5, 15.4, text, ha="center", va="center", fontsize=8.5)
        axes.text(x + 9.5, 7.3, backends, ha="center", va="center", fontsize=8, color="#555555", family="monospace")
    for number, text in enumerate(BETWEEN):
        x = 23.8 + 27 * number
        axes.add_patch(
            FancyArrowPatch((x, 17.5), (x + 6.4, 17.5), arrowstyle="-|>", mutation_scale=14, color="#333333")
        )
        axes.text(x + 3.2, 25.6, text, ha="center", va="bottom", fontsize=8, style="italic")
    for start, end in (((0, 17.5), (3.2, 17.5)), ((104.8, 17.5), (109, 17.5))):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color="#333333"))
    axes.text(55, 30.6, "hidden states [T, H] of this rank, T >= 0, any T on any rank", ha="center", fontsize=9.5)
    axes.text(
        55,
        2.2,
        "R, the largest T of any rank, is agreed once a step for all layers; the shared expert sees its own tokens",
        ha="center",
        fontsize=8.5,
    )
    return figure


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "eprt"  # the same bytes each time
    mpl.rcParams["svg.fonttype"] = "none"
    draw().savefig(Path(__file__).with_name("rooms.svg"), metadata={"Date": None})

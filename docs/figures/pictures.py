"""Draws the pictures beside the tables, as `eprt bench --plot` draws them. Written by `python docs/figures/tables.py`.

A picture names its source, and the hash of what it shows, so that a test can tell an old one without drawing it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from tables import TRANSPORTS, result

from eprt.bench.plot import draw
from eprt.bench.report import Report

HERE = Path(__file__).parent


def _transports(row: dict[str, Any]) -> bool:
    return row["transport"] in TRANSPORTS.values() and row["routing"] == "uniform"


def _experts(row: dict[str, Any]) -> bool:
    return bool(row["local_rows"]) and row["shape"] in ("gpt-oss-120b", "qwen3-30b-a3b")


def _routers(row: dict[str, Any]) -> bool:
    return row["shape"] in ("gpt-oss-120b", "deepseek-v3")


# What of a result file is drawn.
PICTURES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "dispatch_h200_x2": _transports,
    "dispatch_h200_x4": _transports,
    "router_h200": _routers,
    "step_h200_x2": lambda row: row["model"] == "gpt-oss-120b",
    "experts_grouped_h200": _experts,
}


def report(name: str) -> Report:
    found = result(name)
    return Report(found["bench"], [row for row in found["rows"] if PICTURES[name](row)])


def shown(name: str) -> str:
    """The source and the hash of the rows, as the picture's metadata has them."""
    rows = json.dumps(report(name).rows, sort_keys=True)
    return f"benchmarks/results/{name}.json, rows {hashlib.sha256(rows.encode()).hexdigest()[:16]}"


def svg(name: str) -> bytes:
    """The same bytes each time, by one version of matplotlib."""
    with mpl.rc_context({"svg.hashsalt": "eprt", "svg.fonttype": "none"}):
        held = io.BytesIO()
        metadata = {"Date": None, "Source": shown(name)}
        draw(report(name)).savefig(held, format="svg", metadata=metadata)
    return b"\n".join(text.rstrip() for text in held.getvalue().splitlines()) + b"\n"


def write() -> None:
    for name in PICTURES:
        HERE.joinpath(f"{name}.svg").write_bytes(svg(name))

"""Draws the pictures beside the tables, as `eprt bench --plot` draws them. `python docs/figures/tables.py` runs it.

A picture names its sources and carries the hash of the rows it shows, so that a test can tell an old one without
drawing it.
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


# The rows of its result file that a picture draws.
PICTURES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "dispatch_h200_x2": _transports,
    "dispatch_h200_x4": _transports,
    "router_h200": _routers,
    "step_h200_x2": lambda row: row["model"] == "gpt-oss-120b",
    "experts_grouped_h200": _experts,
}
# Result files of the same machine and commit whose rows of other libraries stand in a picture, too.
BESIDE = {"experts_grouped_h200": ("experts_peers_h200", lambda row: row["executor"].startswith("vllm "))}


def report(name: str) -> Report:
    found = result(name)
    rows = [row for row in found["rows"] if PICTURES[name](row)]
    if name in BESIDE:
        other, wanted = BESIDE[name]
        rows += [row for row in result(other)["rows"] if PICTURES[name](row) and wanted(row)]
    return Report(found["bench"], rows)


def shown(name: str) -> str:
    """Returns the sources and the hash of the rows, as the picture's metadata has them."""
    rows = json.dumps(report(name).rows, sort_keys=True)
    files = [name, *BESIDE.get(name, ())[:1]]
    sources = ", ".join(f"benchmarks/results/{file}.json" for file in files)
    return f"{sources}, rows {hashlib.sha256(rows.encode()).hexdigest()[:16]}"


def svg(name: str) -> bytes:
    """Returns the same bytes each time, by one version of matplotlib."""
    with mpl.rc_context({"svg.hashsalt": "eprt", "svg.fonttype": "none"}):
        held = io.BytesIO()
        metadata = {"Date": None, "Source": shown(name)}
        draw(report(name)).savefig(held, format="svg", metadata=metadata)
    return b"\n".join(text.rstrip() for text in held.getvalue().splitlines()) + b"\n"


def write() -> None:
    for name in PICTURES:
        HERE.joinpath(f"{name}.svg").write_bytes(svg(name))

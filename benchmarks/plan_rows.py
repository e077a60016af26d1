"""Write the rows that the plan goes by, eprt/plan/measured.json, from the results that it names as its sources.

    python benchmarks/plan_rows.py

A dispatcher's row is its middle round under uniform routing, an executor's a call with bf16 activations and a local
row; `rows` and `hit` are how many it had, and of how many experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eprt.bench.shapes import SHAPES
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.plan.measured import sizes_of_experts

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
SM = 90
# Result file: the payload that a dispatcher's rows carry.
DISPATCH = {"dispatch_h200_x4": "bf16", "dispatch_h200_x2": "bf16", "dispatch_fp8_h200_x2": "fp8_block"}
EXPERTS = ("experts_grouped_h200", "experts_h200")
# Torch makes a chain of passes of its activation, which the plan's model has no term for.
LEFT_OUT = ("torch_grouped", "gpt-oss-120b")
Sized = Iterator[tuple[dict[str, Any], str, float]]  # what a row is of, whose time, microseconds


def dispatch(rows: list[dict[str, Any]], payload: str) -> Sized:
    for row in rows:
        if row["transport"] in DISPATCHERS and (row["routing"], row["payload"]) == ("uniform", payload):
            sizes = {name: row[name] for name in ("payload", "ranks", "hidden", "top_k", "tokens")}
            yield sizes, row["transport"], row["p50_us"]


def experts(rows: list[dict[str, Any]]) -> Sized:
    most: dict[tuple[str, str], float] = {}  # us to read the weights of all local experts, which the largest batch hits
    for row in rows:
        key = row["executor"], row["shape"]
        most[key] = max(most.get(key, 0.0), row["weights_us"])
    for row in rows:
        usual = row["local_rows"] and row.get("activations", "bf16") == "bf16"
        if usual and row["executor"] in EXECUTORS and (row["executor"], row["shape"]) != LEFT_OUT:
            shape = SHAPES[row["shape"]]
            local = shape.config.num_experts // shape.ep_size
            hit = round(local * row["weights_us"] / most[row["executor"], row["shape"]])
            drawn = {"tokens": row["tokens"], "rows": row["local_rows"], "hit": hit}
            yield sizes_of_experts(shape.config, local) | drawn, row["executor"], round(row["us"], 1)


def table(kind: str, file: str, found: Sized) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for sizes, name, us in found:
        rows.setdefault(json.dumps(sizes), {**sizes, "us": {}})["us"][name] = us
    return {"kind": kind, "sm": SM, "source": f"{RESULTS / file}.json", "rows": list(rows.values())}


def written(found: dict[str, Any]) -> str:
    """Returns a table with one row per line, as in a result file."""
    head = json.dumps(found | {"rows": []}).removesuffix("]}")
    rows = ",\n  ".join(map(json.dumps, found["rows"]))
    return f" {head}\n  {rows}\n ]}}"


def rows_of(file: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / RESULTS / f"{file}.json").read_text())["rows"]


def main() -> None:
    tables = [table("dispatch", file, dispatch(rows_of(file), payload)) for file, payload in DISPATCH.items()]
    tables += [table("experts", file, experts(rows_of(file))) for file in EXPERTS]
    (ROOT / "eprt/plan/measured.json").write_text("[\n" + ",\n".join(map(written, tables)) + "\n]\n")


if __name__ == "__main__":
    main()

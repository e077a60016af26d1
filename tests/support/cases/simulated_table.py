"""The table of docs/balance.md that `eprt bench dispatch --simulate` made for 64 ranks: from its result file.

`python tests/support/cases/simulated_table.py` writes it there; test_simulate.py compares. The command that made the
file is in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks/results/simulated_ep64.json"
PAGE = ROOT / "docs/balance.md"
BEGIN, END = (
    "<!-- simulated table: python tests/support/cases/simulated_table.py -->",
    "<!-- end of simulated table -->",
)
ROUTINGS = {"uniform": "uniform", "zipf:0.6:0": "Zipf 0.6", "zipf:1.1:0": "Zipf 1.1"}
TRANSPORTS = ("none", "torch", "deepep")


def table() -> str:
    """A line a routing, number of tokens and placement; the pairs side by side."""
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["rows"]
    found = {(r["routing"], r["tokens"], r["placement"], r["transport"]): r for r in rows}
    heading = ["routing", "tokens a rank", "experts lie", "max/mean"]
    heading += [f"`{name}`: MB in, hottest rank" for name in ("torch", "deepep")]
    heading += [f"`{name}`, us a layer" for name in TRANSPORTS]
    lines = [f"| {' | '.join(heading)} |", "|" + " --- |" * len(heading)]
    cases = dict.fromkeys(key[:3] for key in found)  # placements in the file's order
    for routing, tokens, placement in sorted(cases, key=lambda case: (list(ROUTINGS).index(case[0]), case[1])):
        here = [found[routing, tokens, placement, name] for name in TRANSPORTS]
        cells = [ROUTINGS[routing], str(tokens), placement, f"{here[0]['imbalance']:.2f}"]
        cells += [f"{row['hottest_mb']:.0f}" for row in here[1:]]
        cells += [f"{row['us']:,.0f}" for row in here]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def on_page() -> str:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")

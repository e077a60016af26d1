"""What dispatchers and executors were measured to take, kept as data: the plan's automatic choice follows it.

`measured.json` holds rows of `eprt bench dispatch` and `eprt bench experts`, with the machine and the result file they
come from. A row answers for the shapes nearest to it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from eprt.config import MoEConfig


@dataclass(frozen=True)
class Row:
    """One measured shape: microseconds by backend name, and words for `eprt explain`."""

    what: str
    microseconds: dict[str, float]
    source: str

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:g}" for name, us in sorted(self.microseconds.items(), key=lambda item: item[1]))
        return f"{self.what}: {times} us ({self.source})"


def dispatch_row(config: MoEConfig, tokens: int, ranks: int, sm: int, payload: str = "bf16") -> Row | None:
    """Dispatch + combine of the nearest measured (hidden, top-k, tokens a rank, ranks) on that generation of GPU, with
    tokens in that format if it was measured, else in bf16."""
    wanted = {"hidden": config.hidden_size, "top_k": config.top_k, "tokens": tokens, "ranks": ranks}
    found = _nearest("dispatch", sm, wanted, {"payload": payload}) or _nearest(
        "dispatch", sm, wanted, {"payload": "bf16"}
    )
    if found is None:
        return None
    row, source = found
    what = (
        f"dispatch + combine of {row['payload']} tokens at hidden {row['hidden']}, top-k {row['top_k']}, "
        f"{row['tokens']} tokens a rank, {row['ranks']} ranks"
    )
    return Row(what, row["us"], source)


def experts_row(config: MoEConfig, num_local_experts: int, tokens: int, sm: int) -> Row | None:
    """The experts of the nearest measured shape of the same weight format; `tokens` counts all ranks' tokens."""
    wanted = {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "top_k": config.top_k,
        "local_experts": num_local_experts,
        "tokens": tokens,
    }
    found = _nearest("experts", sm, wanted, {"weight_format": config.weight_format})
    if found is None:
        return None
    row, source = found
    what = (
        f"{row['weight_format']} experts at hidden {row['hidden']}, intermediate {row['intermediate']}, "
        f"{row['local_experts']} local, {row['tokens']} tokens of all ranks"
    )
    return Row(what, row["us"], source)


def _nearest(kind: str, sm: int, wanted: dict[str, int], exact: dict[str, str]) -> tuple[dict[str, Any], str] | None:
    """Row with the smallest sum of |log ratio| over the wanted sizes, among those of this SM that match exactly."""
    candidates = [
        (sum(abs(math.log(row[name] / size)) for name, size in wanted.items()), index, row, table["source"])
        for table in _tables()
        if table["kind"] == kind and table["sm"] == sm
        for index, row in enumerate(table["rows"])
        if all(row[name] == value for name, value in exact.items())
    ]
    if not candidates:
        return None
    _, _, row, source = min(candidates, key=lambda c: c[:2])
    return row, source


@cache
def _tables() -> list[dict[str, Any]]:
    return json.loads(resources.files("eprt.plan").joinpath("measured.json").read_text())

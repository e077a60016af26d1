"""Looks up measured times of dispatchers and executors, which the plan's automatic choice follows.

`measured.json` holds rows of `eprt bench dispatch` and `eprt bench experts`, with the machine and the result file they
come from. `eprt tune` writes rows of one's own machine in the same form, which come first. A row answers for its own
shape, number of ranks and generation of GPU; between two token counts it is interpolated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from eprt.config import MoEConfig
from eprt.errors import ConfigError, one_block
from eprt.json_files import parse, read_bounded, shown

BENCH_EXPERTS = 128  # experts, at least, of the layer whose tokens `eprt bench dispatch` sends
MAX_BYTES = 16 << 20  # of one's own rows
MAX_SOURCE = 200
SLACK = 1.5  # a row answers for its tokens times this, and down to its tokens over this

_SIZES = {
    "dispatch": ("ranks", "hidden", "top_k", "tokens"),
    "experts": ("hidden", "intermediate", "top_k", "experts", "local_experts", "tokens"),
}
_REMEDY = "let EPRT_PLAN_ROWS name another, or remove it if it was eprt tune's, which measures again"
_WORDS = {"dispatch": "payload", "experts": "weight_format"}


@dataclass(frozen=True)
class MeasuredRow:
    """Microseconds of one backend at one shape, and words for `eprt explain`."""

    us: float
    why: str


def dispatch_time(
    name: str, config: MoEConfig, tokens: int, ranks: int, sm: int, payload: str = "bf16"
) -> MeasuredRow | None:
    """Returns dispatch + combine of `tokens` on each of `ranks` ranks of one host, if it was measured."""
    wanted = {"hidden": config.hidden_size, "top_k": config.top_k, "ranks": ranks, "payload": payload}
    what = f"{payload} tokens of hidden {config.hidden_size}, top-{config.top_k}, {ranks} ranks"
    return _answer("dispatch", name, sm, wanted, tokens, what, "tokens a rank")


def experts_time(name: str, config: MoEConfig, local_experts: int, tokens: int, sm: int) -> MeasuredRow | None:
    """Returns one rank's experts, if they were measured; `tokens` counts all ranks' tokens."""
    wanted = sizes_of_experts(config, local_experts)
    what = f"{config.weight_format}, hidden {config.hidden_size}, {local_experts} of {config.num_experts} experts"
    return _answer("experts", name, sm, wanted, tokens, what, "tokens of all ranks")


def sizes_of_experts(config: MoEConfig, local_experts: int) -> dict[str, Any]:
    """Returns the sizes that identify a row of experts, its tokens aside."""
    return {
        "weight_format": config.weight_format,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "top_k": config.top_k,
        "local_experts": local_experts,
        "experts": config.num_experts,
    }


def shipped(kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Returns (SM, row) of the rows that come with eprt."""
    return ((table["sm"], row) for table in _shipped() if table["kind"] == kind for row in table["rows"])


def _answer(
    kind: str, name: str, sm: int, wanted: dict[str, Any], tokens: int, what: str, unit: str
) -> MeasuredRow | None:
    """Returns the first table's answer: at that many tokens, or between the two rows around them."""
    for table in (*own_tables(), *_shipped()):
        if (table["kind"], table["sm"]) != (kind, sm):
            continue
        rows = [row for row in table["rows"] if name in row["us"] and wanted.items() <= row.items()]
        times = {row["tokens"]: row["us"][name] for row in rows}
        if times and min(times) / SLACK <= tokens <= max(times) * SLACK:
            us, at = _interpolated(times, tokens)
            return MeasuredRow(us, f"measured {us:.4g} us ({what}, {at} {unit}; {table['source']})")
    return None


def _interpolated(times: dict[int, float], tokens: int) -> tuple[float, str]:
    """Interpolates along a straight line between logarithms; outside the rows the nearest one counts."""
    low = max((t for t in times if t <= tokens), default=min(times))
    high = min((t for t in times if t >= tokens), default=max(times))
    if low == high or tokens <= low:
        return times[low], str(low)
    if tokens >= high:
        return times[high], str(high)
    share = math.log(tokens / low) / math.log(high / low)
    return times[low] ** (1 - share) * times[high] ** share, f"between {low} and {high}"


@cache
def _shipped() -> list[dict[str, Any]]:
    return json.loads(resources.files("eprt.plan").joinpath("measured.json").read_text())


# ---- one's own rows -----------------------------------------------------------------------------------------------


def own_path() -> Path:
    """Returns the file of `eprt tune`: `plan.json` under the user's cache folder (XDG), or EPRT_PLAN_ROWS.

    Raises ConfigError where there is no such folder: a user without HOME whom the system doesn't know.
    """
    if named := os.environ.get("EPRT_PLAN_ROWS"):
        return Path(named)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ConfigError("this user has no home folder to keep rows in: EPRT_PLAN_ROWS names a file") from error
    return cache / "eprt" / "plan.json"


def own_tables() -> list[dict[str, Any]]:
    """Returns the tables that `eprt tune` measured here; none without a file. Raises ConfigError if it is none."""
    try:
        path = own_path()
        stamp = path.stat().st_mtime_ns
    except (OSError, ConfigError):  # no file, or no folder for one
        return []
    return _read_own(path, stamp)


def own_fingerprint() -> str:
    """Returns a short text that differs where the tables of `eprt tune` do; "none" without any.

    Raises ConfigError as `own_tables`.
    """
    tables = own_tables()
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:12] if tables else "none"


@cache
def _read_own(path: Path, stamp: int) -> list[dict[str, Any]]:
    try:
        found = parse(read_bounded(path, MAX_BYTES, ConfigError), str(path), ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_REMEDY}") from error
    if wrong := complaint(found):
        raise ConfigError(f"{path}: {wrong}; {_REMEDY}")
    return found


def complaint(tables: object) -> str:
    """Says what keeps `tables` from being tables of rows; "" if nothing does."""
    if not isinstance(tables, list):
        return "expected a list of tables"
    return next((f"table {n}: {wrong}" for n, table in enumerate(tables) if (wrong := _wrong_table(table))), "")


def _wrong_table(table: Any) -> str:
    if not isinstance(table, dict) or table.get("kind") not in list(_SIZES):
        return f"kind must be one of {', '.join(_SIZES)}"
    source = table.get("source")
    if not isinstance(table.get("sm"), int) or not isinstance(source, str) or source != one_block(source, MAX_SOURCE):
        return f"sm must be a number, source a printable text of at most {MAX_SOURCE} characters"
    if not isinstance(rows := table.get("rows"), list):
        return "rows must be a list"
    return next(filter(None, (_wrong_row(table["kind"], row) for row in rows)), "")


def _wrong_row(kind: str, row: Any) -> str:
    if not isinstance(row, dict):
        return "a row must be an object"
    for name in _SIZES[kind]:
        if not isinstance(row.get(name), int) or row[name] < 1:
            return f"{name} must be a positive integer, is {shown(row.get(name))}"
    if not isinstance(row.get(_WORDS[kind]), str):
        return f"{_WORDS[kind]} must be a text"
    times = row.get("us")
    if not isinstance(times, dict) or not all(
        isinstance(us, (int, float)) and math.isfinite(us) and us > 0 for us in times.values()
    ):
        return "us must hold positive microseconds by backend"
    return ""

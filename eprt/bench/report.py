"""Holds the one result format of every bench: rows, and what they depend on (machine, versions, commit, command)."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from eprt import diagnosis
from eprt.files import write_whole
from eprt.json_files import finite

Row = dict[str, Any]  # one measurement


@dataclass(frozen=True)
class Report:
    """The result of a bench.

    Attributes:
        bench: its name ("layer", "dispatch", ...).
        rows: one dict a measurement; times in microseconds end in `_us`.
        limits: rates of the machine, measured in the same run; lower bounds are made of them.
        notes: cases that were left out, with the reason.
        command: None: this `eprt` command.
        runs: provenance of each run, where several filled one report.
    """

    bench: str
    rows: list[Row]
    limits: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    command: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report with its provenance."""
        found = {"bench": self.bench, **provenance(), "command": self.command or this_command()}
        runs = {"runs": self.runs} if self.runs else {}
        return {**found, **runs, "limits": self.limits, "notes": self.notes, "rows": self.rows}

    def write(self, path: Path) -> None:
        """Writes JSON with one row per line, so that two results can be compared by eye."""
        content = finite(self.as_dict())
        rows = ",\n  ".join(json.dumps(row) for row in content.pop("rows"))
        head = json.dumps(content, indent=1).removesuffix("\n}")
        write_whole(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')

    def add(self, found: Iterable[Row | str]) -> None:
        """Appends rows, and as notes the texts that aren't there yet."""
        for each in found:
            if not isinstance(each, str):
                self.rows.append(each)
            elif each not in self.notes:
                self.notes.append(each)


def this_command() -> str:
    return shlex.join(["eprt", *sys.argv[1:]])


@cache
def provenance() -> dict[str, Any]:
    """Returns what a measurement can't be understood without; determined once per process."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": diagnosis.devices(),
        "versions": {name: version for name, version in diagnosis.versions().items() if version != "-"},
        "commit": commit(),
    }


def commit() -> str:
    """Returns the commit of the checkout that eprt runs from, "+" appended if it has changes; "" outside a checkout."""
    folder = str(Path(__file__).parent)
    git = partial(diagnosis.command_output, "git", "-C", folder)
    head = git("rev-parse", "HEAD") if git("ls-files", "--", folder) else ""  # not of a project whose venv this is
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no", "--", folder) else "")


def percentile(samples: Sequence[float], percent: float) -> float:
    """Returns the nearest-rank percentile: the smallest sample that at least `percent` % of them don't exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns, round by round, the longest time of any rank: a collective is as fast as its last rank."""
    return [max(samples) for samples in zip(*by_rank, strict=True)]


def p50_p99(name: str, by_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns two columns of a row, `p50_us` and `p99_us` behind the name, if there is one: both percentiles over all
    rounds of the slowest rank's microseconds."""
    times, prefix = slowest(by_rank), f"{name}_" if name else ""
    return {f"{prefix}p{p}_us": round(percentile(times, p), 1) for p in (50, 99)}

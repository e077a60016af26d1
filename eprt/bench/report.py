"""One result format for every bench: rows, and what they depend on (machine, versions, commit, command)."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from eprt import diagnosis


@dataclass(frozen=True)
class Report:
    """What a bench found.

    Attributes:
        bench: "layer", "placement", "dispatch", "simulation", "experts", "router", "exchange", "step" or
            "tune".
        rows: one dict a measurement; times in microseconds end in `_us`.
        limits: what the same run measured of the machine (rates, floors' inputs).
        notes: what was left out, and why.
        command: None: this `eprt` command.
        runs: provenance of each run, where several filled one report.
    """

    bench: str
    rows: list[dict[str, Any]]
    limits: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    command: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """With its provenance."""
        found = {"bench": self.bench, **provenance(), "command": self.command or this_command()}
        runs = {"runs": self.runs} if self.runs else {}
        return {**found, **runs, "limits": self.limits, "notes": self.notes, "rows": self.rows}

    def write(self, path: Path) -> None:
        """As JSON, one row a line, so that two results can be compared by eye."""
        content = self.as_dict()
        rows = ",\n  ".join(json.dumps(row) for row in content.pop("rows"))
        head = json.dumps(content, indent=1).removesuffix("\n}")
        write_whole(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')


def write_whole(path: Path, text: str) -> None:
    """Whoever reads meanwhile sees the old file or the new one, where it is a file. Makes its folder."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def this_command() -> str:
    return shlex.join(["eprt", *sys.argv[1:]])


@cache
def provenance() -> dict[str, Any]:
    """What a measurement can't be understood without, once a process."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": diagnosis.devices(),
        "versions": {name: version for name, version in diagnosis.versions().items() if version != "-"},
        "commit": commit(),
    }


def commit() -> str:
    """Of the checkout that eprt runs from, "+" appended if it has changes; "" outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no", "--", str(folder)) else "")


def percentile(samples: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest sample that at least `percent` % of them don't exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Round by round, the rank that took longest: a collective is as fast as its last rank."""
    return [max(samples) for samples in zip(*by_rank, strict=True)]

"""What a run of tests found, in the form of the benches' results."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from eprt.bench.report import Report


class Results:
    """One row a test function: how many of its cases passed, failed and skipped, why, and what they recorded."""

    def __init__(self, path: Path, bench: str = "gpu tests") -> None:
        self.path = path
        self.bench = bench
        self.rows: dict[str, dict] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, _, case = report.nodeid.partition("[")
        row = self.rows.setdefault(name, {"test": name, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.when == "call" or report.outcome != "passed":
            row[report.outcome] += 1
        if report.skipped:
            reasons = row.setdefault("reasons", {})
            why = report.longrepr[2].removeprefix("Skipped: ")
            reasons[why] = reasons.get(why, 0) + 1
        if report.when == "call" and report.user_properties:
            row.setdefault("recorded", {})[case.rstrip("]")] = dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        command = shlex.join(["pytest", *sys.argv[1:]])
        Report(self.bench, list(self.rows.values()), command=command, **self.more()).write(self.path)

    def more(self) -> dict[str, Any]:
        """Further fields of the Report."""
        return {}

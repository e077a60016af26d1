"""`--results FILE`: what passed on which machine, in the form of the benches' results."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from eprt.bench.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write counts, times and recorded values of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to the process that writes
        config.pluginmanager.register(Results(path))


class Results:
    """One row a test function: how many of its cases passed, failed and skipped, why, and what they recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        Report("gpu tests", list(self.rows.values()), command=command).write(self.path)

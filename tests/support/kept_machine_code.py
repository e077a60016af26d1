"""Machine code that passed its checks isn't compiled again: with the same kernel, compiler and checks it is the same.

KEPT has a line for each, its key; a run that compiles and passes more adds them, and is to be committed. Delete it to
compile all again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / "benchmarks/results/tests/machine_code.txt"
PROPERTY = "machine code"


def kept() -> set[str]:
    return set(KEPT.read_text().split()) if KEPT.exists() else set()


class Keeping:
    """Adds the keys of what passed to KEPT, in the process that hears of all tests."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed |= {str(value) for name, value in report.user_properties if name == PROPERTY}

    def pytest_sessionfinish(self) -> None:
        if self.passed - kept():
            KEPT.write_text("\n".join(sorted(kept() | self.passed)) + "\n")

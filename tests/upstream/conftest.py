"""Machine code that passed its checks isn't compiled again: with the same kernel, compiler and checks it is the same.

KEPT has a line for each, its key; a run that compiles and passes more adds them, and is to be committed. Delete it to
compile all again. One in 16 is compiled again anyway.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / "benchmarks/results/tests/machine_code.txt"
CHECKS = Path(__file__).parents[1] / "support/sass.py"
AGAIN = 1 / 16


def kept() -> set[str]:
    return set(KEPT.read_text().split()) if KEPT.exists() else set()


@pytest.fixture
def unless_kept(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[str], None]:
    """Skips the test of a kernel, given Triton's key of it, if the kernel passed as it is."""
    checks = b"".join(path.read_bytes() for path in (request.path, CHECKS))

    def look(kernel: str) -> None:
        text = f"{request.node.name} {kernel}".encode()
        key = hashlib.sha256(text + checks).hexdigest()[:16]
        if key in kept() and random.random() > AGAIN:
            pytest.skip("passed with this kernel, compiler and check")
        record_property("machine code", key)

    return look


class Keeping:
    """Adds the keys of what passed to KEPT, in the process that hears of all tests."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed |= {str(value) for name, value in report.user_properties if name == "machine code"}

    def pytest_sessionfinish(self) -> None:
        if self.passed - kept():
            KEPT.write_text("\n".join(sorted(kept() | self.passed)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeping())

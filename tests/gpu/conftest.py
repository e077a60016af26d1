"""`--results FILE`: what passed on which machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.results import Results


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write counts, times and recorded values of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to the process that writes
        config.pluginmanager.register(Results(path))

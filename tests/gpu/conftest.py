"""`--results FILE`: what passed on which machine."""

from __future__ import annotations

import pytest
from support.results import Results


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to the process that writes
        config.pluginmanager.register(Results(path))

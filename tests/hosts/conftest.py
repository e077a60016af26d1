"""The table of what broke between hosts, and what the ranks said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.hosts import why_not

ROWS: list[dict[str, object]] = []
WIDTHS = {"fault": 44, "hosts x ranks": 14, "network": 8, "seconds": 8, "limit": 6, "named": 8}
Note = Callable[..., None]


@pytest.fixture(autouse=True)
def needs_hosts() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def note() -> Note:
    """Adds a row to the table."""

    def add(fault: str, hosts: str, network: str, seconds: float | None, limit: float, named: object) -> None:
        shown = "" if seconds is None else f"{seconds:.2f}"
        ROWS.append(dict(zip(WIDTHS, (fault, hosts, network, shown, f"{limit:g}", named), strict=True)))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("hosts: what broke, seconds until the last rank knew, and whom they named")
        for row in [{name: name for name in WIDTHS}, *ROWS]:
            terminalreporter.write_line(
                "  ".join(str(row[name]).ljust(width) for name, width in WIDTHS.items()).rstrip()
            )

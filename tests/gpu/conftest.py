"""The ranks that tests on several GPUs share, and `--results FILE`: what passed on which machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.builders import JOB_S
from support.cases.gpu_ranks import SHARED, SIZE
from support.results import Results

from eprt.experts.grouped.schedules import Schedule
from eprt.ranks.launcher import WorldPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    """SIZE ranks, a GPU each unless there is one alone."""
    with WorldPool(SIZE, device="cuda", timeout_s=JOB_S, grace_s=2, share_gpu=SHARED) as held:
        yield held


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Callable[[Schedule], None]:
    """Makes `triton_grouped` take this one, whatever comes."""

    def use(chosen: Schedule) -> None:
        monkeypatch.setattr("eprt.experts.grouped.choose", lambda *_, **__: chosen)

    return use


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to the process that writes
        config.pluginmanager.register(Results(path))

"""Worlds of rank processes that tests share; each pytest worker has its own."""

from __future__ import annotations

import pytest

from eprt.conformance.harness import WorldPool


@pytest.fixture(scope="session")
def pools():
    """`pools(size)`: the CPU WorldPool of that size, started on first use. `pools(size).run(job, **kwargs)` costs
    milliseconds; the job lives in a module without pytest."""
    held: dict[int, WorldPool] = {}

    def pool(size: int) -> WorldPool:
        return held.setdefault(size, WorldPool(size, timeout_s=90, grace_s=0.5))

    yield pool
    for each in held.values():
        each.close()

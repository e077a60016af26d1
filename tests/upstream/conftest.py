"""Skips what `support/kept_machine_code.py` has the key of."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.kept_machine_code import PROPERTY, kept

CHECKS = Path(__file__).parents[1] / "support/sass.py"
AGAIN = 1 / 16  # of what is kept is compiled anyway


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
        record_property(PROPERTY, key)

    return look

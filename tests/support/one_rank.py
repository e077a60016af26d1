"""A World of one rank in the test's own process: commands run without starting, and importing, anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from eprt.cli.ranks import Ranks
from eprt.ranks.launcher import RankContext
from support.ports import free_port

TIMEOUT_S = 60.0


@contextmanager
def one_rank() -> Iterator[Any]:
    """Yields a function to put in the place of a command's `ranks`."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (names | {"MASTER_PORT": str(free_port())}).items():
            patch.setenv(name, value)
        context = RankContext(0, 1, "cpu")
        context.world(timeout_s=TIMEOUT_S)

    @contextmanager
    def this_process(*_: object) -> Iterator[Ranks]:
        yield Ranks(context, TIMEOUT_S)

    yield this_process
    context.close()

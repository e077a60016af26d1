"""Worlds of rank processes that tests share; each pytest worker has its own."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.kept_machine_code import Keeping
from support.long_tests import GROUPS, LONG, ONE_JOB, SLOW, TRANSFORMERS

from eprt.ranks.launcher import RankContext, WorldPool
from eprt.ranks.servers import preload

# A shell starts background jobs with SIGINT ignored, and so would be what our tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What ranks of the files of TRANSFORMERS import.
IN_RANKS = ("transformers.models.gpt_oss.modeling_gpt_oss", "eprt.integrations.transformers")

# What `eprt tune` measured on a developer's machine must not choose for the tests, nor for the ranks that they start.
os.environ["EPRT_PLAN_ROWS"] = f"{os.devnull}/no-rows.json"

UNUSED_S = 4.0  # a pool's idle ranks cost in this time what their Worlds cost to make: their threads wake up
_asked_at: dict[WorldPool, float] = {}  # when a test asked for each open pool last


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--results", type=Path, help="write what passed, and where, as JSON (tests/gpu, tests/integrations)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # here, as the process that workers report to reads no other conftest
        config.pluginmanager.register(Keeping())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.stem in TRANSFORMERS:
        preload(*IN_RANKS)  # only where such tests run: a rank starts the slower, the more it is forked with
    if not any(name.startswith("pools") for name in item.fixturenames):
        for pool in [pool for pool, at in _asked_at.items() if time.monotonic() - at > UNUSED_S]:
            del _asked_at[pool]
            pool.close()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist takes the groups' names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput") and any(item.path.stem in TRANSFORMERS for item in items):
        preload(*IN_RANKS)
    long = re.compile("|".join(LONG))
    groups = {file: name for name, files in GROUPS.items() for file in files}
    for item in items:
        file, group = item.path.stem, groups.get(item.path.stem)
        if long.match(f"{file}::{item.name}"):
            item.add_marker("long")
        if item.get_closest_marker("long") and group != "cases":
            group = file if file in ONE_JOB else None
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps garbage collection away from all modules and tests, which are half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Keeps garbage collection away from what tests of earlier files imported, too: it would take 0.3 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A gpt-oss checkpoint of one layer, without a tokenizer; for reading only."""
    from eprt.conformance.tiny_model import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", num_layers=1)


@pytest.fixture(scope="module")
def this_process() -> Iterator[Callable[..., object]]:
    """What takes the place of a command's `ranks`, so that it runs on one rank in the test's own process."""
    from support.ports import free_port

    from eprt.cli.ranks import Ranks

    timeout_s, context = 60.0, RankContext(0, 1, "cpu")
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (names | {"MASTER_PORT": str(free_port())}).items():
            patch.setenv(name, value)
        context.world(timeout_s=timeout_s)

    @contextmanager
    def ranks(*_: object) -> Iterator[Ranks]:
        yield Ranks(context, timeout_s)

    yield ranks
    context.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For TMPDIR: sockets lie in it, and `tmp_path` comes close to the 107 bytes that their names may have."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _pools_by_size() -> Iterator[Callable[[int], WorldPool]]:
    held: dict[int, WorldPool] = {}

    def pool(size: int) -> WorldPool:
        if size not in held or held[size].closed:
            held[size] = WorldPool(size, timeout_s=90, grace_s=0.5)
        _asked_at[held[size]] = time.monotonic()
        return held[size]

    yield pool
    for each in held.values():
        _asked_at.pop(each, None)
        each.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorldPool]]:
    """`pools(size)`: the CPU WorldPool of that size, started on first use. `pools(size).run(job, **kwargs)` costs
    milliseconds; the job lives in a module without pytest."""
    with _pools_by_size() as found:
        yield found


@pytest.fixture(scope="module")
def pools_of_this_file() -> Iterator[Callable[[int], WorldPool]]:
    """`pools` whose ranks end with the file: for jobs that leave much behind in them."""
    with _pools_by_size() as found:
        yield found

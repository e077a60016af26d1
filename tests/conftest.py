"""Worlds of rank processes that tests share; each pytest worker has its own."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eprt.ranks import launcher
from eprt.ranks.launcher import WorldPool

# A shell starts background jobs with SIGINT ignored, and so would be what our tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What `eprt tune` measured on a developer's machine must not choose for the tests, nor for the ranks that they start.
os.environ["EPRT_PLAN_ROWS"] = f"{os.devnull}/no-rows.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--results", type=Path, help="write what passed, and where, as JSON (tests/gpu, tests/integrations)"
    )


# Files with tests of many seconds: begun first, none of them is what everybody waits for in the end.
SLOW = (
    "test_kernels_interpreted",
    "test_launch",
    "test_faults",
    "test_cli",
    "test_ranks",
    "test_world",
    "test_cutedsl_compile",
)

# The tests marked `long`, which scripts/test_long.sh runs: FILE::TEST[PARAMETERS] begins with one of these. Parameters
# whose values say more than their names are marked in their files.
LONG = re.compile(
    "|".join(
        (
            # Kernels compiled to machine code: they change with their libraries, or with a few files of ours.
            r"test_triton_registers::",
            r"test_pdl::",
            r"test_cutedsl_compile::",
            r"test_kernels_interpreted::.*(grouped|mxfp4|nvfp4|payload|routing|warp_)",
            r"test_compile::test_(inductor|a_parallelized.*dtype1)",
            r"test_generation::test_a_compiled_model",
            r"test_gpu_layers_on_gloo::test_humming_on_stand_ins",
            # Launchers that start interpreters, twice where a rank is killed.
            r"test_launch::test_(a_node|two_nodes|slurm|its_command)",
            r"test_cli_generate::test_a_restarted_world",
            r"test_plugins::test_a_strangers",
            # Every check comes before a pair of backends does anything: one pair shows what it says.
            r"test_bad_input::test_.*(none-flat|expert_major)",
            # Four ranks meet what one and two do.
            r"test_matrix::test_transport\[.*-[12]-",
            r"test_matrix::test_layer\[[12]-",
            r"test_transformers::test_layer_equals_transformers_block\[(ep[12]-moetp[12]-attntp2|ep2|ep4-moetp2-attntp1)",
            # Emulated libraries carry each format; one of them shows what a plan's pair does.
            r"test_sm100_pairs::test_layer_behind.*(mxfp8|relu2|h160|fp8_tensor).*deepep",
        )
    )
)

# Files whose ranks run transformers' models: imported once, not in each rank.
TRANSFORMERS = ("test_integration", "test_generation", "test_step_graphs_on_gloo", "test_compile", "test_page_code")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.path.stem in TRANSFORMERS for item in items):
        launcher.preload("transformers.models.gpt_oss.modeling_gpt_oss", "eprt.integrations.transformers")
    for item in items:
        if LONG.match(f"{item.path.stem}::{item.name}"):
            item.add_marker("long")
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For TMPDIR: sockets lie in it, and `tmp_path` comes close to the 107 bytes that their names may have."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _pools_by_size() -> Iterator[Callable[[int], WorldPool]]:
    held: dict[int, WorldPool] = {}

    def pool(size: int) -> WorldPool:
        return held.setdefault(size, WorldPool(size, timeout_s=90, grace_s=0.5))

    yield pool
    for each in held.values():
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

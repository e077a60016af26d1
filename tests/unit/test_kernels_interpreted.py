"""The repository's own Triton kernels, executed on the CPU by Triton's interpreter: the tests of `tests/gpu` that need
one device, in a process of their own, as TRITON_INTERPRET must be set before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What only a GPU can run: graphs, streams, inline PTX.
ONLY_CUDA = {"symm": 2, "library": 5, "payload": 0, "permute": 0}
INTERPRETER = "3.9"  # tests/gpu/interpreter_mends.py
LIMIT_S = 500  # a tenth is enough where nothing else runs


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kernels", ONLY_CUDA)
def test_kernels_on_the_cpu(kernels):
    found = version("triton") if find_spec("triton") else "none"
    if not found.startswith(f"{INTERPRETER}."):
        pytest.skip(f"needs the interpreter of Triton {INTERPRETER}, whose faults are known: {found} is installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/gpu/test_{kernels}_kernels.py", "-m", "gpu", "-p", "no:cacheprovider"],
        env={**environment, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if found.returncode:
        pytest.fail(found.stdout, pytrace=False)
    counts = dict(reversed(pair) for pair in re.findall(r"(\d+) (passed|skipped)", found.stdout.splitlines()[-1]))
    assert int(counts["passed"]) > 0, found.stdout
    assert int(counts.get("skipped", 0)) == ONLY_CUDA[kernels], found.stdout

"""The repository's own Triton kernels, executed on the CPU by Triton's interpreter: the tests of `tests/gpu` that need
one device, in a process of their own, as TRITON_INTERPRET must be set before triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What only a GPU can run: graphs, streams, inline PTX.
ONLY_CUDA = {
    "choice": 0, "few": 4, "four_bit": 10, "grouped": 18, "library": 5, "payload": 0, "permute": 0, "placement": 2,
    "push": 0, "routing": 24, "symm": 3, "warp_specialized": 66,
}  # fmt: skip
INTERPRETER = "3.9"  # tests/support/stand_ins/triton_interpreter.py
LIMIT_S = 900  # a quarter is enough where nothing else runs


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kernels", ONLY_CUDA)
def test_kernels_on_the_cpu(tmp_path, kernels):
    found = version("triton") if find_spec("triton") else "none"
    if not found.startswith(f"{INTERPRETER}."):
        pytest.skip(f"needs the interpreter of Triton {INTERPRETER}, whose faults are known: {found} is installed")
    results = tmp_path / "results.json"
    command = ["-m", "pytest", f"tests/gpu/test_{kernels}_kernels.py", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(
        [sys.executable, *command, "--results", str(results)],
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
    rows = json.loads(results.read_text())["rows"]
    assert sum(row["passed"] for row in rows) > 0
    assert sum(row["failed"] for row in rows) == 0
    skipped = [row for row in rows if row["skipped"]]
    assert sum(row["skipped"] for row in skipped) == ONLY_CUDA[kernels], skipped
    assert all(sum(row["reasons"].values()) == row["skipped"] for row in skipped)

"""The repository's own Triton kernels, executed on the CPU by Triton's interpreter: the tests of `tests/gpu` that need
one device, in processes of their own, as TRITON_INTERPRET must be set before triton is imported."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from support.processes import run_python

ROOT = Path(__file__).parents[2]
# What only a GPU can run: graphs, streams, inline PTX.
ONLY_CUDA = {
    "choice": 0, "few": 4, "four_bit": 10, "grouped": 18, "library": 5, "payload": 0, "permute": 0, "placement": 2,
    "push": 0, "routing": 26, "symm": 3, "warp_specialized": 89,
}  # fmt: skip
# Those of a second share a process.
SMALL = (("placement", "push"), ("choice", "library", "payload", "permute"))
TOGETHER = (*SMALL, *((each,) for each in ONLY_CUDA if each not in chain(*SMALL)))
INTERPRETER = "3.9"  # tests/support/stand_ins/triton_interpreter.py
LIMIT_S = 900  # a quarter is enough where nothing else runs


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kernels", TOGETHER, ids="-".join)
def test_kernels_on_the_cpu(tmp_path, kernels):
    found = version("triton") if find_spec("triton") else "none"
    if not found.startswith(f"{INTERPRETER}."):
        pytest.skip(f"needs the interpreter of Triton {INTERPRETER}, whose faults are known: {found} is installed")
    results = tmp_path / "results.json"
    files = [f"tests/gpu/test_{each}_kernels.py" for each in kernels]
    command = ["-m", "pytest", *files, "-m", "gpu", "-p", "no:cacheprovider", "--results", str(results)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    found = run_python(*command, timeout=LIMIT_S, env=environment, cwd=ROOT)
    if found.returncode:
        pytest.fail(found.stdout + found.stderr, pytrace=False)
    rows = json.loads(results.read_text())["rows"]
    assert {row["test"].partition("::")[0] for row in rows if row["passed"]} == set(files)
    assert sum(row["failed"] for row in rows) == 0
    skipped = [row for row in rows if row["skipped"]]
    assert sum(row["skipped"] for row in skipped) == sum(ONLY_CUDA[each] for each in kernels), skipped
    assert all(sum(row["reasons"].values()) == row["skipped"] for row in skipped)

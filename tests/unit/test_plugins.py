"""`--plugin MODULE`: the backends of docs/extending.md, outside the package, are found and proved in every rank."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.processes import environment, run_python

from eprt.cli import main
from eprt.cli.parsing import COMMANDS
from eprt.conformance.cases import CASES, CUT_CASES
from eprt.conformance.checks import standard_checks
from eprt.dispatch import DISPATCHERS
from eprt.support import Device

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
REQUIRED = dict.fromkeys(("explain", "warm", "tune"), ("--model", "x")) | {"plan-experts": ("--slots", "8")}
MODULE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))  # what a newcomer saves as my_backends.py


def eprt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in `folder`, where the module of --plugin lies."""
    settings = environment(PYTHONPATH=str(ROOT))
    return run_python("-m", "eprt", *words, timeout=300, cwd=folder, env=settings)


@pytest.mark.timeout(300)
def test_a_strangers_dispatcher_passes_every_case_of_doctor(tmp_path: Path) -> None:
    (tmp_path / "my_backends.py").write_text(MODULE)
    done = eprt(tmp_path, "doctor", "--run", "--world", "2", "--plugin", "my_backends")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " broadcast " in line and "flat" in line]
    passed = {"one_by_one" in line: 0 for line in lines}
    for line in lines:
        passed["one_by_one" in line] += int(line[-2].split("/")[0])
    assert {line[0] for line in lines} == {"ok"}, done.stdout
    like = [check for check in standard_checks(2, Device("cpu")) if check.dispatcher == "none"]
    assert passed[False] == len(like) > 5 * len(CASES), "with the executors of the package"
    assert passed[True] >= len(CASES), "with the executor of the page"
    assert {check.case for check in like} == {*CASES, *CUT_CASES}
    assert "broadcast" not in DISPATCHERS, "it was registered in that process alone"


def test_run_takes_it_by_name(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "my_backends.py").write_text(MODULE)
    words = "--world 2 --steps 2 --plugin my_backends --dispatcher broadcast"
    done = eprt(tmp_path, "run", "--model", str(tiny), *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Plan: dispatcher broadcast" in done.stdout
    told = eprt(tmp_path, "explain", "--model", "Qwen3-30B-A3B", "--device", "sm90", "--plugin", "my_backends")
    assert re.search(r"^ok +broadcast +one_by_one ", told.stdout, flags=re.MULTILINE), told.stdout + told.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_module_that_cannot_be_imported_is_one_line(name, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "broken_backend.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = [*name.split(), *REQUIRED.get(name, ())]
    for name, why in (
        ("broken_backend", "ZeroDivisionError: division by zero"),
        ("no_such_backend", "No module named"),
    ):
        assert main([*command, "--plugin", name]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"eprt: ConfigError: --plugin {name}: the module can't be imported: ")
        assert why in said
        assert len(said.splitlines()) == 1

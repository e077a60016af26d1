"""`--plugin MODULE`: a dispatcher that lies outside the package is found, chosen and proved in every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eprt.cli import main
from eprt.conformance.cases import CASES, CUT_CASES
from eprt.conformance.checks import standard_checks
from eprt.dispatch import DISPATCHERS
from eprt.support import Device

ROOT = Path(__file__).parents[2]
MODULE = """
import torch
import eprt
from eprt.dispatch import Dispatcher, DispatcherSpec
from eprt.tokens import FlatTokens, Payload

class Everything(Dispatcher):
    def _dispatch(self, hidden, topk, handle):
        T, W, E = hidden.data.shape[0], self.world.size, self.config.num_experts
        def gather(x, fill):
            padded = torch.cat([x, x.new_full((handle.tokens_per_rank - T, x.shape[1]), fill)])
            out = x.new_empty((W * handle.tokens_per_rank, x.shape[1]))
            self.world.all_gather(out, padded)
            return out
        ids, weights = gather(topk.ids, E), gather(topk.weights, 0)
        mine = (ids >= self.shard.first_expert) & (ids < self.shard.end_expert)
        return FlatTokens(Payload.plain(gather(hidden.data, 0)), torch.where(mine, ids, E), weights, E, True)

    def _combine(self, expert_output, handle):
        own = expert_output.new_empty((handle.tokens_per_rank, expert_output.shape[1]))
        self.world.reduce_scatter(own, expert_output)
        return own[: handle.num_tokens].to(handle.dtype)

eprt.register_dispatcher(DispatcherSpec(
    "everything", "my_backend:Everything", "a stranger's all-gather", ("flat",), ("bf16", "f32"), ("cpu",), False,
    sends="everyone"))
"""


def eprt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in `folder`, where the module of --plugin lies."""
    keep = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "eprt", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=keep | more)


@pytest.mark.timeout(300)
def test_a_strangers_dispatcher_passes_every_case_of_doctor(tmp_path: Path) -> None:
    (tmp_path / "my_backend.py").write_text(MODULE)
    done = eprt(tmp_path, "doctor", "--run", "--world", "2", "--plugin", "my_backend")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " everything " in line and "flat" in line]
    passed = {line[1] + "".join(line[4:-5]): line[-2] for line in lines}
    assert {line[0] for line in lines} == {"ok"}, done.stdout
    like = [check for check in standard_checks(2, Device("cpu")) if check.dispatcher == "none"]
    assert sum(int(line[-2].split("/")[0]) for line in lines) == len(like) > 5 * len(CASES), passed
    assert {check.case for check in like} == {*CASES, *CUT_CASES}
    assert "everything" not in DISPATCHERS, "it was registered in that process alone"


def test_run_takes_it_by_name(tmp_path: Path) -> None:
    (tmp_path / "my_backend.py").write_text(MODULE)
    words = ["run", "--world", "2", "--steps", "2", "--plugin", "my_backend", "--dispatcher", "everything"]
    done = eprt(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Plan: dispatcher everything" in done.stdout


@pytest.mark.parametrize("command", [["doctor"], ["run"], ["tune", "--model", "x"], ["bench", "exchange"]])
def test_a_module_that_cannot_be_imported_is_one_line(command, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "broken_backend.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, why in (
        ("broken_backend", "ZeroDivisionError: division by zero"),
        ("no_such_backend", "No module named"),
    ):
        assert main([*command, "--plugin", name]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"eprt: ConfigError: --plugin {name}: the module can't be imported: ")
        assert why in said
        assert len(said.splitlines()) == 1

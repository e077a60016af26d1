"""`eprt doctor --faults`: what it keeps, in which order trials begin, how it ends, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from support.processes import descendants, wait_until_gone

from eprt.cli import doctor
from eprt.cli.arguments import Doctor
from eprt.cli.terminal import Terminal
from eprt.conformance import faults
from eprt.conformance.faults import Result, Trial
from eprt.conformance.faults import trial as trial_module
from eprt.errors import ConfigError
from eprt.ranks.scratch import Scratch

CELLS = [Trial("kill", moment, 1, name, 2) for moment in ("dispatch", "combine") for name in ("none", "torch")]
Runs = list[list[Trial]]
SLACK_S = 25.0  # a loaded machine; without load it takes one second


def promised(trial: Trial) -> Result:
    return Result(trial, seconds=0.2, verdicts=("rank 1 exited",), named=True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """The trials of each run; none starts a process."""
    found: Runs = []

    def run_trials(trials: Sequence[Trial], jobs: int) -> Iterator[Result]:
        found.append(list(trials))
        return (promised(trial) for trial in trials)

    monkeypatch.setattr(faults, "run_trials", run_trials)
    monkeypatch.setattr(faults, "trials", lambda world, device, count: CELLS[:count])
    return found


def run(output: Path, trials: int, **more: object) -> list[dict]:
    return doctor.break_ranks(Doctor(output=output, trials=trials, world=2, **more), Terminal(speaks=True))


def test_runs_fill_one_file(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "faults.json"
    run(output, 1)
    found = json.loads(output.read_text())
    assert found["notes"] == []
    rows = run(output, 4, resume=True)
    assert [trial for trial in runs[1] if trial.fault != "none"] == CELLS[1:]
    found = json.loads(output.read_text())
    assert found["rows"] == rows
    assert {Result.of_row(row).trial for row in rows if row["fault"] != "none"} == set(CELLS)
    assert [row["run"] for row in rows] == [0, 1, 1, 1, 1, 1], "a control, which compiles, is of the newest run"
    assert len(found["runs"]) == 2
    for one in found["runs"]:
        assert one.keys() >= {"time", "machine", "versions", "commit", "command"}
    assert run(output, 4, resume=True) == rows
    assert runs[2] == []
    assert "6 of 6 trials as promised" in capsys.readouterr().out


def of_an_earlier_release(found: dict) -> None:
    del found["runs"]
    for row in found["rows"]:
        del row["run"], row["again"]
    found["commit"] = "another"


@pytest.mark.parametrize(
    ("change", "trials", "again"),
    [
        (of_an_earlier_release, 4, CELLS[2:]),
        (lambda found: found["rows"][-1].update(failed="no such port"), 2, CELLS[1:2]),  # it did not take place
    ],
)
def test_what_a_file_lacks_is_run(runs: Runs, tmp_path: Path, change, trials: int, again: list[Trial]) -> None:
    output = tmp_path / "faults.json"
    run(output, 2)
    earlier = json.loads(output.read_text())
    change(earlier)
    output.write_text(json.dumps(earlier))
    run(output, trials, resume=True)
    assert [trial for trial in runs[1] if trial.fault != "none"] == again
    commits = [one["commit"] == "another" for one in json.loads(output.read_text())["runs"]]
    assert commits == [change is of_an_earlier_release, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["rows"][0].update(world=4), "is of 4 ranks on the CPU, these are 2 ranks on the CPU"),
        (
            lambda found: (
                [row.update(device="cuda") for row in found["rows"]],
                found["runs"][0].update(machine=["cuda:0: NVIDIA H200, sm90, 140 GiB, 132 SMs"]),
            ),
            "is of 2 ranks on NVIDIA H200, these are 2 ranks on the CPU",
        ),
        (lambda found: found.pop("rows"), "is no result of `eprt doctor --faults`"),
    ],
)
def test_another_machines_file_is_refused(runs: Runs, tmp_path, change: Callable[[dict], object], says: str) -> None:
    output = tmp_path / "faults.json"
    run(output, 1)
    found = json.loads(output.read_text())
    change(found)
    output.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=says):
        run(output, 1, resume=True)
    assert len(runs) == 1


def test_resume_without_a_file_to_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output"):
        doctor.break_ranks(Doctor(resume=True, world=2), Terminal(speaks=False))


def test_a_dispatchers_cells_wait_for_its_trial_in_which_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Trial] = []
    compiled = threading.Event()

    def run_trial(trial: Trial, **_: object) -> Result:
        begun.append(trial)
        if trial.fault == "none" and trial.dispatcher == "torch":
            assert compiled.wait(10)
        return promised(trial)

    monkeypatch.setattr(trial_module, "run_trial", run_trial)
    calm = [Trial("none", "between steps", 1, name, 2) for name in ("torch", "none")]
    with closing(trial_module.run_trials([*calm, *CELLS], jobs=3)) as results:
        first = [next(results).trial for _ in range(3)]
        assert {trial.dispatcher for trial in first} == {"none"}, "what compiles holds up nobody else"
        assert {trial.dispatcher for trial in begun if trial.fault != "none"} == {"none"}
        compiled.set()
        assert {result.trial for result in results} == {calm[0], *(c for c in CELLS if c.dispatcher == "torch")}


def test_a_dispatcher_that_cannot_run_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = Trial("none", "between steps", 1, "torch", 2)
    monkeypatch.setattr(
        trial_module, "run_trial", lambda trial, **_: Result(trial, failed="no") if trial == calm else promised(trial)
    )
    found = {result.trial for result in trial_module.run_trials([calm, *CELLS], jobs=2)}
    assert found == {calm, *(cell for cell in CELLS if cell.dispatcher == "none")}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_signal_ends_all_ranks_at_once_and_keeps_the_table(tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    words = ["doctor", "--faults", "--world", "2", "--jobs", "2", "--trials", "200", "--output", str(output)]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "eprt", *words], **pipes, env=alone)
    try:
        deadline = time.monotonic() + 90
        while not output.exists() or len(json.loads(output.read_text())["rows"]) < 1:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        below = descendants(process.pid)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=30)
        seconds = time.monotonic() - begun
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    assert seconds < 5.0 + SLACK_S
    found = json.loads(output.read_text())
    ran = sum(row["fault"] != "none" for row in found["rows"])
    assert found["notes"] == [f"partial: {ran} of 200 cells ran; --resume runs the others"]
    assert all(row["ok"] for row in found["rows"]), "none that was cut short is counted"
    assert f"{len(found['rows'])} of {len(found['rows'])} trials as promised" in stdout
    # The file has a result before the terminal does, and the signal may come in between.
    assert len(found["rows"]) - stderr.count("/202: ") in (0, 1)
    wait_until_gone(below)


def test_folders_made_at_once_take_none_from_each_other(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    lost: list[Path] = []

    def make() -> None:
        for _ in range(50):
            with Scratch("many") as folder:
                if not folder.exists():
                    lost.append(folder)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert list(short_folder.iterdir()) == []

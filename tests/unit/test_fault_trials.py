"""Trials of faults: the matrix, what the judge believes, and how `eprt doctor --faults` runs and resumes them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import Python, descendants, environment, wait_until_gone

from eprt.cli import doctor
from eprt.cli.arguments import Doctor
from eprt.cli.terminal import Terminal
from eprt.config import ParallelConfig
from eprt.conformance.faults import matrix
from eprt.conformance.faults import trial as trial_module
from eprt.conformance.faults.job import CheckedLayer, WrongOutput
from eprt.conformance.faults.matrix import Trial
from eprt.conformance.faults.trial import Result, judge
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError
from eprt.ranks.process import Raised
from eprt.ranks.scratch import Scratch
from eprt.ranks.stacks import RankReport
from eprt.support import Device
from eprt.weights import Dense
from eprt.world import World, guard

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

    monkeypatch.setattr(doctor, "run_trials", run_trials)
    monkeypatch.setattr(doctor, "trials", lambda world, device, count, seed: CELLS[:count])
    return found


def run(output: Path, trials: int, **more: object) -> list[dict]:
    asked, terminal = Doctor(output=output, trials=trials, world=2, **more), Terminal(speaks=True)
    return doctor.break_ranks(doctor.fault_report(asked, terminal), asked, terminal)


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


def test_what_did_not_take_place_is_run_again(runs: Runs, tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    run(output, 2)
    earlier = json.loads(output.read_text())
    earlier["rows"][-1].update(failed="no such port")
    output.write_text(json.dumps(earlier))
    run(output, 2, resume=True)
    assert [trial for trial in runs[1] if trial.fault != "none"] == CELLS[1:2]


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
        doctor.fault_report(Doctor(resume=True, world=2), Terminal(speaks=False))


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
    with Python("-m", "eprt", *words, env=environment()) as process:
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


TRIALS = matrix.trials(4, count=20)
FIRST = {trial.fault: trial for trial in reversed(TRIALS)}


def test_a_short_run_is_spread_over_the_matrix() -> None:
    assert {trial.fault for trial in TRIALS} == set(matrix.FAULTS)
    assert {trial.dispatcher for trial in TRIALS} == {"none", "torch"}
    assert {trial.then for trial in TRIALS} == {"restart", "continue", "renormalize"}
    assert {trial.rank for trial in TRIALS} == {0, 1, 2, 3}
    assert len({trial.moment for trial in matrix.trials(4)}) == 8
    assert len(matrix.trials(4, count=500)) == 500


def test_nothing_is_promised_of_half_of_two_ranks() -> None:
    cells = matrix.trials(2)
    assert {cell.fault for cell in cells} == set(matrix.FAULTS) - {matrix.CUT}
    assert {cell.rank for cell in cells if cell.fault == "stop" and cell.then != "restart"} == {1}


@pytest.mark.parametrize(
    "trial",
    [
        Trial("kill", matrix.LATE, 1, "none", 3),
        Trial(matrix.CUT, "dispatch", 3, "torch", 5),  # a host of two
        *(pytest.param(trial, marks=[] if trial in FIRST.values() else pytest.mark.long) for trial in TRIALS),
    ],
    ids=lambda t: f"{t.fault}-{t.moment}-{t.rank}-{t.dispatcher}-{t.then}",
)
def test_what_the_survivors_say_and_do_is_as_promised(trial: Trial) -> None:
    result = trial_module.run_trial(trial)
    assert not result.failed, result
    assert result.named, result
    assert not result.wrong, result
    assert not result.leftovers, result
    assert result.seconds is not None, result
    assert result.seconds < trial.limit_s + SLACK_S, result
    assert trial.fault != "kill" or trial.moment not in matrix.STEP or "step 5" in result.verdicts[0], result
    if trial.then != "restart":
        assert result.resumed is not None, result
        assert result.resumed < trial.resume_s + SLACK_S, result


def test_trials_at_a_time_and_one_in_which_nothing_breaks() -> None:
    calm, replay = matrix.controls(2, "cpu")[0], Trial("kill", matrix.REPLAY, 0, "none", 2, then="renormalize")
    found = list(trial_module.run_trials([calm, replay], jobs=2))
    assert [result.ok for result in found] == [True, True], found
    assert found[0].verdicts == ()


GPU_DISPATCHERS = list(DISPATCHERS)


def test_the_table_of_two_gpus_is_whole_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "dispatchers", lambda *_: GPU_DISPATCHERS)
    cells = matrix.trials(2, "cuda")
    broken = {(t.dispatcher, t.fault, t.moment) for t in cells if t.then == "restart"}
    expected = set(itertools.product(GPU_DISPATCHERS, *matrix.ON_GPUS))
    assert expected - broken == {("torch", fault, matrix.REPLAY) for fault in matrix.ON_GPUS[0]}  # no graphs
    assert len(broken) == sum(t.then == "restart" for t in cells)
    inside = {t.dispatcher for t in cells if t.then == "continue" and t.moment != "between steps"}
    assert inside == {"none", "torch", "symm"}
    assert {t.dispatcher for t in cells if t.then == "continue"} == set(GPU_DISPATCHERS)
    assert max(max(t.limit_s, t.resume_s) for t in cells) < 20
    assert {t.unknowable != "" for t in cells if t.fault == "skip"} == {True}
    assert {t.moment for t in matrix.controls(2, "cuda")} == {matrix.REPLAY, "between steps"}


def test_a_short_run_on_gpus_holds_the_core_of_every_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "dispatchers", lambda *_: GPU_DISPATCHERS)
    cells = matrix.trials(2, "cuda")
    core = [cell for cell in cells if cell.then == "restart"]
    assert cells[: len(core)] == core
    for length in range(1, len(core)):
        ran = Counter(cell.dispatcher for cell in core[:length])
        graph_safe = [ran[name] for name in GPU_DISPATCHERS if name != "torch"]  # which has fewer cells
        assert max(graph_safe) - min(graph_safe) <= 1
    first = [cell for cell in core if cell.dispatcher == "symm"][:4]
    assert ({c.fault for c in first}, {c.moment for c in first}) == tuple(map(set, matrix.ON_GPUS))


def test_every_dispatcher_takes_the_layer_of_the_trials_on_gpus() -> None:
    moe, parallel = matrix.config(2, "cuda"), ParallelConfig(2)
    for name, spec in DISPATCHERS.items():
        refused = spec.supports(moe, parallel, matrix.runtime(name, "cuda"), Device("cuda", 90))
        assert refused.ok, refused.reason


@pytest.mark.parametrize(
    ("report", "right"),
    [
        (RankReport(0, "died", exit_code=75, log_tail=f"{guard.LAST_WORDS}rank 1 exited: gone", ended_at=103.0), True),
        (RankReport(0, "died", exit_code=75, log_tail=f"{guard.LAST_WORDS}rank 1 exited: gone", ended_at=120.0), False),
        (RankReport(0, "died", exit_code=75, log_tail=f"{guard.LAST_WORDS}rank 2 exited: gone", ended_at=103.0), False),
        (RankReport(0, "died", exit_code=75, log_tail="rank 1 exited: gone", ended_at=103.0), False),
        (RankReport(0, "died", exit_code=-6, log_tail=f"{guard.LAST_WORDS}rank 1 exited: gone", ended_at=103.0), False),
        (RankReport(0, "unfinished", state="running"), False),
        (RankReport(0, "ok"), False),
    ],
)
def test_a_verdict_that_is_late_wrong_or_missing_is_none(report: RankReport, right: bool) -> None:
    trial = Trial("kill", "dispatch", 1, "symm", 2, "cuda")
    victim = RankReport(1, "died", exit_code=-9, ended_at=100.0)
    assert judge(trial, [report, victim], [{}, {}], 100.0).ok is right


@pytest.mark.parametrize(
    ("knew_at", "why", "then", "fault", "right"),
    [
        (102.1, "exited", "restart", matrix.CUT, True),
        (102.1, "silent", "restart", matrix.CUT, True),
        (102.3, "exited", "restart", matrix.CUT, False),  # it ended before it knew: another fault
        (None, "exited", "restart", matrix.CUT, False),
        (102.1, "raised", "restart", matrix.CUT, False),
        (102.1, "exited", "continue", matrix.CUT, False),  # there it doesn't end
        (102.1, "exited", "restart", "stop", False),
    ],
)
def test_who_is_cut_off_may_be_seen_to_end_only_after_it_knew(knew_at, why, then, fault, right: bool) -> None:
    def lost(at: float, why: str) -> Raised:
        return Raised("RankLost", f"rank 1 {why}", "", at, 1, why)

    trial = Trial(fault, "dispatch", 1, "none", 3, then=then)
    knew = (
        RankReport(1, "died", exit_code=-9)
        if knew_at is None
        else RankReport(1, "raised", raised=lost(knew_at, "silent"))
    )
    reports = [RankReport(0, "raised", raised=lost(102.2, why)), knew, RankReport(2, "raised", raised=lost(102.2, why))]
    assert bool(judge(trial, reports, [{}, {}, {}], 100.0).named) is right


def test_going_on_counts_only_with_a_right_output_in_time() -> None:
    trial = Trial("kill", "dispatch", 1, "none", 2, then="continue")
    victim = RankReport(1, "died", exit_code=-9, ended_at=100.0)
    said = {"words": "rank 1 exited", "why": "exited", "ranks": [1], "verdict_at": 100.3}
    for diary, right in (({**said, "resumed_at": 101.0}, True), (said, False), ({**said, "resumed_at": 150.0}, False)):
        assert judge(trial, [RankReport(0, "ok"), victim], [diary, {}], 100.0).ok is right
    wrong = RankReport(0, "raised", raised=Raised("WrongOutput", "step 6", "", at=101.5))
    found = judge(trial, [wrong, victim], [{**said, "resumed_at": 101.0}, {}], 100.0)
    assert (found.ok, found.wrong) == (False, 1)


def test_nan_in_the_step_of_the_fault_counts_only_with_a_verdict() -> None:
    trial = Trial("raise", "experts", 1, "symm", 2, "cuda")
    victim = RankReport(1, "raised", raised=Raised("Deliberate", "", "", at=100.0))
    told = RankReport(0, "raised", raised=Raised("RankLost", "rank 1 raised: Deliberate", "", 101.0, 1, "raised"))
    for report, right in ((told, True), (RankReport(0, "ok"), False)):
        found = judge(trial, [report, victim], [{"nan": True}, {}], 100.0)
        assert (found.ok, found.nan, found.wrong) == (right, 1, 0)
    nan = RankReport(0, "raised", raised=Raised("NoNumbers", "step 6", "", at=101.5))
    assert judge(trial, [nan, victim], [{}, {}], 100.0).wrong == 1


def test_the_matrix_sees_wrong_numbers() -> None:
    """Experts that are off by a little are found by the formula, in one process."""
    with World.from_env("cpu") as world:
        job = CheckedLayer(world, "none")
        job.step(1)
        job.experts = replace(job.experts, down=Dense(1.001 * job.experts.down.data))
        with pytest.raises(WrongOutput, match="step 2, rank 0"):
            job.step(2)


@pytest.mark.parametrize("stays", [True, False])
def test_shared_memory_that_stays_is_left_over_and_what_passes_is_not(monkeypatch, stays: bool) -> None:
    monkeypatch.setattr(trial_module, "_MOMENT_S", 0.5)
    before = trial_module.footprint()
    file, path = tempfile.mkstemp(prefix="eprt-", dir="/dev/shm")
    os.close(file)
    others = threading.Timer(0.1, lambda: None if stays else Path(path).unlink())
    others.start()
    try:
        assert (path in trial_module.outlived(before)) == stays
    finally:
        others.join()
        Path(path).unlink(missing_ok=True)

"""The `eprt` command as a user meets it: processes of its own, their output and exit codes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.cases.broken_files import change_config
from support.jobs import rank_jobs as jobs
from support.processes import Python, descendants, environment, run_python, wait_until_gone

from eprt import diagnosis
from eprt.bench.report import Report
from eprt.cli import arguments, doctor, main
from eprt.cli.arguments import Simulation
from eprt.cli.parsing import COMMANDS, parse
from eprt.cli.ranks import ranks
from eprt.cli.terminal import Terminal, configure_logging
from eprt.conformance.cases import CASES
from eprt.conformance.checks import Check
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.models.gpt_oss import GptOss
from eprt.ranks.launcher import WorldFailed, launch


def test_run_reports_for_people(tiny: Path) -> None:
    words = ("run", "--model", tiny, "--world", "2", "--steps", "5")
    done = run_python("-m", "eprt", *words, env=environment())
    assert done.returncode == 0, done.stderr
    said = ("Plan: dispatcher torch, executor torch_grouped", "PASS: 1 MoE layer of", "on 2 gloo ranks, 5 steps each")
    assert all(words in done.stdout for words in (*said, "tolerance 1e-02: bf16 keeps 8 bits")), done.stdout
    assert "layer 1/1: loaded" in done.stderr
    assert "\x1b" not in done.stdout, "no colours outside a terminal"


@pytest.mark.parametrize(
    "words",
    [
        ("--dispatcher", "none", "--executor", "reference"),
        ("--dispatcher", "torch", "--moe-tp", "2"),
        ("--dispatcher", "torch", "--attention-tp", "2"),
    ],
    ids=" ".join,
)
def test_run_json_is_one_object_that_adds_up(tiny: Path, words: tuple[str, ...], capsys) -> None:
    assert main(["run", "--model", str(tiny), "--device", "cpu", "--steps", "4", "--json", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert 0 < result["error"] <= result["tolerance"] == 1e-2
    assert result["plan"]["dispatcher"] == words[1]
    ranks, steps = result["ranks"], result["steps"]
    assert [rank["tokens"] for rank in ranks] == [sum(step["tokens_per_rank"][r] for step in steps) for r in range(4)]
    assert any(0 in step["tokens_per_rank"] and any(step["tokens_per_rank"]) for step in steps), "a rank was idle"
    for kind in ("copies", "bytes"):
        assert sum(rank[f"{kind}_sent"] for rank in ranks) == sum(rank[f"{kind}_received"] for rank in ranks) > 0
    assert all(rank["seconds"]["dispatch"] > 0 for rank in ranks)


@pytest.mark.parametrize(
    ("executor", "tolerance", "why"),
    [("torch_grouped", 1e-2, "experts in mxfp4 are computed in bf16; "), ("reference", 1e-5, "float32 on both sides")],
)
def test_packed_experts_of_a_float32_model_are_held_to_what_computes_them(
    tiny, tmp_path, executor, tolerance, why, capsys
):
    folder = change_config(shutil.copytree(tiny, tmp_path / "float32"), dtype="float32")
    words = ("--world", "2", "--steps", "2", "--executor", executor, "--device", "cpu", "--json")
    assert main(["run", "--model", str(folder), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tolerance"] == tolerance
    assert result["tolerance_because"].startswith(why)


def test_what_libraries_print_is_not_part_of_the_result() -> None:
    code = """
import os
from eprt.cli.terminal import Terminal, stdout_of_our_own
with stdout_of_our_own():
    os.write(1, b"[Gloo] Rank 0 is connected")
    Terminal(json=True).result({"ok": True})
print("afterwards")
"""
    done = run_python("-c", code)
    assert done.stdout == '{"ok": true}\nafterwards\n'
    assert done.stderr == "[Gloo] Rank 0 is connected"


def test_run_joins_torchrun(tiny: Path) -> None:
    words = ["--nproc-per-node", "2", "-m", "eprt", "run", "--model", tiny, "--steps", "2", "--json"]
    done = run_python("-m", "torch.distributed.run", "--standalone", *words, env=environment())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one rank speaks
    assert result["ok"]
    assert result["world"] == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bench experts --shapes one two one --tokens 8 1 8", {"shapes": ("one", "two"), "tokens": (8, 1)}),
        ("bench layer --shapes tiny tiny", {"shapes": ("tiny",)}),
        ("bench dispatch --simulate --ranks 16 16", {"simulation": Simulation(ranks=(16,))}),
    ],
)
def test_what_is_named_twice_is_measured_once(words: str, expected: dict[str, object]) -> None:
    found = parse(words.split())
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--world", "2", "--moe-tp", "3"), "moe_tp_size 3 doesn't divide world_size 2"),
        (("--world", "2", "--dispatcher", "symm"), "symm: runs on cuda, not on cpu"),
        (("--world", "2", "--dispatcher", "nccl"), "dispatcher 'nccl' doesn't exist; choose from none, torch"),
        (("--world", "0"), "--world 0: must be at least 1"),
        (("--world", "999", "--device", "cuda"), "--device cuda: 999 ranks on this host"),
        (("--steps", "0"), "must be at least 1"),
        (("--model", "/no/such/model"), "eprt: CheckpointError: /no/such/model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_refusal_is_one_block_without_traceback(tiny: Path, words: tuple[str, ...], text: str, capsys) -> None:
    assert main(["run", "--model", str(tiny), "--device", "cpu", *words]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out


def test_a_model_without_moe_layers_is_refused(tiny: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(GptOss, "moe_layers", lambda *_: [])
    assert main(["run", "--model", str(tiny), "--device", "cpu", "--world", "1"]) == 2
    assert "the gpt_oss model has no MoE layers" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("RANK", "0"), ("WORLD_SIZE", "abc"), ("LOCAL_WORLD_SIZE", "x")])
def test_half_an_environment_of_torchrun_is_refused(tiny: Path, name: str, value: str, monkeypatch, capsys) -> None:
    if name == "LOCAL_WORLD_SIZE":
        monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(name, value)
    assert main(["run", "--model", str(tiny), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("eprt: ConfigError: the environment says")
    assert f"{name}='{value}'" in said


def test_numbers_that_json_has_not_got_are_null(tmp_path: Path, capsys) -> None:
    Terminal(json=True).result({"error": float("inf"), "steps": [{"error": float("nan")}, 1.5], "ok": False})
    assert json.loads(capsys.readouterr().out) == {"error": None, "steps": [{"error": None}, 1.5], "ok": False}
    Report("dispatch", [{"error": float("nan"), "us": 1.5}], {"rate": float("inf")}).write(tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert (found["rows"], found["limits"]) == ([{"error": None, "us": 1.5}], {"rate": None})


def test_under_torchrun_the_rank_that_fails_alone_says_why(tiny: Path) -> None:
    """The harness gives its ranks torchrun's environment."""
    words = [["run", "--model", model, "--device", "cpu", "--steps", "2"] for model in (str(tiny), "/no/such/model")]
    with pytest.raises(WorldFailed) as failure:
        launch(jobs.command, 2, words=words, timeout_s=30, grace_s=0.5)
    assert "eprt: rank 1: CheckpointError: /no/such/model" in failure.value.reports[1].log_tail
    assert failure.value.reports[1].exit_code == 2


def has_met(rank: int) -> bool:
    """Tells whether a rank's World is made: the loops of the store, the guard and gloo are there then."""
    with suppress(OSError):  # it has just ended, or closed one
        return sum("eventpoll" in os.readlink(opened) for opened in Path(f"/proc/{rank}/fd").iterdir()) >= 3
    return False


def start_long_run(tiny: Path, folder: Path) -> tuple[Python, list[int]]:
    """A run in `folder` that would take minutes, once its 2 ranks are driving steps; and the ranks' process ids."""
    words = ("run", "--model", tiny, "--world", "2", "--steps", "100000")
    process = Python("-m", "eprt", *words, cwd=folder, env=environment())
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        ranks: list[int] = []
        with suppress(ProcessLookupError):  # one of them has just ended
            ranks = [pid for pid in descendants(process.pid) if os.getsid(pid) == pid]
        if len(ranks) == 2 and all(map(has_met, ranks)):
            time.sleep(1.0)  # into the steps
            return process, ranks
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the ranks didn't start: {process.communicate()}")


@pytest.mark.timeout(200)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "became", "seconds"),
    # A dead process is seen at once. A stopped one is silent for 10 s, then its stack is asked for.
    [(signal.SIGKILL, "rank 1 was killed by SIGKILL", 30), (signal.SIGSTOP, "rank 1 did not finish: stopped", 70)],
)
def test_a_broken_rank_ends_the_run_with_its_name_and_all_stacks(
    tiny: Path, tmp_path: Path, number: signal.Signals, became: str, seconds: float
) -> None:
    process, ranks = start_long_run(tiny, tmp_path)
    with process:
        os.kill(ranks[1], number)
        stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == 75
    first, *reports = stderr[stderr.index("WorldFailed: ") :].split("--- rank ")
    assert "a world of 2 ranks failed" in first
    assert became in first
    assert "PASS" not in stdout
    assert len(reports) == 2
    for number_of_rank, report in enumerate(reports):
        assert report.startswith(f"{number_of_rank} ")
        gone = number_of_rank == 1 and number == signal.SIGKILL
        # A rank that is stopped between two jobs is in the launcher's loop, not in run.py.
        assert ("no stack: the process is gone" if gone else "ranks/process.py") in report
    wait_until_gone(ranks)


@pytest.mark.timeout(200)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks_and_leaves_no_folder(
    tiny: Path, tmp_path: Path, short_folder: Path, monkeypatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    process, ranks = start_long_run(tiny, tmp_path)
    with process:
        assert list(short_folder.glob("eprt-world-*"))
        all_of_it = descendants(process.pid)
        assert set(ranks) < set(all_of_it), "and what ranks are forked from"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr + stdout
    if number == signal.SIGINT:
        assert "interrupted; all ranks that this command started have been ended" in stderr
    wait_until_gone(all_of_it)
    assert not list(short_folder.glob("eprt-*"))


def test_help_in_a_terminal_of_five_columns_comes_at_once(monkeypatch, capsys) -> None:
    """Laid out in five, it took two minutes."""
    monkeypatch.setenv("COLUMNS", "5")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert len(capsys.readouterr().out.splitlines()[-1]) == 40
    assert os.environ["COLUMNS"] == "5"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_an_option_is_broken_where_the_terminal_ends_and_nowhere_else(name: str, monkeypatch, capsys) -> None:
    """tyro keeps the line ends of a field's own docstring, and those before what is no letter."""
    monkeypatch.setenv("COLUMNS", "4000")
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    assert not re.findall(r"^.? (?:-.*?)? {2,}\w.*\n.? {5,}\S.*", capsys.readouterr().out, flags=re.MULTILINE)


def test_doctor_reports_this_machine(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert {b["name"] for b in report["backends"]} == set(DISPATCHERS) | set(EXECUTORS)
    usable = {b["name"]: b for b in report["backends"]}
    assert usable["torch"]["ok"]
    assert usable["torch_grouped"]["ok"]
    assert "runs on cuda" in usable["symm"]["reason"]
    assert any("fused_moe_90" in item["kernels"] and "20 min" in item["takes"] for item in report["first_use"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--output x.json", "--output: of the trials of --faults: add it"),
        ("--run --resume --trials 3 --device cuda", "--device, --trials, --resume: of the trials of --faults: add it"),
        ("--world 2", "--world 2: CPU ranks of --run, and of --faults"),
        ("--faults --device cuda --world 2", "on GPUs there is a rank for each"),
        ("--faults --seeds", "0 --seeds: expected at least 1 of each"),
        ("--faults --trials 0", "--trials 0, --jobs 1, 1 --seeds: expected at least 1 of each"),
        ("--run --world 0", "--world 0: must be at least 1"),
        ("--faults --world 1", "1 cpu ranks: it takes at least 2; use --device cpu --world 2"),
    ],
)
def test_flags_that_doctor_could_do_nothing_with_are_refused(words: str, says: str, capsys) -> None:
    assert main(["doctor", *words.split()]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert not said.out, "refused before the report"


def test_doctor_finds_what_is_wrong(monkeypatch) -> None:
    versions = {"deep-ep": "1.0.0", "flashinfer-python": "0.7.2", "flashinfer-jit-cache": "0.7.1+cu130"}
    monkeypatch.setattr(diagnosis, "_version", versions.get)
    monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda name: object() if name == "deep_ep" else None)
    monkeypatch.setattr(diagnosis, "_has_nvshmem", lambda: False)
    with monkeypatch.context() as slow:
        slow.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("python", 120)))
        assert diagnosis._import_error("deep_ep") == "not in 120 s"
    undefined = "ImportError: undefined symbol: _ZN3c104cuda9SetDevice"
    monkeypatch.setattr(diagnosis, "_import_error", lambda name: undefined)
    monkeypatch.setattr(diagnosis, "links", lambda: "\tGPU0\tGPU1\tCPU\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: name)
    found = {problem.what: problem.remedy for problem in diagnosis.problems()}
    for says in (
        "deep-ep 1.0.0 is a placeholder",
        "libnvshmem_host.so.3 can't be loaded",
        "built against another torch",
        "flashinfer-jit-cache 0.7.1+cu130 is for another release",
        "GPU0 reaches other GPUs by PHB, not by NVLink",
    ):
        assert says in "\n".join(found)
    assert next(found[what] for what in found if "a CPU build" in what).startswith("pip uninstall torch; ")
    assert "tokenspeed-deepep>=1.2.1,<2" in found[next(what for what in found if "placeholder" in what)]
    assert next(found[what] for what in found if "another release" in what).endswith("flashinfer.ai/whl/cu130")


def test_doctor_proof_passes_and_fails(monkeypatch, capsys) -> None:
    few = [Check("transport", case, "torch") for case in CASES[:3]]
    monkeypatch.setattr(doctor, "standard_checks", lambda size, device: few)
    assert main(["doctor", "--run", "--world", "2"]) == 0
    assert "PASS: 3 of 3 checks on 2 cpu ranks" in capsys.readouterr().out

    real = doctor.summarize
    broken = lambda rows: [dataclasses.replace(row, ok=False, detail="call 0: wrong") for row in real(rows)]  # noqa: E731
    monkeypatch.setattr(doctor, "summarize", broken)
    assert main(["doctor", "--run", "--world", "2"]) == 1
    assert "FAIL: 0 of 3 checks" in capsys.readouterr().out


def test_doctor_proves_as_many_ranks_as_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4, the default, attention TP of 2 can be checked; of these 3 it can't."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    asked: list[int] = []
    monkeypatch.setattr(doctor, "standard_checks", lambda size, device: asked.append(size) or [])
    assert doctor._prove("cpu", 4, Terminal(json=True, speaks=False))["size"] == 3
    assert asked == [3]


def test_flags_stay_few() -> None:
    """A flag is a promise: adding one means changing this table."""
    for kind, names in (
        (arguments.Run, "attention_tp device dispatcher executor json layers model moe_tp plugin steps world"),
        (arguments.Explain, "attention_tp device hosts json model moe_tp plot plugin ranks_per_host runtime world"),
        (arguments.Doctor, "device faults jobs json output plugin resume run seeds trials world"),
    ):
        assert " ".join(sorted(field.name for field in dataclasses.fields(kind))) == names


def test_ranks_other_than_0_are_silent(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    terminal = Terminal(json=False)
    terminal.say("hello")
    terminal.table("title", {"a": "a"}, [{"a": "b"}])
    terminal.error("bad")
    Terminal(json=True).result({"a": 1})
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    monkeypatch.setenv("EPRT_LOG", "")
    assert main(["explain", "--model", "gpt-oss-20b"]) == 0, "which has nothing to do with other ranks"
    assert "Choice: dispatcher" in capsys.readouterr().out


def test_logging_leaves_the_root_logger_alone(monkeypatch) -> None:
    logger = logging.getLogger("eprt")
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    own = (logger.level, list(logger.handlers))
    try:
        monkeypatch.setenv("EPRT_LOG", "info")
        configure_logging()
        assert logger.level == logging.INFO
        assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before
    finally:
        logger.setLevel(own[0])
        logger.handlers[:] = own[1]
    assert main(["explain", "--model", "/no/such"]) == 2
    monkeypatch.setenv("EPRT_LOG", "loud")
    assert main(["explain", "--model", "/no/such"]) == 2


@pytest.mark.parametrize(
    ("gpus", "asked", "device", "found"),
    [
        (0, None, "auto", (4, "cpu")),
        (1, None, "auto", (1, "cuda")),
        (2, None, "cuda", (2, "cuda")),
        (1, None, "cpu", (4, "cpu")),
        (1, 2, "auto", (2, "cpu")),
    ],
)
def test_a_rank_for_each_gpu_unless_told_otherwise(monkeypatch, gpus, asked, device, found) -> None:
    """torch.cuda is played here; no rank starts before its first job."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with ranks(asked, device) as workers:
        assert (workers.size, workers.device) == found

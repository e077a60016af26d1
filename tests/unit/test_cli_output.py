"""The command where nothing can be shown or written, and where it was started by something else than torchrun."""

from __future__ import annotations

import builtins
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.processes import environment, run_python

from eprt.cli import main
from eprt.cli.journal import Journal
from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.errors import ConfigError
from eprt.files import write_whole
from eprt.placement.file import PlacementFile
from eprt.ranks.scratch import MAX_TMPDIR, Scratch, sweep
from eprt.world import World

EXPLAIN = "explain --model config.json --device sm90"


def shell(line: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    settings = environment(EPRT=f"{sys.executable} -m eprt", **changes)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, cwd=cwd, env=settings)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("$EPRT --version >&-", 74, "eprt: standard output is closed"),
        ("$EPRT --version > /dev/full", 74, "eprt: the result couldn't be written: No space left"),
        ("$EPRT --help > /dev/full", 74, "eprt: the result couldn't be written: No space left"),
        ("$EPRT --help | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("$EPRT plan-experts --slots 8 --experts 8 --out /dev/stdout", 2, "eprt: ConfigError: --out /dev/stdout: what"),
        ("$EPRT generate --output /dev/fd/2", 2, "eprt: ConfigError: --output /dev/fd/2: what the command says"),
        (f"$EPRT {EXPLAIN} --json > /dev/full 2> /dev/full", 74, ""),
        ("$EPRT explain --model /no/such 2> /dev/full", 2, ""),
        ("$EPRT plan-experts --slots 8 --experts 8 2> >(true)", 0, ""),  # progress, to a reader who has gone
        (f"$EPRT {EXPLAIN} --json > /dev/full", 74, "eprt: the result couldn't be written: No space left"),
    ],
)
def test_where_nothing_can_be_shown(tiny: Path, line: str, code: int, says: str) -> None:
    done = shell(line, tiny)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(says)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) == bool(says)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: Journal(path, {}, 1, []),
        lambda path: write_whole(path, "found"),
        PlacementFile(2, 1, {0: (0, 1)}).write,
        write_tiny_checkpoint,
    ],
    ids=["journal", "result", "placement", "tiny model"],
)
def test_a_full_disk_is_named_by_the_file(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path, (soft, hard) = tmp_path / "file.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as there: a file is made, and takes nothing
    try:
        with pytest.raises((OSError, ConfigError), match="File too large") as told:
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(told.value).count(str(path)) == 1


def test_a_path_that_the_locale_cannot_show(tmp_path: Path) -> None:
    changes = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = shell("$EPRT explain --model $'mod\\xc3\\xa8le'", tmp_path, **changes)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no such file" in done.stderr


def test_a_user_without_a_home(tmp_path: Path, monkeypatch, capsys) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "EPRT_PLAN_ROWS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == main(["explain", "--model", "gpt-oss-20b"]) == 0
    assert main(["tune", "--model", "gpt-oss-20b"]) == 2
    assert "no home folder to keep rows in: EPRT_PLAN_ROWS names a file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate", "transformers is not installed: pip install 'transformers>=5.17'"),
        ("warm --model gpt-oss-20b", "triton is not installed: pip install 'triton>=3.6'"),
    ],
)
def test_a_library_that_is_not_there_is_named(words: str, says: str, monkeypatch, capsys) -> None:
    missing = says.partition(" ")[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == missing else find_spec(name))
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


def test_version(tmp_path: Path) -> None:
    done = shell("$EPRT --version", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("eprt ")


def test_ctrl_c_while_the_flags_are_imported_is_one_line(monkeypatch, capsys) -> None:
    def interrupted(name: str, *rest: Any) -> Any:
        if name == "eprt.cli.parsing":
            raise KeyboardInterrupt
        return imported(name, *rest)

    imported = builtins.__import__
    monkeypatch.setattr("builtins.__import__", interrupted)
    assert main(["--version"]) == 130
    assert capsys.readouterr().err.startswith("eprt: interrupted")


def test_an_unknown_flag_is_answered_with_its_own_commands(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "--stepz", "3"])
    assert left.value.code == 2
    said = "".join(capsys.readouterr())
    assert "--steps" in said
    assert "explain" not in said
    assert "bench" not in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--help", 0, "eprt --version"),
        ("help", 2, "run, generate, explain"),
        ("help --help", 2, "run, generate, explain"),
        ("bench", 2, "run eprt bench --help"),
        ("bench nothing --help", 2, "layer, dispatch, experts"),
        ("bench --help", 0, "Measure a layer, the transports"),
    ],
)
def test_what_is_no_command_has_no_help(words: str, code: int, said: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == code
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_that_know_nothing_of_each_other_are_no_worlds_of_one(name: str, monkeypatch) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"{name}=4, but no WORLD_SIZE"):
        World.from_env("cpu")
    monkeypatch.setenv(name, "1")
    World.from_env("cpu").close()


def test_one_rank_and_one_step_are_singular(tiny: Path, capsys) -> None:
    words = ["run", "--model", str(tiny), "--world", "1", "--steps", "1", "--device", "cpu", "--json"]
    assert main(words) == 0
    assert "ran on 1 gloo rank, 1 step each" in json.loads(capsys.readouterr().out)["what"]


def test_a_long_tmpdir_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * max(1, MAX_TMPDIR - len(str(tmp_path))))
    folder.mkdir()
    done = run_python("-m", "eprt", "run", "--world", "2", env=os.environ | {"TMPDIR": str(folder)})
    assert done.returncode == 2
    assert f"set TMPDIR to one of at most {MAX_TMPDIR}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_killed_process_left_is_removed_by_the_next(short_folder: Path, monkeypatch) -> None:
    hold = (
        "import time\nfrom eprt.ranks.scratch import Scratch\nheld = Scratch('tiny')\n"
        "print(held.path, flush=True)\ntime.sleep(60)"
    )
    settings = os.environ | {"TMPDIR": str(short_folder)}
    with subprocess.Popen([sys.executable, "-c", hold], env=settings, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        (left / "file").write_text("x")
        sweep(short_folder)
        assert left.is_dir(), "its process lives"
        child.send_signal(signal.SIGKILL)
    (short_folder / "eprt-somebody-elses").mkdir()
    sweep(short_folder)
    assert not left.exists()
    assert (short_folder / "eprt-somebody-elses").is_dir()
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    with Scratch("world") as mine:
        assert mine.is_dir()
    assert not mine.exists()

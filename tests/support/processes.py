"""Processes of this machine, for tests that start some and see them end. Needs /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eprt.world.process import ended


def environment(**changes: str) -> dict[str, str]:
    """That of a process on the CPU which no launcher started, with these changes."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "EPRT_JOB")
    own = {name: value for name, value in os.environ.items() if name not in launchers}
    return own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


class Python(subprocess.Popen[str]):
    """`python WORDS` with three pipes; `with` ends it by SIGKILL."""

    def __init__(self, *words: object, **settings: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        super().__init__([sys.executable, *map(str, words)], text=True, **pipes, **settings)

    def __exit__(self, *raised: Any) -> None:
        self.kill()
        super().__exit__(*raised)


def run_python(*words: object, timeout: float = 100.0, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Returns what `python WORDS` said and its exit code."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **settings)


def run_in_session(command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float) -> int:
    """Runs a program in a session of its own, which ends with all that it started. Returns its exit code. Its output
    goes to `log`: engines leave processes behind that would hold a pipe."""
    with log.open("wb") as stream:
        program = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
        try:
            return program.wait(limit_s)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(program.pid)], check=False)


def descendants(pid: int) -> list[int]:
    """Processes below `pid` that are still running."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents[int(entry.name)] = int(fields[1])
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {pid})


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not (running := [pid for pid in pids if not ended(pid)]):
            return
        time.sleep(0.05)
    raise AssertionError(f"processes {running} are still there")


def command(pid: int) -> bytes:
    """Returns the arguments of a process; nothing of one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

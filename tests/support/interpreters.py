"""Interpreters that tests start, forked from one that has imported torch: a new one takes 2 s of a core for that.

Workers of pytest-xdist share a pair to fork from (`share`), and the servers that ranks come from are forked from it,
too. It is a pair as those servers are: for two hash seeds.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import util
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest import mock

from eprt.ranks import servers

SHARED = "EPRT_TEST_INTERPRETERS"
TESTS = Path(__file__).parents[1]


def share() -> None:
    """Starts the pair for all processes that this one starts from now on."""
    os.environ[SHARED] = json.dumps([_started() for _ in range(2)])


@cache
def _own() -> str:
    return _started()


def _started() -> str:
    """Starts an interpreter to fork from, which ends with this process. Returns the path of its socket."""
    folder = Path(tempfile.mkdtemp(prefix="eprt-tests-", dir="/tmp"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(128)
        words = ["-m", "support.forking_interpreter", str(listener.fileno()), *servers._PRELOAD]
        paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
        files = {"pass_fds": [listener.fileno()], "stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        child = subprocess.Popen([sys.executable, *words], **files, env=os.environ | paths)
    atexit.register(lambda: (child.communicate(), (folder / "socket").unlink(), folder.rmdir()))
    return str(folder / "socket")


def _forked(path: str, words: Sequence[str], files: dict[int, int], **settings: Any) -> tuple[socket.socket, int]:
    """Starts `python WORDS` with our descriptors under the numbers of `files`. Returns who tells of its end, and its
    process id."""
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    settings = {"cwd": os.getcwd(), "env": dict(os.environ), "session": False, "finalizes": False} | settings
    request = {"words": words, "files": list(files), "blocked": blocked, **settings}
    said = json.dumps(request, default=str).encode()
    told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told.connect(path)
    socket.send_fds(told, [said], list(files.values()))
    return told, int(told.recv(64))


class Interpreter:
    """As `subprocess.Popen([sys.executable, *words], text=True)` with three pipes; `with` ends it by SIGKILL.

    Settings: `cwd`; `env`; `session`: in one of its own; `finalizes`: see forking_interpreter.py.
    """

    def __init__(self, *words: object, **settings: Any) -> None:
        pipes = os.pipe(), os.pipe(), os.pipe()
        theirs, ours = zip(pipes[0], *(pipe[::-1] for pipe in pipes[1:]), strict=True)
        self.returncode: int | None = None
        path = json.loads(os.environ[SHARED])[0] if SHARED in os.environ else _own()
        self._told, self.pid = _forked(path, list(map(str, words)), dict(enumerate(theirs)), **settings)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin, self.stdout, self.stderr = map(open, ours, "wrr")

    def poll(self) -> int | None:
        return self.returncode if self._ended(0) else None

    def _ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            self.returncode = int(self._told.recv(64))
            self._told.close()
        return self.returncode is not None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what it writes until it ends, and closes the pipes."""
        self.stdin.close()
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as both:
            said = [both.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            out, err = (each.result() for each in said)
        return out, err

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.communicate()


def run(*words: object, timeout: float = 100.0, **settings: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *words], capture_output=True, text=True)`."""
    started = Interpreter(*words, **settings)
    out, err = started.communicate(timeout)
    return subprocess.CompletedProcess(words, started.wait(), out, err)


class _Server(ForkServer):
    """multiprocessing's fork server, which is itself forked."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def ensure_running(self) -> None:
        if self._forkserver_pid is None:  # it is nobody's child, so it can't be waited for
            with mock.patch.object(util, "spawnv_passfds", self._spawn):
                super().ensure_running()

    def _spawn(self, _: object, arguments: list[str], descriptors: list[int]) -> int:
        with open(os.devnull) as nothing:
            files = {0: nothing.fileno(), 1: 1, 2: 2} | {number: number for number in descriptors}
            told, pid = _forked(self._path, arguments[-2:], files)
        told.close()
        return pid


def fork_servers() -> None:
    """Lets the ranks of this process come from the pair that is shared, if one is."""
    if SHARED in os.environ:
        servers._SERVERS = tuple(map(_Server, json.loads(os.environ[SHARED])))

"""A process among others: what it tells the ranks that it means to meet, what it sees of another process, and how it
waits for calls that may never return (stores whose host stopped, groups whose members died).

torch's own timeouts don't cover such calls (a TCPStore call waits for its host's answer without end, torch 2.13), and
nothing wakes a thread inside one. So each gets a thread of its own, and the caller waits no longer than it likes.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from eprt import __version__
from eprt.errors import ConfigError, RankLost, one_block
from eprt.json_files import shown

logger = logging.getLogger("eprt")
T = TypeVar("T")

MAX_TIMEOUT_S = 30 * 24 * 3600
_MAX_RECORD_BYTES = 16_384
_LOOK_S = 0.02
_PROCESS = secrets.token_hex(8)
# Where launchers say which job this is; the first that is set counts.
JOB_VARIABLES = (
    "EPRT_JOB",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "PMIX_NAMESPACE",
)


@dataclass(frozen=True)
class Member:
    """The record that a process writes about itself.

    Attributes:
        process: differs between any two processes.
        boot, pids, net: where its process number and its loopback address mean something: the running kernel, the PID
            and the network namespace.
        size: of the World it means to join.  layout: how that one is to be divided, and between devices of which kind.
        restarts: how often its launcher says that it started the ranks again. Each torchrun agent counts by itself.
    """

    process: str
    host: str
    boot: str
    pids: str
    net: str
    pid: int
    size: int
    layout: str
    restarts: int
    eprt: str
    torch: str

    @classmethod
    def here(cls, size: int, layout: str = "") -> Member:
        pid = os.getpid()
        release = torch.__version__.partition("+")[0]
        place = socket.gethostname(), boot_id(), _space("pid"), _space("net")
        return cls(f"{_PROCESS}.{pid}", *place, pid, size, layout, restarts(), __version__, release)

    @classmethod
    def parse(cls, raw: bytes) -> Member | None:
        """Returns the record that these bytes are, or None."""
        found = record(raw) or {}
        if {name: type(value).__name__ for name, value in found.items()} != {f.name: f.type for f in fields(cls)}:
            return None
        cut: dict[str, Any] = {name: one_block(x, 200) if isinstance(x, str) else x for name, x in found.items()}
        return cls(**cut)

    @property
    def home(self) -> tuple[str, str, str]:
        """Returns a key that is equal for processes that see each other's numbers.

        Hosts may share a name, and namespaces their numbers.
        """
        return self.host, self.boot, self.pids

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def number_of(name: str, least: int = 0) -> int:
    """Returns the whole number that a launcher's variable holds, `least` without it. Raises ConfigError, naming it."""
    said = os.environ.get(name, str(least))
    if not (said.isascii() and said.isdigit() and len(said) < 20 and least <= int(said) < 2**31):
        raise ConfigError(
            f"the environment says {name}={shown(said)}: expected a number from {least} to 2^31 - 1, as torchrun sets "
            "it"
        )
    return int(said)


def require_timeout(timeout_s: object) -> None:
    """Raises ConfigError for what is no time to wait."""
    ok = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and 0 < timeout_s <= MAX_TIMEOUT_S
    if not ok:
        raise ConfigError(f"timeout_s {shown(timeout_s)}: expected seconds above 0, at most {MAX_TIMEOUT_S}")


def restarts() -> int:
    """Returns how often this rank's torchrun agent says that it restarted its ranks; 0 without one."""
    return number_of("TORCHELASTIC_RESTART_COUNT")


def job_name() -> str:
    """Returns the launcher's name of this job, as it may be shown; "" if no launcher sets one."""
    return one_block(next((f"{name}={os.environ[name]}" for name in JOB_VARIABLES if os.environ.get(name)), ""))


def boot_id() -> str:
    """Returns the running kernel's boot id: equal in all of its containers, different on other hosts; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boot_time() -> float:
    """Returns seconds since the running kernel started: one clock for all of its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_at() -> float:
    """Returns when this process started, by `boot_time`; infinity where that can't be known."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return math.inf
    return ticks / os.sysconf("SC_CLK_TCK")


def ended(pid: int) -> bool:
    """Returns whether a process of this host has ended (a zombie has)."""
    return state(pid) in ("", "Z", "X")


def stopped(pid: int) -> bool:
    """Returns whether a process of this host is stopped (SIGSTOP, a debugger)."""
    return state(pid) in ("T", "t")


def state(pid: int) -> str:
    """Returns the letter of a process of this host in /proc; "" if it is gone, "unknown" where that can't be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it went between open and read
        return "" if Path("/proc/self/stat").exists() else "unknown"
    except OSError:
        return "unknown"


def _space(kind: str) -> str:
    link = Path(f"/proc/self/ns/{kind}")
    return str(link.readlink()) if link.is_symlink() else ""


def record(raw: bytes) -> dict[str, Any] | None:
    if len(raw) > _MAX_RECORD_BYTES:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def bounded(call: Callable[[], T], limit_s: float, check: Callable[[], None] = lambda: None) -> T:
    """Returns or raises what `call()` does in another thread. What `check()` raises meanwhile ends the wait.

    Raises TimeoutError where nothing came back within `limit_s`. The thread stays behind, so this process can't end the
    ordinary way: at exit it leaves at once, with code 75.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="eprt-bounded", daemon=True).start()
    deadline = time.monotonic() + limit_s
    try:
        while not wait([outcome], _LOOK_S).done and time.monotonic() < deadline:
            check()
    finally:
        if not outcome.done():
            at_exit_leave()
    if not outcome.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return outcome.result()


def at_exit_leave(*, if_uncaught: bool = False) -> None:
    """Ends the process with code 75 at interpreter exit, without waiting for threads that never come back.

    Args:
        if_uncaught: only if an uncaught RankLost is what ends the interpreter.
    """
    pid = os.getpid()

    def leave() -> None:
        if os.getpid() == pid and (not if_uncaught or isinstance(getattr(sys, "last_value", None), RankLost)):
            leave_at_once(RankLost.exit_code)

    atexit.register(leave)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for its threads, also where a stream is closed or takes nothing any more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)

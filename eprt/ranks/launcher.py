"""Starts rank processes, runs jobs in them and watches them from one parent.

`WorldPool` keeps W ranks alive between jobs, so that a test costs milliseconds; `launch` starts a world for one job.
Whatever a rank does (dies, raises, exits early, stops, sleeps, holds the GIL), the parent gets an answer in bounded
time: the results, or one `WorldFailed` that names the failed rank and shows every rank's stack. No process outlives it.

    def hello(context, word):              # in an importable module
        return f"{word} from {context.rank}"

    with WorldPool(4) as pool:
        pool.run(hello, word="hi")         # ["hi from 0", ..., "hi from 3"]

Ranks are forked from two server processes that have imported torch and touched neither threads nor CUDA: 15 ms for a
world of 4, where spawning interpreters takes 2 s. Ranks 0 and 1 have other hash seeds, unless PYTHONHASHSEED is set. As
with all of multiprocessing, a script that does this at its top level needs `if __name__ == "__main__":`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eprt.errors import ConfigError, UsageError
from eprt.ranks.process import Raised, RankContext, RankSetup, serve
from eprt.ranks.scratch import Scratch
from eprt.ranks.servers import server_of, start_servers
from eprt.ranks.stacks import RankReport, WorldFailed, read_stack, state_of, tail

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["RankContext", "RankReport", "WorldFailed", "WorldPool", "launch"]

_STACK_WAIT_S = 2.0
_QUIET_S = 0.5  # after which a dump without its last frame is taken to be over: one being written may wait for a core
_STOPPED_AFTER_S = 10.0  # a rank stopped by a signal for this long has failed, whatever the job's limit
_LOOK_S = 1.0
_CLOSE_S = 60.0  # of GPU worlds with gigabytes of mapped memory, too


class _Rank:
    """One process and the parent's end of its pipe."""

    def __init__(self, setup: RankSetup) -> None:
        context = multiprocessing.get_context("forkserver")
        self.setup = setup
        self.heard_at = 0.0  # when it ended its last job, or itself
        self.jobs, theirs = context.Pipe()
        # A daemon: should the parent leave without closing the pool, multiprocessing ends it.
        self.process = context.Process(target=serve, args=(setup, theirs), daemon=True)
        with server_of(setup.rank):
            self.process.start()
        theirs.close()

    def send(self, name: str) -> None:
        with suppress(OSError):  # already gone: the watch finds that out and says why
            self.jobs.send(name)

    def receive(self) -> str:
        """Returns "ok" or "raised", or "died" if the process is gone without having said either."""
        try:
            return self.jobs.recv() if self.jobs.poll() else "died"
        except (EOFError, OSError):
            return "died"

    def result(self) -> Any:
        return pickle.loads(self.setup.path("result").read_bytes())

    def reap(self) -> None:
        """Waits for a rank that got SIGKILL. Removes the memory that its World was about to share."""
        self.process.join(_STACK_WAIT_S)
        self.jobs.close()
        for path in Path("/dev/shm").glob(f"eprt-{self.process.pid}-*"):
            path.unlink(missing_ok=True)


class WorldPool:
    """Runs jobs on W rank processes until the pool is closed.

    Args:
        size: W.
        device: "cpu" (gloo) or "cuda" (NCCL, rank r on GPU r).
        share_gpu: ranks may be more than GPUs, for tests of the `symm` dispatcher, which needs no NCCL. Their kernels
            take turns on the GPU: times mean nothing.
        timeout_s: default limit of one job; a job over it fails with every rank's stack.
        grace_s: after the first failure, how long the other ranks may take to report what they saw.

    Raises:
        ConfigError: more CUDA ranks than GPUs, or a size below 1.
    """

    def __init__(
        self, size: int, device: str = "cpu", timeout_s: float = 60.0, grace_s: float = 1.0, *, share_gpu: bool = False
    ) -> None:
        import torch

        from eprt.world.groups import SHARED_GPU

        if size < 1:
            raise ConfigError(f"a world of {size} ranks: size must be at least 1")
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"device {device!r}: expected 'cpu' or 'cuda'")
        if device == "cuda" and (found := torch.cuda.device_count()) < (1 if share_gpu else size):
            raise ConfigError(f"ranks on CUDA: {size}, GPUs here: {found}; expected a GPU for each, or device='cpu'")
        self.size, self.device, self.timeout_s, self.grace_s = size, device, timeout_s, grace_s
        self.closed = False
        self._environment = {SHARED_GPU: "1"} if share_gpu else {}
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = None
        self._folder: Scratch | None = None
        self._jobs = 0

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty while no world is up."""
        return [rank.process.pid or 0 for rank in self._ranks]

    @property
    def folder(self) -> Path | None:
        """The folder of logs, jobs and results while a world is up."""
        return None if self._folder is None else self._folder.path

    def run(
        self,
        function: Callable[..., Any],
        *,
        timeout_s: float | None = None,
        not_awaited: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `function(context, **kwargs)` on every rank at once; returns the results in rank order.

        Args:
            function: importable by name. An exception it expects, it catches and returns: one that leaves it is a
                failure of the world.
            timeout_s: limit for this job, start-up included.
            not_awaited: a rank that will hang: the job ends as WorldFailed once all others have reported.
            kwargs: picklable, the same for every rank.

        Raises:
            WorldFailed: a rank died, raised, or didn't finish in time. The ranks are gone; the next run starts new
                ones.
            UsageError: the pool is closed.
        """
        if self.closed:
            raise UsageError("the pool is closed; make a new WorldPool")
        try:
            return self._watch(pickle.dumps((function, kwargs)), timeout_s or self.timeout_s, not_awaited)
        except BaseException:  # WorldFailed, Ctrl-C, an unpicklable job: leave no process behind
            self._destroy()
            raise

    def kill(self) -> None:
        """Sends SIGKILL to all ranks and whatever they started, from any thread: the job in progress ends as
        WorldFailed."""
        for pid in filter(None, self.pids):
            _end(pid)

    def close(self) -> None:
        """Closes the ranks' Worlds and ends the processes. Idempotent. Raises WorldFailed if the ranks can't."""
        if self.closed:
            return
        try:
            if self._ranks:
                self.run(RankContext.close, timeout_s=_CLOSE_S)
        finally:
            self.closed = True
            self._destroy()

    def __enter__(self) -> WorldPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        self.closed = True
        self._destroy()

    def _start(self) -> Path:
        """Starts the ranks; returns the world's folder."""
        from torch.distributed import TCPStore

        # The parent owns the store, so its port is taken before any rank is told of it: no race for free ports. torch
        # would listen on every interface.
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, self.size))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._folder = Scratch("world")
        folder = self._folder.path
        start_servers(self.size)
        for rank in range(self.size):
            environment = self._environment_of(rank, self._store.port)
            self._ranks.append(_Rank(RankSetup(rank, self.size, self.device, folder, environment)))
        return folder

    def _environment_of(self, rank: int, port: int) -> dict[str, str]:
        """Returns the parent's variables and the pool's, under torchrun's."""
        return {
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **self._environment,
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.size)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _watch(self, arguments: bytes, timeout_s: float, not_awaited: int | None) -> list[Any]:
        started = time.monotonic()
        folder = self._start() if self._folder is None else self._folder.path
        self._jobs += 1
        name = f"job{self._jobs}"
        (folder / name).write_bytes(pickle.dumps((sys.path, arguments)))
        for rank in self._ranks:
            rank.send(name)
        outcomes: dict[int, str] = {}
        awaited = [rank for rank in self._ranks if rank.setup.rank != not_awaited]
        self._collect(awaited, outcomes, started + timeout_s, stop_at_failure=True)
        if len(outcomes) == self.size and set(outcomes.values()) == {"ok"}:
            (folder / name).unlink()
            return [rank.result() for rank in self._ranks]
        seconds = time.monotonic() - started
        grace_s = self.grace_s if outcomes else 0.0
        self._collect(awaited, outcomes, time.monotonic() + grace_s, stop_at_failure=False)
        raise WorldFailed(self._reports(outcomes), seconds, timeout_s)

    def _collect(self, ranks: list[_Rank], outcomes: dict[int, str], deadline: float, stop_at_failure: bool) -> None:
        """Listens to those of `ranks` that haven't reported, all at once, until the deadline."""
        running_at: dict[int, float] = {}
        while waiting := [rank for rank in ranks if rank.setup.rank not in outcomes]:
            if stop_at_failure and any(outcome != "ok" for outcome in outcomes.values()):
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0 or (stop_at_failure and _long_stopped(waiting, running_at)):
                return
            signals: list[Any] = [rank.jobs for rank in waiting] + [rank.process.sentinel for rank in waiting]
            ready = connection.wait(signals, min(remaining, _LOOK_S))
            for rank in waiting:
                if rank.jobs in ready or rank.process.sentinel in ready:
                    outcomes[rank.setup.rank] = rank.receive()
                    rank.heard_at = time.monotonic()

    def _reports(self, outcomes: dict[int, str]) -> list[RankReport]:
        """Returns how each rank ended; asks those that live for their stacks."""
        ends = [outcomes.get(rank.setup.rank, "unfinished") for rank in self._ranks]
        both = list(zip(self._ranks, ends, strict=True))
        states = [state_of(rank.process.pid or 0) if end == "unfinished" else "" for rank, end in both]
        _ask_for_stacks([rank for rank, end in both if end in ("ok", "unfinished")])
        return [self._report(rank, end, state) for (rank, end), state in zip(both, states, strict=True)]

    def _report(self, rank: _Rank, outcome: str, state: str) -> RankReport:
        raised: Raised | None = rank.result() if outcome == "raised" else None
        if died := outcome == "died":
            rank.process.join(_STACK_WAIT_S)
        dump, waits = read_stack(rank.setup.path("stack"))
        return RankReport(
            rank=rank.setup.rank,
            outcome=outcome,
            state=state,
            exit_code=rank.process.exitcode if died else None,
            raised=raised,
            stack=raised.stack if raised else dump,
            waits_for_others=waits and outcome == "unfinished",
            log_tail=tail(rank.setup.path("log")),
            ended_at=rank.heard_at if died else None,
            result=rank.result() if outcome == "ok" else None,
        )

    def _destroy(self) -> None:
        self.kill()  # all before the first is waited for: a GPU's process takes a second to go
        for rank in self._ranks:
            rank.reap()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def launch(
    function: Callable[..., Any],
    size: int,
    device: str = "cpu",
    timeout_s: float = 60.0,
    grace_s: float = 1.0,
    *,
    share_gpu: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Runs one job on a fresh world of `size` ranks and returns its results. Raises WorldFailed."""
    with WorldPool(size, device, timeout_s, grace_s, share_gpu=share_gpu) as pool:
        return pool.run(function, **kwargs)


def _end(pid: int) -> None:
    """Sends SIGKILL to a process and its group. A stopped process needs SIGCONT to be reaped everywhere."""
    with suppress(ProcessLookupError, PermissionError):
        own_group = os.getpgid(pid) == pid
        for number in (signal.SIGCONT, signal.SIGKILL):
            (os.killpg if own_group else os.kill)(pid, number)


def _long_stopped(ranks: Iterable[_Rank], running_at: dict[int, float]) -> bool:
    """Tells whether a rank has been stopped for too long. No peer need notice: it may be stopped between two jobs."""
    now = time.monotonic()
    for rank in ranks:
        if state_of(rank.process.pid or 0) != "stopped":
            running_at[rank.setup.rank] = now
        elif now - running_at.setdefault(rank.setup.rank, now) > _STOPPED_AFTER_S:
            return True
    return False


def _ask_for_stacks(ranks: Iterable[_Rank]) -> None:
    """Sends SIGUSR1 to each, then waits for the dumps. A stopped rank needs SIGCONT to answer, and comes last: once it
    goes on, those that waited for it do, too."""
    files = {rank.process.pid or 0: rank.setup.path("stack") for rank in ranks}
    stopped = {pid for pid in files if state_of(pid) == "stopped"}
    for pids in (files.keys() - stopped, stopped):
        before = {pid: _size(files[pid]) for pid in pids}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                os.kill(pid, signal.SIGCONT)
        _await_dumps({pid: files[pid] for pid in pids}, before)


def _await_dumps(files: dict[int, Path], before: dict[int, int]) -> None:
    """Waits until each file has grown, and ends with the main thread's outermost frame or grows no more."""
    deadline = time.monotonic() + _STACK_WAIT_S
    sizes, grew_at = before, time.monotonic()
    while files and time.monotonic() < deadline:
        time.sleep(0.05)
        now = {pid: _size(path) for pid, path in files.items()}
        if now != sizes:
            sizes, grew_at = now, time.monotonic()
        whole = all(path.exists() and path.read_bytes().endswith(b" in <module>\n") for path in files.values())
        over = whole or time.monotonic() - grew_at > _QUIET_S
        if over and all(now[pid] > before[pid] for pid in now):
            return


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

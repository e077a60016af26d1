"""Runs inside each rank process: sets up the environment of a torchrun rank, and loops over jobs.

Messages on the pipe are a few bytes; jobs and results travel as files in the world's folder, so neither side can
block on a peer that stopped reading.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eprt.errors import ConfigError, RankLost

if TYPE_CHECKING:
    from eprt.world import World

_Kept = TypeVar("_Kept")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WORLDS_KEPT = 3  # each has threads that wake up while it idles
_loaded: list[str] = []  # by `load_plugins`: ranks import them, too


@dataclass(frozen=True)
class RankSetup:
    """The settings of one rank process; `folder` holds its log, its stacks, its jobs and results."""

    rank: int
    size: int
    device: str
    folder: Path
    environment: dict[str, str]
    plugins: tuple[str, ...] = field(default_factory=lambda: tuple(_loaded))

    def path(self, kind: str) -> Path:
        return self.folder / f"rank{self.rank}.{kind}"


@dataclass
class RankContext:
    """One rank's identity and the Worlds it keeps between jobs: the first argument of every job.

    Attributes:
        rank, size, device: as in the pool that runs the job.
        cache: objects that are costly to make, kept from job to job until the pool is rebuilt.
    """

    rank: int
    size: int
    device: str
    cache: dict[Any, Any] = field(default_factory=dict)
    _worlds: dict[tuple[int, int, float], World] = field(default_factory=dict)

    def world(self, attention_tp_size: int = 1, moe_tp_size: int = 1, timeout_s: float = 60.0) -> World:
        """Returns the World of all ranks with these sizes. It is made on first use (collective), and kept while it is
        among the few that were used last; it is closed with what the cache holds of it."""
        from eprt.world import World

        key = (attention_tp_size, moe_tp_size, timeout_s)
        found = self._worlds.get(key)
        if found is None or found.closed:
            found = World.from_env(
                device=self.device, attention_tp_size=attention_tp_size, moe_tp_size=moe_tp_size, timeout_s=timeout_s
            )
            self._worlds[key] = found
        self._use_last(key)
        return found

    def _use_last(self, key: tuple[int, int, float]) -> None:
        """Closes the World that was unused longest. The first one ends torch.distributed when it closes: it is kept."""
        first, *others = self._worlds
        if key != first:
            self._worlds[key] = self._worlds.pop(key)
        if len(others) < _WORLDS_KEPT:
            return
        unused = self._worlds.pop(others[0])
        for name in [name for name, kept in self.cache.items() if getattr(kept, "world", None) is unused]:
            self.release(name)
        unused.close()

    def once(self, name: Any, make: Callable[[], _Kept]) -> _Kept:
        """Returns what the cache holds under `name`; makes it first if there is nothing."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    def release(self, name: Any) -> None:
        """Closes what the cache holds under `name`, if there is anything, and forgets it."""
        if callable(close := getattr(self.cache.pop(name, None), "close", None)):
            close()

    def cool(self) -> None:
        """Lets the next job build layers of its own in the Worlds that earlier ones warmed up."""
        for world in self._worlds.values():
            world.warm = False

    def close(self) -> None:
        """Closes what the cache holds, then every World, newest first: a healthy pool's last job. Collective."""
        for name in reversed(list(self.cache)):
            self.release(name)
        while self._worlds:
            self._worlds.popitem()[1].close()


def load_plugins(modules: Iterable[str]) -> None:
    """Imports each module; ranks that this process starts from now on import it before their first job.

    Raises:
        ConfigError: a module can't be imported. The message names it and the reason.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--plugin {name}: the module can't be imported: {why}") from error
        if name not in _loaded:
            _loaded.append(name)


@dataclass(frozen=True)
class Raised:
    """The exception that ended a job. `lost_rank` is the rank that a RankLost names, else None."""

    error: str
    message: str
    stack: str
    at: float
    lost_rank: int | None = None
    why: str = ""

    @classmethod
    def of(cls, error: Exception) -> Raised:
        stack, kind = "".join(traceback.format_exception(error)), type(error).__name__
        lost = (error.rank, error.why) if isinstance(error, RankLost) else (None, "")
        return cls(kind, str(error), stack, time.monotonic(), *lost)


def serve(setup: RankSetup, jobs: Connection) -> None:
    """Takes jobs until the parent closes the pipe: the entry of the process. Any exception ends this process, as it
    would end a rank of torchrun; the parent is told first."""
    _settle(setup)
    context = RankContext(setup.rank, setup.size, setup.device)
    while True:
        try:
            name = jobs.recv()
        except EOFError:
            return
        try:
            _work(context, setup, name)
        except SystemExit:
            atexit._run_exitfuncs()  # multiprocessing's children skip them; a rank of torchrun doesn't
            raise
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            setup.path("result").write_bytes(pickle.dumps(Raised.of(error)))
            jobs.send("raised")
            atexit._run_exitfuncs()
            raise
        jobs.send("ok")


def _work(context: RankContext, setup: RankSetup, name: str) -> None:
    path, arguments = pickle.loads((setup.folder / name).read_bytes())
    sys.path[:] = path
    load_plugins(setup.plugins)
    function: Callable[..., Any]
    function, kwargs = pickle.loads(arguments)
    context.cool()
    setup.path("result").write_bytes(pickle.dumps(function(context, **kwargs)))


def _die_with_parent() -> None:
    # multiprocessing gives each child the pipe end that keeps the fork server alive, so the server outlived a killed
    # parent as long as a rank hung. Without it: parent gone, server gone, SIGKILL here.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # pyright: ignore[reportAttributeAccessIssue]
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


def _settle(setup: RankSetup) -> None:
    """Gives this process a session and a log, makes it die with its parent and dump its stacks on SIGUSR1."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked in the server
    _die_with_parent()
    # Under "forkserver", Python's own choice from 3.14 on, each semaphore (tqdm has one) has a name, and Python would
    # warn of it once this process is killed. It starts no process either way: a daemon may have no children.
    multiprocessing.set_start_method("fork", force=True)
    try:
        log = setup.path("log").open("ab", buffering=0)
    except FileNotFoundError:  # the parent was interrupted, and has left, while this process was being started
        os._exit(1)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(log.fileno(), stream)
        setattr(sys, name, open(stream, "w", buffering=1, closefd=False))  # noqa: SIM115 - lives as long as the process
    stacks = setup.path("stack").open("w")
    stacks.write(f"{threading.get_ident():016x}\n")
    stacks.flush()
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    os.environ.update(setup.environment)
    import torch

    torch.set_num_threads(1)

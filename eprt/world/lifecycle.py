"""The lifecycle of one rank in a World: it joins the other ranks, hears of their end, and leaves in order or not. The
memory that layers share on it is made once per key, counted, and freed by its last user or with the World."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch.distributed as dist

from eprt.errors import InputError, RankLost, UsageError
from eprt.json_files import shown
from eprt.world.agree import Header, exchange
from eprt.world.collectives import Collectives
from eprt.world.groups import control_group, hosts_store, silent_after
from eprt.world.guard import Guard
from eprt.world.process import at_exit_leave, bounded, leave_at_once
from eprt.world.shared_exchange import open_exchange

T = TypeVar("T")

_STARTED: WeakSet[Lifecycle] = WeakSet()


def _keep_groups_in_child() -> None:
    """Keeps the groups of a forked child from ever being freed. It has none of their threads, for which a gloo group's
    destructor waits without end (torch 2.13), at the latest as the interpreter ends. Its Worlds are closed: peers would
    take what it writes to shared memory and sockets for its parent's words."""
    for life in list(_STARTED):
        life._world.closed = True
        for group in life.groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups_in_child)


class Lifecycle:
    """Joins the ranks that met, hooks into the interpreter's end, and ends what the World made.

    Args:
        world: the ranks' collectives; `join` gives them the guard, the control group and the shared memory.
        owns_default: whether this World initialised torch.distributed, and so ends it.

    Attributes:
        asked_to_leave: whether SIGTERM asked this rank to leave after its step.
        own_groups: groups among the default group's ranks that were made for this World's meshes.
        left_behind: groups of lost ranks. Work is stuck in them, so they can't be destroyed.
    """

    def __init__(self, world: Collectives, owns_default: bool) -> None:
        self._world = world
        self._pid = os.getpid()
        self.owns_default = owns_default
        self._linger_s = world.timeout_s if owns_default and hosts_store(world.rank) else 0.0
        self.asked_to_leave = False
        self.own_groups: list[dist.ProcessGroup] = []
        self.left_behind: list[object] = []
        self._excepthook: Callable[..., object] = sys.excepthook
        self._finalizer: Finalize | None = None
        self._sigterm: Any = None  # who handled it before

    def start(self, guard: Guard) -> None:
        """Joins the ranks that met, and tells them of this process's end from now on. Collective."""
        _STARTED.add(self)
        self.join(guard, guard.met.generation)
        with suppress(TimeoutError, RuntimeError):  # a store that is gone holds nothing
            bounded(guard.met.erase, silent_after(self._world.timeout_s))
        sys.excepthook = self.on_exception
        atexit.register(self.at_exit)
        if multiprocessing.parent_process() is not None:  # before Python 3.13 such a child ends without atexit
            self._finalizer = Finalize(None, self._say_left, exitpriority=0)

    def join(self, guard: Guard, generation: int) -> None:
        """Opens the control group of the ranks that met and, if all are on one host, shared memory. Collective."""
        world = self._world
        world._guard = guard
        world.nonce = int(guard.met.nonce[:15], 16)  # as a header carries it
        world.generation = generation
        world._control = guard.bounded(lambda: control_group(guard.met, world.timeout_s, world.group), world.timeout_s)
        exchange(world, Header("barrier"))
        # A container that has a name of its own counts as a host.
        hosts = [(member.host, member.boot) for member in guard.met.members.values()]
        fewest = min(hosts.count(host) for host in hosts)
        if fewest == len(hosts):
            rank = world._ranks.index(world.rank)  # among those that are left
            world._shared = open_exchange(rank, len(hosts), lambda x: world.gather_control(x)[world._ranks])
        world.parallel = replace(world.parallel, ranks_per_host=None if fewest == len(hosts) else fewest)

    def groups(self) -> list[object]:
        """Returns all groups that this process may hold, torch's own among them."""
        world = self._world
        known = list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []
        mine = world.group, world._attention_tp_group, world._control
        return [each for each in (*known, *mine, *self.own_groups, *self.left_behind) if each is not None]

    def leave_groups(self) -> None:
        """Gives up the groups of the membership before. They are kept: work may be stuck in them."""
        world = self._world
        self.left_behind += [world.group, world._attention_tp_group, world._control, world._moved]
        if world._shared is not None:
            world._shared.close()
        world.group = world._attention_tp_group = world._control = world._shared = None

    def end(self) -> None:
        """Stops the guard and ends the groups, unless work is stuck in them: then the process ends hard at exit."""
        world, guard = self._world, self._world._guard
        if guard is not None:
            guard.close(self._linger_s)
        self._unhook()
        if guard is not None:
            if guard.stuck:
                at_exit_leave()
            if guard.verdict is not None or world._abandoned or guard.stuck:
                return
            if guard.left_out and world.device.type == "cuda":
                self.left_behind.append(world.group)  # NCCL ends a host's ranks together, and the others kept theirs
        if self.left_behind:
            return
        for graph in list(world.graphs):  # NCCL ends no communicator that a graph still holds: it waits for ever
            graph.reset()
        if world._shared is not None:
            world._shared.close()
        self._end_groups()
        atexit.unregister(self.at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def _end_groups(self) -> None:
        """Ends the groups: a gloo group's threads and sockets end with its last reference, of which torch holds one."""
        if os.getpid() != self._pid:
            return  # a forked child has none of those threads, and would wait for them for ever
        world = self._world
        world._control = world._shared = world.group = world._attention_tp_group = None
        for group in self.own_groups:
            with suppress(ValueError):  # whoever owns the default group has ended that, and with it this one
                dist.destroy_process_group(group)
        self.own_groups.clear()
        if self.owns_default and dist.is_initialized():
            dist.destroy_process_group()

    def drain_on_sigterm(self) -> None:
        if self._sigterm is not None:
            return
        try:
            self._sigterm = signal.signal(signal.SIGTERM, self._on_sigterm) or signal.SIG_DFL
        except ValueError as error:
            raise UsageError("drain_on_sigterm in another thread than the main one, to which signals belong") from error

    def _on_sigterm(self, *_: object) -> None:
        if self._world.closed or os.getpid() != self._pid:  # below another World's handler, or in a forked child
            signal.signal(signal.SIGTERM, self._sigterm)
            signal.raise_signal(signal.SIGTERM)
        self.asked_to_leave = True

    def _unhook(self) -> None:
        """Takes our excepthook and our handler of SIGTERM out, and those of Worlds that were closed before but lay
        below ours."""
        while (life := _closed(sys.excepthook)) is not None:
            sys.excepthook = life._excepthook
        with suppress(ValueError):  # in another thread than the main one: then ours passes the signal on
            while (life := _closed(signal.getsignal(signal.SIGTERM))) is not None:
                signal.signal(signal.SIGTERM, life._sigterm)

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tells the peers of an uncaught exception before the interpreter goes."""
        if self._world._guard is not None:
            self._world._guard.leave(f"raised: {kind.__name__}: {error}")
        self._excepthook(kind, error, trace)

    def _say_left(self) -> None:
        """Sends the peers the notice of a clean exit."""
        if os.getpid() == self._pid and self._world._guard is not None:
            self._world._guard.close(self._linger_s)

    def at_exit(self) -> None:
        """Handles an interpreter that exits without `close`, or after a verdict. Abandoned work would hold the process,
        so it leaves hard."""
        if os.getpid() != self._pid:
            return
        self._say_left()
        guard = self._world._guard
        verdict = None if guard is None else guard.verdict
        if verdict is not None or self._world._abandoned or self.left_behind:
            drained = self.asked_to_leave and verdict is not None and verdict.why == "left"
            leave_at_once(0 if drained else self._exit_code(verdict))

    def _exit_code(self, verdict: RankLost | None) -> int:
        uncaught: object = getattr(sys, "last_value", None)
        if verdict is not None or isinstance(uncaught, RankLost):
            return RankLost.exit_code
        return int(uncaught is not None or not self.left_behind)


def _closed(hook: object) -> Lifecycle | None:
    """Returns the lifecycle whose method a hook is, if its World is closed."""
    life = getattr(hook, "__self__", None)
    return life if isinstance(life, Lifecycle) and life._world.closed else None


class Warmable(Protocol):
    """Anything that `World.warmup` can prepare: a layer, a dispatcher."""

    def warmup(self) -> None: ...


def not_warmable(thing: object) -> InputError | None:
    """Returns an error for what `World.warmup` can't prepare, a class for one, else None."""
    if callable(getattr(thing, "warmup", None)) and not isinstance(thing, type):
        return None
    return InputError(f"warmup got {shown(thing)}: expected a layer or a dispatcher, which has a method `warmup`")


class RankMemory(ABC):
    """Memory in which kernels of several ranks work together. All of it is told when ranks are lost."""

    def release(self) -> None:
        """Lets kernels of this rank that wait for others go on, if the host can; what they make is garbage. Not
        collective; called again until the GPU is idle, and never again for ranks that are lost for good."""

    @abstractmethod
    def resume(self, alive: tuple[bool, ...]) -> None:
        """Goes on with these ranks alone: forgets the calls in flight, and neither sends to the others nor waits for
        them. Every rank that is left does it, between two barriers, with an idle GPU.

        Raises:
            UsageError: it can't, on every rank.
        """


class SharedResources:
    """Opaque values under frozen keys; a key must name all that is baked into its value."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Any, Callable[[Any], None] | None, int]] = {}

    def acquire(self, key: Hashable, make: Callable[[], T], close: Callable[[T], None] | None) -> T:
        """Returns the value of `key`, made on first use. If `make` raises, nothing is held."""
        value, closer, users = self._held[key] if key in self._held else (make(), close, 0)
        self._held[key] = (value, closer, users + 1)
        return value

    def held(self, key: Hashable) -> Any:
        """Returns the value of `key` without counting a user; None if nobody holds it."""
        return self._held[key][0] if key in self._held else None

    def of_ranks(self) -> Iterator[RankMemory]:
        """Yields the memory that ranks share, in the order in which it was made."""
        return (value for value, _, _ in self._held.values() if isinstance(value, RankMemory))

    def release(self, key: Hashable) -> None:
        """Gives one `acquire` back; the last one frees. A key that isn't held is ignored: `close` came first."""
        if key not in self._held:
            return
        value, closer, users = self._held.pop(key)
        if users > 1:
            self._held[key] = (value, closer, users - 1)
        elif closer is not None:
            closer(value)

    def close(self) -> None:
        """Frees everything, the newest first, also when a closer raises; then raises the last such error."""
        with ExitStack() as closing:
            for value, closer, _ in self._held.values():
                if closer is not None:
                    closing.callback(closer, value)
            self._held.clear()

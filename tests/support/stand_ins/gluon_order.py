"""Specialized warps, TMA and mbarriers of some programs, on a CPU: who runs when, and what orders whom.

Each role is a greenlet, so one runs at a time: up to its next barrier, copy or product, then another is drawn, of this
program or another. What the copy engine or a copying thread was asked for happens at any time before the barrier
that it arrives at. So an order that nothing enforces occurs in some run.

And each access to shared memory is held to all before it, whatever this run's order was: two of which one writes must
be ordered by barriers (vector clocks, with a component for each role and each barrier). A warpgroup's asynchronous
product reads when it is begun and when it is waited for. What a role's own warps owe each other is left to the
compiler, and so are fences between the ways to memory.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import greenlet

GRANULE = 1024  # bytes whose accesses are told apart, or fewer where a buffer's parts are smaller

Clock = dict[object, int]  # of each role and barrier, how far it was when this one last heard of it


class Race(Exception):
    """Two accesses to shared memory that no barrier orders."""


class Stuck(Exception):
    """Nothing can go on, or a barrier was arrived at more often than it expects."""


def _join(clock: Clock, other: Clock) -> None:
    for who, time in other.items():
        clock[who] = max(clock.get(who, 0), time)


@dataclass(eq=False)
class Write:
    """Who wrote, and when; `who` None: under way, and not yet asked to arrive anywhere."""

    who: object
    time: int

    def known(self, clock: Clock) -> bool:
        return self.who is not None and clock.get(self.who, 0) >= self.time


@dataclass(eq=False)
class Buffer:
    """Accesses to an allocation, by granule."""

    name: str
    granule: int
    written: dict[int, Write] = field(default_factory=dict)
    read: dict[int, dict[Role, int]] = field(default_factory=lambda: defaultdict(dict))
    barriers: dict[int, Barrier] = field(default_factory=dict)  # that lie in it

    def _granules(self, start: int, size: int) -> range:
        return range(start // self.granule, (start + size - 1) // self.granule + 1)

    def on_read(self, role: Role, start: int, size: int) -> None:
        for granule in self._granules(start, size):
            before = self.written.get(granule)
            if before is not None and not before.known(role.clock):
                raise Race(f"{role.name} reads {self.name} while it is written")
            self.read[granule][role] = role.clock[role]

    def on_write(self, role: Role, start: int, size: int, write: Write) -> None:
        for granule in self._granules(start, size):
            before = self.written.get(granule)
            if before is not None and not before.known(role.clock):
                raise Race(f"{role.name} writes {self.name} while it is written")
            for reader, time in self.read[granule].items():
                if role.clock.get(reader, 0) < time:
                    raise Race(f"{role.name} writes {self.name} while {reader.name} reads it")
            self.written[granule] = write
            self.read[granule].clear()


@dataclass(eq=False)
class Barrier:
    """An mbarrier. `phase`: how many are complete."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    arrived: Clock = field(default_factory=dict)  # what the arrivals of the phase under way know
    complete: Clock = field(default_factory=dict)

    def add(self, arrivals: int, bytes: int, clock: Clock) -> None:
        self.pending -= arrivals
        self.bytes += bytes
        _join(self.arrived, clock)
        if self.pending < 0:
            raise Stuck("more arrivals at a barrier than it expects")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            _join(self.complete, self.arrived)
            self.complete[self] = self.phase

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass(eq=False)
class Copy:
    """Asked for, not yet done. `ready`: what must be done before.  `write`: what a thread's copy counts as."""

    do: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    write: Write | None = None
    done: bool = False


@dataclass(frozen=True)
class Job:
    """One partition of a program's warps. `enter` is called before each of its turns."""

    name: str
    warps: int
    do: Callable[[], None]
    enter: Callable[[], None]


class Role:
    """A job at work."""

    def __init__(self, machine: Machine, job: Job) -> None:
        self.machine, self.name, self.warps, self._enter = machine, job.name, job.warps, job.enter
        self.clock: Clock = {self: 1}
        self.copies: list[Copy] = []  # of its threads, not yet bound to a barrier
        self.until: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self._greenlet = greenlet(job.do)

    @property
    def finished(self) -> bool:
        return self._greenlet.dead

    def turn(self) -> None:
        """Go on until it pauses or ends. Raises what its job raised."""
        self._enter()
        self._greenlet.switch()

    def end(self) -> None:
        """Ends it where it paused, as another one failed."""
        self._greenlet.throw()

    def pause(self, until: Callable[[], bool] = lambda: True, waits_for: str = "") -> None:
        """In its greenlet: others may go on; return once `until` holds and it is drawn."""
        self.until, self.waits_for = until, waits_for
        self._greenlet.parent.switch()

    def released(self) -> Clock:
        """What it knows by now; what it does from now on is later."""
        known = dict(self.clock)
        self.clock[self] += 1
        return known


class Machine:
    """Programs at the same time, their roles' turns drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.jobs: list[Job] = []  # of all programs; `run` does them
        self.copies: list[Copy] = []
        self.role: Role | None = None  # whose turn it is

    def run(self) -> None:
        """Until all have ended. Raises Race, Stuck, or what a job raised."""
        roles = [Role(self, job) for job in self.jobs]
        try:
            while not all(role.finished for role in roles) or self.copies:
                self._step(roles)
        finally:
            self.role = None
            for role in roles:
                role.end()

    def _step(self, roles: list[Role]) -> None:
        able = [role for role in roles if not role.finished and role.until()]
        able += [copy for copy in self.copies if copy.ready()]
        if not able:
            raise Stuck("; ".join(f"{role.name} waits for {role.waits_for}" for role in roles if not role.finished))
        chosen = self._random.choice(able)
        if isinstance(chosen, Copy):
            self.copies.remove(chosen)
            chosen.do()
            chosen.done = True
        else:
            self.role = chosen
            chosen.turn()

    @property
    def current(self) -> Role:
        if self.role is None:
            raise Stuck("no role is at work")
        return self.role

    # ---- what roles do ----------------------------------------------------------------------------------------------

    def wait(self, barrier: Barrier, parity: int, name: str) -> None:
        role = self.current
        role.pause(lambda: barrier.passed(parity), name)
        _join(role.clock, barrier.complete)

    def arrive(self, barrier: Barrier, bytes: int = 0) -> None:
        role = self.current
        role.pause()
        barrier.add(1, bytes, role.released())

    def copy_tile(self, barrier: Barrier, target: tuple[Buffer, int, int], bytes: int, do: Callable[[], None]) -> None:
        """By the copy engine, which arrives with the bytes. Target: (buffer, start, size)."""
        role = self.current
        role.pause()
        buffer, start, size = target
        buffer.on_write(role, start, size, Write(barrier, barrier.phase + 1))
        known = role.released()

        def done() -> None:
            do()
            barrier.add(0, -bytes, known)

        self.copies.append(Copy(done))

    def copy_async(self, target: tuple[Buffer, int, int], do: Callable[[], None]) -> None:
        """By a role's threads; `arrive_after_copies` says where."""
        role = self.current
        role.pause()
        buffer, start, size = target
        write = Write(None, 0)
        buffer.on_write(role, start, size, write)
        copy = Copy(do, write=write)
        role.copies.append(copy)
        self.copies.append(copy)

    def arrive_after_copies(self, barrier: Barrier) -> None:
        """All its threads, each when what it has copied is there."""
        role = self.current
        role.pause()
        before, role.copies = role.copies, []
        for copy in before:
            if copy.write is not None:
                copy.write.who, copy.write.time = barrier, barrier.phase + 1
        known, threads = role.released(), 32 * role.warps
        arrival = Copy(lambda: barrier.add(threads, 0, known), lambda: all(copy.done for copy in before))
        self.copies.append(arrival)

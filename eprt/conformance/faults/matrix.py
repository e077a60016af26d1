"""The rows of the fault matrix: each names a fault, its moment, its dispatcher, and what is promised of the other
ranks."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import eprt.world
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.support import Device
from eprt.world import init_default_group, lifecycle, rendezvous

TIMEOUT_S = 4.0  # of the trials' Worlds on CPUs
SILENT_S = TIMEOUT_S / 2
GPU_TIMEOUT_S = 8.0  # warm-up lies within it, too, and trials share the GPUs
SLACK_S = 3.0  # a loaded machine schedules four processes on two cores
EXIT_AFTER_S = 2.0  # after the verdict, where a kernel waits for the dead (`Guard`)
SHRINK_S = 4.0  # from the verdict to the first right output without the lost rank

Then = Literal["restart", "continue", "renormalize"]


@dataclass(frozen=True)
class Fault:
    """A way in which a rank breaks.

    Attributes:
        why: `RankLost.why` that the survivors must report; "mismatch" is a WorldMismatch on every rank.
        limit_s: seconds that a survivor may wait at most, by the promise.
        act: the fault itself, called in the victim.
        unknowable: why, on GPUs, the failed rank can't be named: then any error within the limit will do.
    """

    name: str
    why: str
    limit_s: float
    act: Callable[[], None]
    unknowable: str = ""


class Deliberate(Exception):
    """Raised by a victim."""


class Skipped(BaseException):
    """Raised by a victim to skip a step."""


def _raise(error: BaseException) -> None:
    raise error


CUT = "cut off"  # the victims hear each other alone, and the others hear none of them
_EITHER = (
    "on GPUs ranks exchange nothing but tokens inside a step: the rank that skipped it waits in the next step and the "
    "others in this one, so none of them can tell which rank is wrong"
)
FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("kill", "exited", 1.0, partial(signal.raise_signal, signal.SIGKILL)),
        Fault("stop", "silent", SILENT_S + 1.0, partial(signal.raise_signal, signal.SIGSTOP)),
        Fault("raise", "raised", 1.3 + 0.5, partial(_raise, Deliberate("raised by the fault matrix"))),
        Fault("leave", "left", 1.3 + 0.5, partial(sys.exit, 0)),
        Fault("skip", "mismatch", 1.0, partial(_raise, Skipped()), _EITHER),
        Fault(CUT, "silent", SILENT_S + 1.0, lambda: None),  # the job does it
        Fault("sleep", "behind", TIMEOUT_S + 1.0, partial(time.sleep, 10 * TIMEOUT_S)),
    )
}
NOTHING = Fault("none", "", 0.0, lambda: None)  # the control: no rank breaks, and none reports an error
LATE = "meeting, with a rank to come"  # the rank after the victim comes LATE_S later than the others
LATE_S = 2.5
# Moments of start-up, and the function in whose place the victim breaks: (the module that calls it, the function).
START_UP: dict[str, tuple[ModuleType, Callable[..., Any]]] = {
    "meeting": (rendezvous, rendezvous.listen),
    LATE: (rendezvous, rendezvous.exchange_addresses),
    "groups": (eprt.world, init_default_group),
    "control": (lifecycle, lifecycle.control_group),
}
STEP = ("between steps", "dispatch", "experts", "combine")
REPLAY = "graph replay"  # after the ranks agreed on the step, and the others launched it
ON_GPUS = (("kill", "stop", "raise", "skip"), ("dispatch", "experts", "combine", REPLAY))


@dataclass(frozen=True)
class Trial:
    """One cell of the matrix.

    Attributes:
        rank: the victim, or the first of them.
        then: whether the others end or go on without the victim (`RuntimeConfig.on_rank_lost`).
    """

    fault: str
    moment: str
    rank: int
    dispatcher: str
    world: int
    device: str = "cpu"
    then: Then = "restart"

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks that break: a cable cuts off a host of two, where the others are still the majority."""
        if self.fault != CUT or self.world < 5:
            return (self.rank,)
        return tuple(sorted({self.rank, (self.rank + 1) % self.world}))

    @property
    def late_rank(self) -> int | None:
        return (self.rank + 1) % self.world if self.moment == LATE else None

    @property
    def how(self) -> Fault:
        return NOTHING if self.fault == NOTHING.name else FAULTS[self.fault]

    @property
    def why(self) -> str:
        """`RankLost.why` on the other ranks; "" where it can't be known."""
        return "" if self.unknowable else self.how.why

    @property
    def unknowable(self) -> str:
        """The reason why the failed rank can't be named; "" where it can."""
        return self.how.unknowable if self.device == "cuda" else ""

    @property
    def timeout_s(self) -> float:
        return GPU_TIMEOUT_S if self.device == "cuda" else TIMEOUT_S

    @property
    def limit_s(self) -> float:
        """Seconds from the fault until the last survivor must have raised its error."""
        more = self.timeout_s - TIMEOUT_S
        limit = self.how.limit_s + more * {"silent": 0.5, "behind": 1.0}.get(self.how.why, 0.0)
        # A rank that sleeps or is stopped before the guards know each other is missing until the timeout.
        early = self.moment in ("meeting", LATE) and self.fault in ("stop", "sleep")
        if early or self.unknowable:  # nothing but the timeout tells
            limit = self.timeout_s + 1.0
        if self.late_rank is not None:
            limit += LATE_S
        return limit + (EXIT_AFTER_S if self.device == "cuda" else 0.0) + SLACK_S

    @property
    def resume_s(self) -> float:
        """Seconds from the fault until the last survivor must have its first output without the victim."""
        return self.limit_s + SHRINK_S


def config(world: int, device: str) -> MoEConfig:
    """Returns a tiny layer: float32 on CPUs; on GPUs sizes that every kernel takes (DeepEP has a list of them)."""
    small = MoEConfig(num_experts=2 * world, top_k=2, hidden_size=32, intermediate_size=16, weight_format="f32")
    return replace(small, hidden_size=2048, intermediate_size=128, weight_format="bf16") if device == "cuda" else small


def runtime(dispatcher: str, device: str, then: Then = "restart") -> RuntimeConfig:
    executor = "torch_grouped" if device == "cuda" else "reference"  # one that graphs can hold
    return RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=8, on_rank_lost=then)


def dispatchers(world: int, device: str) -> list[str]:
    where, moe, parallel = Device.here(device), config(world, device), ParallelConfig(world)
    return [n for n, spec in DISPATCHERS.items() if spec.supports(moe, parallel, runtime(n, device), where)]


def trials(world: int, device: str = "cpu", count: int | None = None, seed: int = 0) -> list[Trial]:
    """Returns the matrix, in an order that spreads a short run over all of it.

    On CPUs every fault at every moment on every rank, start-up included. On GPUs a trial costs more and the guards are
    the same: `ON_GPUS`, one victim, all dispatchers in turn. On both: going on without a rank that was killed or
    stopped, which on GPUs comes last.

    Args:
        count: number of trials; cells come again where it is larger than the matrix. None: each cell once.
    """
    names = dispatchers(world, device)
    ordered = _on_gpus(world, names) if device == "cuda" else _spread(_on_cpus(world, names), seed)
    return ordered if count is None else list(itertools.islice(itertools.cycle(ordered), count))


def _spread(cells: list[Trial], seed: int) -> list[Trial]:
    """Shuffles the cells so that every part of the list has a part of every kind."""
    random.Random(seed).shuffle(cells)
    by_kind: dict[tuple[str, bool, str], list[Trial]] = {}
    for cell in cells:
        by_kind.setdefault((cell.fault, cell.moment in START_UP, cell.then), []).append(cell)
    placed = [(place / len(group), cell) for group in by_kind.values() for place, cell in enumerate(group)]
    return [cell for _, cell in sorted(placed, key=lambda item: item[0])]


def _on_cpus(world: int, names: list[str]) -> list[Trial]:
    early = itertools.product(("kill", "stop", "raise"), START_UP, range(world), names[:1])  # no dispatcher yet
    late = itertools.product(FAULTS, STEP, range(world), names)
    thens: tuple[Then, ...] = ("continue", "renormalize")
    going_on = itertools.product(("kill", "stop"), STEP, range(world), names, thens)
    found = [Trial(*cell, world) for cell in itertools.chain(early, late)]
    found += [Trial(fault, moment, rank, name, world, then=t) for fault, moment, rank, name, t in going_on]
    if world > 2:
        return found
    # Two ranks that don't hear each other each blame the other, and rank 1 may not go on while rank 0 may live.
    return [c for c in found if c.fault != CUT and (c.fault != "stop" or c.rank == 1 or c.then == "restart")]


def _on_gpus(world: int, names: list[str]) -> list[Trial]:
    """Goes by the diagonals of faults x moments: any four cells of a dispatcher in a row have all of both."""
    victim, (kinds, moments) = world - 1, ON_GPUS
    diagonals = [(fault, moments[(i + d) % len(moments)]) for d in range(len(moments)) for i, fault in enumerate(kinds)]
    found = [
        Trial(fault, moment, victim, name, world, "cuda")
        for (fault, moment), name in itertools.product(diagonals, names)
        if moment != REPLAY or DISPATCHERS[name].graph_safe
    ]
    for moment, fault, name in itertools.product((STEP[0], STEP[1], REPLAY), ("kill", "stop"), names):
        spec = DISPATCHERS[name]
        if moment == STEP[0] or (spec.shrink == "anytime" and (moment != REPLAY or spec.graph_safe)):
            found.append(Trial(fault, moment, victim, name, world, "cuda", "continue"))
    return found


def controls(world: int, device: str) -> list[Trial]:
    """Returns one trial for each dispatcher in which nothing breaks, graphs included; it compiles the kernels."""
    found: list[Trial] = []
    for name in dispatchers(world, device):
        moment = REPLAY if device == "cuda" and DISPATCHERS[name].graph_safe else STEP[0]
        found.append(Trial(NOTHING.name, moment, world - 1, name, world, device))
    return found

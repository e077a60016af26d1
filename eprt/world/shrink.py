"""Goes on without ranks that are lost or leave: the control store holds who is left, and waiting kernels are freed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from eprt.config import ParallelConfig
from eprt.errors import InputError, RankLost, UsageError
from eprt.world.agree import Header, exchange
from eprt.world.collectives import Collectives
from eprt.world.groups import payload_group, silent_after, start_guard
from eprt.world.guard import Guard
from eprt.world.lifecycle import Lifecycle, SharedResources
from eprt.world.process import bounded, record
from eprt.world.rendezvous import meet

logger = logging.getLogger("eprt")
T = TypeVar("T")
_LOOK_S = 1e-3


@dataclass(frozen=True)
class Survivors:
    """The outcome of `World.shrink`; the same on every rank that is left.

    Attributes:
        lost: all ranks that the World goes on without, also those that left, now or earlier.
        completed: [W] number of the last step that each rank left without an exception; -1: none, or a lost rank.
            Ranks may differ by one: a rank that had everything it needed of the step in flight has completed it.
        next_step: a number that no step has had yet, and which the next one has unless it is given another.
    """

    lost: tuple[int, ...]
    completed: tuple[int, ...]
    next_step: int


def whole_groups(lost: Iterable[int], parallel: ParallelConfig) -> set[int]:
    """Returns `lost` and the ranks that can't go on without them: an attention-TP group holds its tokens together."""
    size = parallel.attention_tp_size
    return {peer for rank in lost for peer in range(rank // size * size, rank // size * size + size)}


class Ballots:
    """Decides, time after time, who is lost: the first proposal of a number stands. Processes that can't hear each
    other can't both go on that way.

    Args:
        store: a part of the control store that only the ranks of the World know.
        silent_s: how long it may give no answer.
    """

    def __init__(self, store: dist.Store, silent_s: float) -> None:
        self._whole, self._silent_s = store, silent_s
        self._store: dist.Store | None = None
        self.number = 0

    def client(self) -> dist.Store:
        """Returns a client of the store for one attempt to make groups.

        A rank that dies meanwhile leaves another's thread inside a call to the store, and no second call gets through a
        client that one is inside of.

        Raises:
            RankLost: the store is gone.
        """
        clone: Callable[[], dist.Store] = self._whole.clone  # pyright: ignore
        return self._ask(clone)

    def decide(self, lost: set[int]) -> set[int]:
        """Returns the decision under the next number, or under the last one that was decided meanwhile.

        Raises:
            RankLost: the store is gone.
        """
        store = self._store = self._store or self.client()
        self.number += 1
        while self._ask(lambda: store.check([f"lost/{self.number + 1}"])):
            self.number += 1
        mine = json.dumps({"lost": sorted(lost)})
        raw = self._ask(lambda: bytes(store.compare_set(f"lost/{self.number}", "", mine)))
        match record(raw):
            case {"lost": [*ranks]} if all(type(rank) is int for rank in ranks):
                return set(ranks)
            case _:
                message = "the record of lost ranks in the control store was overwritten by a stranger"
                raise RankLost(f"{message}. Restart the job.", -1, "foreign")

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return bounded(call, self._silent_s)
        except (TimeoutError, RuntimeError, OSError) as error:
            message = "the control store is lost, too: without it no new groups can be made"
            raise RankLost(f"{message} ({type(error).__name__}). Restart the job.", -1, "store") from error


def free_device(
    device: torch.device, groups: list[dist.ProcessGroup], release: Callable[[], None], limit_s: float
) -> None:
    """Ends the work that this rank's GPU has left of the step in flight.

    Args:
        groups: whose collectives are given up.
        release: lets kernels go on that wait in memory of ours; called again and again.

    Raises RankLost if a kernel goes on waiting.
    """
    if device.type != "cuda":
        return
    for group in groups:
        with suppress(TimeoutError, RuntimeError):  # what it leaves running is waited for below
            bounded(lambda group=group: abort(group, device), limit_s)
    idle = torch.cuda.Event()
    idle.record()
    deadline = time.monotonic() + limit_s
    while not idle.query():
        release()
        if time.monotonic() > deadline:
            message = f"a kernel on this rank's GPU still waits for a lost rank after {limit_s:g} s and can't be freed"
            raise RankLost(f"{message} (flashinfer's and deepep's can't). Restart the job.", -1, "unknown")
        time.sleep(_LOOK_S)


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Ends the group's collectives, also those that a kernel waits in."""
    backend = group._get_backend(device)
    if callable(end := getattr(backend, "abort", None)):
        end()


class Shrinking:
    """Goes on with the ranks that are left, as often as ranks are lost. What it does is said at `World.shrink`.

    Args:
        world: the ranks' collectives.
        life: joins the ranks that are left.
        resources: memory that ranks share, which has to go on, too.
        store: a part of the control store that only the ranks of the World know.
    """

    def __init__(self, world: Collectives, life: Lifecycle, resources: SharedResources, store: dist.Store) -> None:
        self._world, self._life, self._resources = world, life, resources
        self._ballots = Ballots(store, silent_after(world.timeout_s))
        self._leaving: set[int] = set()

    def shrink(self, leaving: Iterable[int]) -> Survivors:
        """Does what `World.shrink` says."""
        world = self._world
        self._leaving = self._checked_leaving(leaving)
        verdict = self._require_reason()
        gone = {rank for rank, alive in enumerate(world.alive) if not alive} | self._leaving
        lost = self._excluding(gone | set(verdict.ranks if verdict else ()))
        self._end_device_work(lost, verdict)
        self._life.leave_groups()
        while True:
            lost = self._excluding(self._ballots.decide(lost))
            try:
                self._join_survivors(lost)
                break
            except RankLost as error:
                if not error.ranks:
                    raise
                lost = self._excluding(lost | set(error.ranks))
        completed = tuple(row[0] - 1 for row in world.gather_words([world.completed_step + 1]))
        world.step_number = max(row[0] for row in world.gather_words([max(world.step_number, world.completed_step)]))
        logger.warning("rank %d goes on without ranks %s", world.rank, sorted(lost))
        return Survivors(tuple(sorted(lost)), completed, world.step_number + 1)

    def _checked_leaving(self, leaving: Iterable[int]) -> set[int]:
        """Raises InputError unless these ranks of the World can leave, and this one can stay."""
        world, ranks = self._world, list(leaving)
        if not all(type(rank) is int and 0 <= rank < world.size for rank in ranks):
            raise InputError(f"leaving is {ranks}: expected ranks of this World, 0 to {world.size - 1}")
        if world.rank in ranks:
            raise InputError(f"leaving is {ranks} on rank {world.rank} itself: a rank that leaves closes its World")
        if set(ranks) != whole_groups(ranks, world.parallel):
            raise InputError(
                f"leaving is {ranks}: an attention-TP group gathers its tokens from all of its "
                f"{world.parallel.attention_tp_size} ranks, so it leaves as a whole or not at all"
            )
        return set(ranks)

    def _require_reason(self) -> RankLost | None:
        """Returns the verdict to go on from; None if ranks only leave. Raises UsageError, RankLost: see
        `World.shrink`."""
        world, guard = self._world, self._world._guard
        world.require_open()
        if world.current_step is not None:
            raise UsageError(f"shrink inside step {world.current_step.number}: let RankLost leave the step first")
        if guard is None or guard.verdict is None:
            if guard is None or all(not world.alive[rank] for rank in self._leaving):
                raise UsageError("shrink, but no rank is lost: it is for who caught a RankLost, or names who leaves")
            return None
        guard.acknowledge()
        verdict = guard.verdict
        if not verdict.ranks or verdict.why == "foreign":
            raise RankLost(f"{verdict} This can't be gone on from.", verdict.rank, verdict.why, verdict.ranks)
        return verdict

    def _excluding(self, lost: set[int]) -> set[int]:
        """Returns who has to go if these do. Raises RankLost if this rank has to, or no rank could meet another."""
        world = self._world
        lost = whole_groups(lost, world.parallel)
        if world.rank in lost:
            self._refuse("the others go on without it", lost)
        left = 0 in self._leaving or not world.alive[0]  # a rank that leaves stays up until the others have met
        if 0 in lost and not left and world._guard is not None and world._guard.met.host == "rank 0":
            self._refuse("rank 0 served the control store, without which no new groups can be made", lost)
        return lost

    def _refuse(self, why: str, lost: set[int]) -> NoReturn:
        ranks = tuple(sorted(lost))
        message = f"rank {self._world.rank} can't go on after ranks {list(ranks)} were lost: {why}. Restart the job."
        raise RankLost(message, ranks[0], "unknown", ranks)

    def _end_device_work(self, lost: set[int], verdict: RankLost | None) -> None:
        world = self._world
        if verdict is None:  # peers may still read what this rank sent: its groups aren't aborted
            world.finish_device_work([rank for rank in range(world.size) if rank not in lost])
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
        else:
            groups = [group for group in (world.group, world._attention_tp_group) if group is not None]
            free_device(world.device, groups, self._release_memory, silent_after(world.timeout_s))

    def _release_memory(self) -> None:
        for memory in self._resources.of_ranks():
            memory.release()

    def _join_survivors(self, lost: set[int]) -> None:
        """Meets the ranks that aren't `lost`, and is a World with them. Raises RankLost."""
        world, before = self._world, self._world._guard
        if before is None:
            return
        ranks = [rank for rank in range(world.size) if rank not in lost]
        step_number, world.step_number = world.step_number, 0  # what the barriers compare: ranks may be a step apart
        world.take_call_log()
        try:
            if len(ranks) == 1:
                self._life.leave_groups()
                self._go_on_with(ranks)
                world._guard, world.generation = None, before.met.generation + self._ballots.number
            else:
                self._meet_survivors(before, ranks)
            for memory in self._resources.of_ranks():
                memory.resume(world.alive)
            exchange(world, Header("barrier"))
        finally:
            world.step_number = step_number
        before.close()

    def _go_on_with(self, ranks: list[int]) -> None:
        self._world.alive = tuple(rank in ranks for rank in range(self._world.size))
        self._world._ranks = ranks

    def _meet_survivors(self, before: Guard, ranks: list[int]) -> None:
        """Meets `ranks` under the last ballot's number, and makes their groups. Goes back to no groups on an error."""
        world, timeout_s = self._world, self._world.timeout_s
        store = dist.PrefixStore(f"without/{self._ballots.number}", self._ballots.client())
        patience_s = timeout_s * (2 if world.device.type == "cuda" else 1)
        limits = patience_s, silent_after(timeout_s)
        met = meet(store, "world", world.rank, ranks, *limits, before.met.host, before.met.members)
        guard = start_guard(met, timeout_s, world.device, our_store=self._life.owns_default)
        self._go_on_with(ranks)
        try:
            self._life.join(guard, met.generation + self._ballots.number)
            world.group = self._group_of(guard, "payload", ranks)
            size, first = world.parallel.attention_tp_size, world.rank - world.attention_tp_rank
            if size > 1:
                members = list(range(first, first + size))
                world._attention_tp_group = self._group_of(guard, f"attention {first}", members)
            exchange(world, Header("barrier"))
        except BaseException:
            world._guard = before
            self._life.leave_groups()
            guard.close()
            raise

    def _group_of(self, guard: Guard, name: str, members: list[int]) -> dist.ProcessGroup:
        """Makes a group of some of the ranks that met. Raises RankLost."""
        device, timeout_s, beside = self._world.device, self._world.timeout_s, self._world._control
        return guard.bounded(lambda: payload_group(guard.met, name, members, device, timeout_s, beside), timeout_s)

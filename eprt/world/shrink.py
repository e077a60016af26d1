"""Goes on without ranks that are lost or leave: the others agree on it by their guards; waiting kernels are freed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from eprt.config import ParallelConfig
from eprt.errors import InputError, RankLost, UsageError, WorldMismatch, aligned
from eprt.world.agree import Header, exchange
from eprt.world.collectives import Collectives
from eprt.world.groups import payload_group, silent_after
from eprt.world.guard import Guard
from eprt.world.lifecycle import Lifecycle, SharedResources
from eprt.world.process import bounded
from eprt.world.verdicts import may_go_on

logger = logging.getLogger("eprt")
_LOOK_S = 2e-3


@dataclass(frozen=True)
class Survivors:
    """The outcome of `World.shrink`; the same on every rank that is left.

    Attributes:
        lost: all ranks that the World goes on without, also those that left, now or earlier.
        completed: [W] number of the last step that each rank left without an exception; -1: none, or a lost rank.
            Ranks may differ by one: a rank that had everything it needed of the step in flight has completed it.
        next_step: the number of the next step, unless it is given another; no step has had it yet.
    """

    lost: tuple[int, ...]
    completed: tuple[int, ...]
    next_step: int


def whole_groups(lost: Iterable[int], parallel: ParallelConfig) -> set[int]:
    """Returns `lost` and the ranks that can't go on without them: an attention-TP group holds its tokens together."""
    size = parallel.attention_tp_size
    return {peer for rank in lost for peer in range(rank // size * size, rank // size * size + size)}


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
    """

    def __init__(self, world: Collectives, life: Lifecycle, resources: SharedResources) -> None:
        self._world, self._life, self._resources = world, life, resources
        self._generation = world.generation  # when all ranks met

    def shrink(self, leaving: Iterable[int]) -> Survivors:
        world = self._world
        world.require_open()
        going = self._checked_leaving(leaving)
        verdict, guard = self._require_reason(going)
        gone = {rank for rank, alive in enumerate(world.alive) if not alive}
        lost = gone | set(verdict.ranks if verdict else ())
        lost = self._excluding(lost | going | self._late_to_name_leavers(guard, going, lost))
        self._end_device_work(lost, verdict)
        self._life.leave_groups()
        while True:
            lost = self._agree(guard, lost, going)
            try:
                self._join_survivors(guard, lost)
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
        world = self._world
        try:
            ranks = list(leaving)
        except TypeError as error:
            raise InputError(f"leaving is {leaving!r}: expected a sequence of ranks of this World") from error
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

    def _require_reason(self, leaving: set[int]) -> tuple[RankLost | None, Guard]:
        """Returns the verdict to go on from; None if ranks only leave. Raises UsageError, RankLost: see
        `World.shrink`."""
        world, guard = self._world, self._world._guard
        if world.current_step is not None:
            raise UsageError(f"shrink inside step {world.current_step.number}: let RankLost leave the step first")
        if guard is None or (guard.verdict is None and all(not world.alive[rank] for rank in leaving)):
            raise UsageError("shrink, but no rank is lost: it is for who caught a RankLost, or names who leaves")
        if (verdict := guard.verdict) is None:
            return None, guard
        guard.acknowledge()
        if not verdict.ranks:
            raise RankLost(f"{verdict} This can't be gone on from.", verdict.rank, verdict.why, verdict.ranks)
        return verdict, guard

    def _late_to_name_leavers(self, guard: Guard, going: set[int], lost: set[int]) -> set[int]:
        """Tells who leaves, and waits until all say the same; the guards of those that leave say it by themselves.
        Returns who didn't come to say it.

        Without their word two parts that name each other could both go on: who leaves counts for no quorum.

        Raises:
            WorldMismatch: some name others. RankLost: this rank is among those that others named first.
        """
        world, board, num_lost = self._world, guard.board, self._world.alive.count(False)
        board.name_leavers(num_lost, going)
        deadline, late = time.monotonic() + self._patience_s, {world.rank} if going else set[int]()
        while late and time.monotonic() < deadline:
            guard.acknowledge()  # this rank isn't stuck: who is lost meanwhile, it goes on without
            late = set(world._ranks) - lost - set().union(board.leavers(num_lost), *guard.absent())
            time.sleep(_LOOK_S)
        told = board.leavers(num_lost)
        said = {rank: named for rank, named in sorted(told.items()) if named and rank not in named}
        if going and len(set(said.values())) > 1:
            rows = [("rank", "leaving"), *((str(rank), str(sorted(named))) for rank, named in said.items())]
            title = "the ranks name different `leaving`, so none goes on; restart the job, and name the same on all:"
            mismatch = WorldMismatch(f"{title}\n{aligned(rows)}")
            mismatch.shared = True
            raise mismatch
        if guard.left_out or world.rank in told[world.rank]:
            self._excluding(lost.union({world.rank}, *(named for named in told.values() if world.rank in named)))
        return late - going

    @property
    def _patience_s(self) -> float:
        return self._world.timeout_s * (2 if self._world.device.type == "cuda" else 1)

    def _excluding(self, lost: set[int]) -> set[int]:
        """Returns who has to go if these do. Raises RankLost if this rank has to."""
        lost = whole_groups(lost, self._world.parallel)
        if self._world.rank in lost:
            ranks = tuple(sorted(lost))
            message = f"rank {self._world.rank} can't go on after ranks {list(ranks)} were lost"
            raise RankLost(f"{message}: the others go on without it. Restart the job.", ranks[0], "unknown", ranks)
        return lost

    def _end_device_work(self, lost: set[int], verdict: RankLost | None) -> None:
        """Ends what this rank's GPU has left of the step in flight. Raises RankLost if a kernel goes on waiting."""
        world = self._world
        if world.device.type != "cuda":
            return
        if verdict is None:  # peers may still read what this rank sent: its groups aren't aborted
            world.finish_device_work([rank for rank in range(world.size) if rank not in lost])
            torch.cuda.synchronize(world.device)
            return
        limit_s = silent_after(world.timeout_s)
        for group in (world.group, world._attention_tp_group):
            if group is not None:
                with suppress(TimeoutError, RuntimeError):  # what it leaves running is waited for below
                    bounded(partial(abort, group, world.device), limit_s)
        idle = torch.cuda.Event()
        idle.record()
        deadline = time.monotonic() + limit_s
        while not idle.query():
            for memory in self._resources.of_ranks():
                memory.release()
            if time.monotonic() > deadline:
                message = f"a kernel on this rank's GPU still waits for a lost rank after {limit_s:g} s"
                words = f"{message} and can't be freed (flashinfer's and deepep's can't). Restart the job."
                raise RankLost(words, -1, "unknown")
            time.sleep(_LOOK_S)

    def _agree(self, guard: Guard, lost: set[int], leaving: set[int]) -> set[int]:
        """Returns who is lost, as all that are left say. The control store has no part in it.

        Each rank tells all others whom it goes on without, and adds whom those name that it goes on with, and who is
        lost meanwhile. It is over, on one rank after the other, when all that are left say the same. What they agree
        on only grows. A rank that learns of one more while others already make groups is joined by those: they can't
        end that without the lost rank, and hear of it, too.

        Args:
            lost: whom this rank knows of, `leaving` among them.

        Raises:
            RankLost: this rank is out, or too few are left to be sure that no others go on.
        """
        world, board, told = self._world, guard.board, False
        deadline = time.monotonic() + self._patience_s
        while True:
            guard.acknowledge()
            grown = self._grown(guard, lost)
            if grown != lost or not told:
                lost, told = grown, True
                self._require_quorum(guard, lost, leaving)
                board.vote(lost)
                deadline = time.monotonic() + self._patience_s
            peers = set(world._ranks) - lost - {world.rank}
            late = {rank for rank in peers if set(board.votes.get(rank, ())) != lost}
            if not late:
                return lost
            if time.monotonic() > deadline:
                lost = self._excluding(lost | late)
                told = False
            time.sleep(_LOOK_S)

    def _grown(self, guard: Guard, lost: set[int]) -> set[int]:
        """Adds whom the others name, and who was lost by now. Who is out puts nobody out."""
        grown, size = lost | set().union(*guard.absent()), -1
        while len(grown) != size:
            size = len(grown)
            votes = guard.board.votes
            grown = grown.union(*(votes.get(rank, frozenset()) for rank in set(self._world._ranks) - grown))
            grown = self._excluding(grown)
        return grown

    def _require_quorum(self, guard: Guard, lost: set[int], leaving: set[int]) -> None:
        """Raises RankLost unless these are enough (`may_go_on`). Before a vote: a rank that hears nobody must not put
        all others out."""
        ended, _ = guard.absent()
        ranks = set(self._world._ranks)
        voters = ranks - ended - leaving
        if not may_go_on(ranks - lost, voters):
            staying, others = sorted(ranks - lost), sorted(voters & lost)
            message = f"ranks {staying} can't go on: ranks {others}, which they don't hear, may do so without them"
            raise RankLost(f"{message}. Restart the job.", -1, "unknown")

    def _join_survivors(self, guard: Guard, lost: set[int]) -> None:
        """Is a World with the ranks that aren't `lost`. Raises RankLost.

        Another rank may be lost meanwhile, and some ranks be through with this when others learn of it. All keep their
        guards, and agree again on one set that holds what they agreed on here.
        """
        world = self._world
        ranks = [rank for rank in range(world.size) if rank not in lost]
        step_number, world.step_number = world.step_number, 0  # what the barriers compare: ranks may be a step apart
        world.take_call_log()
        self._life.leave_groups()
        world.alive = tuple(rank in ranks for rank in range(world.size))
        world._ranks = ranks
        guard.go_on(ranks)
        try:
            if len(ranks) == 1:
                guard.close()
                world._guard, world.generation = None, self._generation + len(lost)
            else:
                self._make_groups(guard, ranks, self._generation + len(lost))
            for memory in self._resources.of_ranks():
                memory.resume(world.alive)
            exchange(world, Header("barrier"))
        except BaseException:
            self._life.leave_groups()
            raise
        finally:
            world.step_number = step_number

    def _make_groups(self, guard: Guard, ranks: list[int], generation: int) -> None:
        world = self._world
        self._life.join(guard, generation)
        world.group = self._group_of(guard, "payload", ranks)
        size, first = world.parallel.attention_tp_size, world.rank - world.attention_tp_rank
        if size > 1:
            members = list(range(first, first + size))
            world._attention_tp_group = self._group_of(guard, f"attention {first}", members)
        exchange(world, Header("barrier"))

    def _group_of(self, guard: Guard, name: str, members: list[int]) -> dist.ProcessGroup:
        """Makes a group of some of the ranks that met. Raises RankLost."""
        device, timeout_s, beside = self._world.device, self._world.timeout_s, self._world._control
        return guard.bounded(lambda: payload_group(guard.met, name, members, device, timeout_s, beside), timeout_s)

"""A rank's membership in a World: joining the others, going on without lost ones, leaving in order or not."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from eprt.errors import RankLost, UsageError
from eprt.world.bounded import at_exit_leave
from eprt.world.collectives import Collectives, Seat
from eprt.world.groups import (
    control_group,
    host_number,
    hosts_store,
    payload_group,
    silent_after,
    start_guard,
)
from eprt.world.guard import EXIT_CODE, Guard
from eprt.world.header import Header, exchange
from eprt.world.meeting import job_name, meet
from eprt.world.resources import SharedResources
from eprt.world.shared_exchange import open_exchange
from eprt.world.shrink import Ballots, Survivors, free_device, whole_groups

logger = logging.getLogger("eprt")


class Membership(Collectives):
    """What a World is before it does anything: ranks that know each other, and hear of it when one is lost."""

    def __init__(self, seat: Seat, timeout_s: float, owns_default: bool) -> None:
        super().__init__(seat, timeout_s)
        self._pid = os.getpid()
        self._owns_default = owns_default
        self._hosts_store = owns_default and hosts_store(seat.rank)
        self._asked_to_leave = False
        self._resources = SharedResources()
        self._excepthook = sys.excepthook
        self._completed = -1
        self._ballots: Ballots | None = None
        self._farewell: Finalize | None = None
        self._own_groups: list[dist.ProcessGroup] = []  # of the default group's ranks, made for this World's meshes
        self._left_behind: list[object] = []  # groups of lost ranks: what is stuck in them can't be destroyed

    def barrier(self) -> None:
        """Every rank is here. Raises WorldMismatch, on every rank, where one makes another call."""
        exchange(self, Header("barrier", -1, 0))

    # ---- joining --------------------------------------------------------------------------------------------

    def _start(self, guard: Guard) -> None:
        self._join(guard)
        self._ballots = Ballots(guard.met.store, silent_after(self.timeout_s))
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such a child ends without atexit
            self._farewell = Finalize(None, self._say_farewell, exitpriority=0)

    def _join(self, guard: Guard) -> None:
        """Agreement with the ranks that met, through the control group and, where that can be, shared memory."""
        self._guard = guard
        self.nonce = guard.nonce
        self.generation = guard.met.generation + (self._ballots.number if self._ballots is not None else 0)
        self._control = guard.bounded(lambda: control_group(guard.met, self.timeout_s, self.group), self.timeout_s)
        self.barrier()
        # Also a barrier: every rank has read who its peers are before any of them can end.
        hosts: list[int] = self._gather_joined(torch.tensor([host_number()]))[:, 0].tolist()
        fewest = min(hosts.count(host) for host in hosts)
        if fewest == len(hosts):
            self._shared = open_exchange(self._ranks.index(self.rank), len(hosts), self._gather_joined)
        self.parallel = replace(self.parallel, ranks_per_host=None if fewest == len(hosts) else fewest)

    def _gather_joined(self, x: torch.Tensor) -> torch.Tensor:
        """x[n] -> [A, n] of the ranks that are left."""
        return self.gather_control(x)[self._ranks]

    # ---- going on without lost ranks --------------------------------------------------------------------------

    def shrink(self) -> Survivors:
        """After RankLost: go on without the ranks that were lost. Collective over the ranks that are left.

            try:
                with world.step(hidden.shape[0]) as step:
                    output = layer(hidden)
            except RankLost:  # on every rank, in this step or, where it had all it needed of this one, the next
                found = world.shrink()  # raises RankLost where that can't be: then restart the job
                graphs.capture()  # if there are any

        For layers built with `RuntimeConfig(on_rank_lost="continue")` or "renormalize". Ranks keep their numbers, and
        `alive` says who is left. The experts of the lost ranks count as slots without an expert, unless another rank
        holds a replica. What was in flight is discarded: outputs of the step that raised, and handles that are open.
        What the ranks do together they do without the lost ones from now on, new layers over no memory of shared GPUs
        included. Graphs have to be captured again. A lost rank comes back by a restart of the job.

        Ranks that are lost meanwhile are left out, too; so is one that doesn't come within the World's timeout (twice
        that on GPUs), and a rank whose attention-TP group lost another. Such a rank, should it live, and one that was
        cut off hear that they are out: there is one decision, in the control store.

        At interpreter exit a process that went on leaves at once: with code 0, or 1 after an uncaught exception.

        Raises:
            RankLost: it can't be: no rank is named, the control store's host is among the lost, this rank is, or a
                kernel that waits for a lost rank can't be freed.
            UsageError: no rank is lost, a step is open, the World is closed, or memory that ranks share can't go on.
        """
        guard = self._require_lost()
        verdict = guard.verdict
        lost = {rank for rank, alive in enumerate(self.alive) if not alive}
        lost = self._excluding(lost | set(verdict.ranks if verdict is not None else ()))
        groups = [group for group in (self.group, self._attention_tp_group) if group is not None]
        free_device(self.device, groups, self._release_memory, silent_after(self.timeout_s))
        self._leave_groups()
        while True:
            lost = self._excluding(self._decide(lost))
            try:
                self._join_survivors(lost)
                break
            except RankLost as error:
                if not error.ranks:
                    raise
                lost = self._excluding(lost | set(error.ranks))
        completed = tuple(row[0] - 1 for row in self._said(self._completed + 1))
        self.step_number = max(row[0] for row in self._said(max(self.step_number, self._completed)))
        logger.warning("rank %d goes on without ranks %s", self.rank, sorted(lost))
        return Survivors(tuple(sorted(lost)), completed, self.step_number + 1)

    def require_whole(self, what: str) -> None:
        """Raises UsageError once a rank is lost."""
        if not all(self.alive):
            lost = [rank for rank, alive in enumerate(self.alive) if not alive]
            raise UsageError(f"{what} needs all ranks, and ranks {lost} are lost: restart the job")

    def _require_lost(self) -> Guard:
        """The guard that knows who is. Raises UsageError, RankLost: see `shrink`."""
        self.require_open()
        if self.current_step is not None:
            raise UsageError(f"shrink inside step {self.current_step.number}: let RankLost leave the step first")
        if self._guard is None or self._guard.verdict is None:
            raise UsageError("shrink, but no rank is lost: it is for who caught a RankLost")
        self._guard.acknowledge()
        verdict = self._guard.verdict
        if not verdict.ranks or verdict.why == "foreign":
            raise RankLost(f"{verdict} This can't be gone on from.", verdict.rank, verdict.why, verdict.ranks)
        return self._guard

    def _excluding(self, lost: set[int]) -> set[int]:
        """Who has to go if these do. Raises RankLost if this rank has to, or nobody could meet any more."""
        lost = whole_groups(lost, self.parallel)
        if self.rank in lost:
            self._refuse("the others go on without it", lost)
        if 0 in lost and self._guard is not None and self._guard.met.host == "rank 0":
            self._refuse("rank 0 served the control store, without which no new groups can be made", lost)
        return lost

    def _refuse(self, why: str, lost: set[int]) -> NoReturn:
        ranks = tuple(sorted(lost))
        message = f"rank {self.rank} can't go on after ranks {list(ranks)} were lost: {why}. Restart the job."
        raise RankLost(message, ranks[0], "unknown", ranks)

    def _decide(self, lost: set[int]) -> set[int]:
        if self._ballots is None:
            raise UsageError("shrink in a world of one: there is nobody to go on without")
        return self._ballots.decide(lost)

    def _release_memory(self) -> None:
        for memory in self._resources.of_ranks():
            memory.release()

    def _leave_groups(self) -> None:
        """Of the old membership. They are kept: something may be stuck in them until their own timeout."""
        self._left_behind += [self.group, self._attention_tp_group, self._control, self._moved]
        if self._shared is not None:
            self._shared.close()
        self.group = self._attention_tp_group = self._control = self._shared = None

    def _join_survivors(self, lost: set[int]) -> None:
        """Meet those who aren't `lost`, and be a World with them. Raises RankLost."""
        before, ballots = self._guard, self._ballots
        if before is None or ballots is None:
            return
        ranks = [rank for rank in range(self.size) if rank not in lost]
        step_number, self.step_number = self.step_number, 0  # what the barriers compare: ranks may be a step apart
        self.take_call_log()
        try:
            if len(ranks) == 1:
                self._leave_groups()
                self.alive, self._ranks, self._guard = _mask(self.size, ranks), ranks, None
                self.generation = before.met.generation + ballots.number
            else:
                self._meet_survivors(before, ballots, ranks)
            for memory in self._resources.of_ranks():
                memory.resume(self.alive)
            self.barrier()
        finally:
            self.step_number = step_number
        before.close()

    def _meet_survivors(self, before: Guard, ballots: Ballots, ranks: list[int]) -> None:
        store = dist.PrefixStore(f"without/{ballots.number}", ballots.client())
        patience_s = self.timeout_s * (2 if self.device.type == "cuda" else 1)
        silent_s, host = silent_after(self.timeout_s), before.met.host
        met = meet(store, "world", self.rank, ranks, patience_s, silent_s, host, job_name(), before.met.members)
        guard = start_guard(met, self.timeout_s, self.device, our_store=self._owns_default)
        self.alive, self._ranks = _mask(self.size, ranks), ranks
        try:
            self._join(guard)
            self.group = guard.bounded(
                lambda: payload_group(met, "payload", ranks, self.device, self.timeout_s, self._control),
                self.timeout_s,
            )
            size, first = self.parallel.attention_tp_size, self.rank - self.attention_tp_rank
            if size > 1:
                mine = list(range(first, first + size))
                self._attention_tp_group = guard.bounded(
                    lambda: payload_group(met, f"attention {first}", mine, self.device, self.timeout_s, self._control),
                    self.timeout_s,
                )
            self.barrier()
        except BaseException:
            self._guard = before
            self._leave_groups()
            guard.close()
            raise

    def _said(self, word: int) -> list[tuple[int, ...]]:
        return self.gather_words([word])

    # ---- leaving --------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.close(self.timeout_s if self._hosts_store else 0.0)
        self._unhook()
        if self._guard is not None:
            if self._guard.stuck:
                at_exit_leave(EXIT_CODE)
            if self._guard.verdict is not None or self._abandoned or self._guard.stuck:
                return  # groups with abandoned work can't be destroyed; the atexit hook ends the process
        if self._left_behind:
            return
        for graph in list(self.graphs):  # NCCL ends no communicator that a graph still holds: it waits for ever
            graph.reset()
        if self._shared is not None:
            self._shared.close()
        self._end_groups()
        atexit.unregister(self._at_exit)
        if self._farewell is not None:
            self._farewell.cancel()

    def _end_groups(self) -> None:
        """A gloo group's threads and sockets end with the last reference to it, and torch's registry holds one."""
        if os.getpid() != self._pid:
            return  # a forked child has none of those threads, and would wait for them for ever
        self._control = self._shared = self._ballots = self.group = self._attention_tp_group = None
        for group in self._own_groups:
            with suppress(ValueError):  # whoever owns the default group has ended that, and with it this one
                dist.destroy_process_group(group)
        self._own_groups.clear()
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()

    def _unhook(self) -> None:
        """Take our excepthook out, and those of Worlds that were closed before but lay below ours."""
        while isinstance(world := getattr(sys.excepthook, "__self__", None), Membership) and world.closed:
            sys.excepthook = world._excepthook

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An uncaught exception: tell the peers before the interpreter goes."""
        if self._guard is not None:
            self._guard.leave(f"raised: {kind.__name__}: {error}")
        self._excepthook(kind, error, trace)

    def _say_farewell(self) -> None:
        if os.getpid() == self._pid and self._guard is not None:
            self._guard.close(self.timeout_s if self._hosts_store else 0.0)

    def _at_exit(self) -> None:
        """Interpreter exit without `close`, or after a verdict. Abandoned work would hold the process: leave hard."""
        if os.getpid() != self._pid:
            return
        self._say_farewell()
        verdict: Any = None if self._guard is None else self._guard.verdict
        if verdict is not None or self._abandoned or self._left_behind:
            sys.stdout.flush()
            sys.stderr.flush()
            drained = self._asked_to_leave and verdict is not None and verdict.why == "left"
            os._exit(0 if drained else self._exit_code(verdict))

    def _exit_code(self, verdict: RankLost | None) -> int:
        uncaught: object = getattr(sys, "last_value", None)
        if verdict is not None or isinstance(uncaught, RankLost):
            return EXIT_CODE
        return int(uncaught is not None or not self._left_behind)


def _mask(size: int, ranks: list[int]) -> tuple[bool, ...]:
    return tuple(rank in ranks for rank in range(size))

"""How the ranks of a World find each other in a store: who is there, under which key, and where each listens.

Every wait is bounded and ends on all ranks in the same words: what goes wrong is written to the store once, and all
that still wait read it. The names of keys hold the job's identity, so a process of another job that shares the port
is told so, and a number that rank 0 draws, which only those that met know.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NoReturn, TypeVar

import torch.distributed as dist

from eprt.errors import EprtError, RankLost, WorldMismatch, one_block
from eprt.world.bounded import bounded
from eprt.world.members import Member, ended, listen, record

logger = logging.getLogger("eprt")
T = TypeVar("T")

OVER = "over"  # the key under which a meeting's, or a World's, end is written
_LOOK_S = 0.05
_LOOK_CLOSER_S = 0.5  # at the processes that are there: has one of them ended?
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


_BEEN: set[tuple[str, int]] = set()  # (meeting, rank) that this process took part in


@dataclass(frozen=True)
class Meeting:
    """The result. `store` is a part of the store that only these processes know; `listener` is this rank's."""

    rank: int
    members: list[Member]
    addresses: list[tuple[str, int]]
    listener: socket.socket
    nonce: str
    key: bytes
    store: dist.Store
    base: dist.Store

    @property
    def generation(self) -> int:
        """How often the job was restarted: the most that any rank's launcher counts."""
        return max(member.restarts for member in self.members)

    @cached_property
    def number(self) -> int:
        """The nonce as a header carries it."""
        return int(self.nonce[:15], 16)

    def intruded(self, text: str) -> tuple[int, str] | None:
        """(rank, words) of the end that somebody outside of the World wrote, if it is one."""
        verdict = _Over.parse(text.encode())
        return (verdict.rank, verdict.message) if verdict is not None and verdict.why == "foreign" else None


@dataclass(frozen=True)
class _Over:
    """The end of a meeting, as it stands in the store."""

    why: str
    ranks: tuple[int, ...]
    message: str

    @classmethod
    def parse(cls, raw: bytes) -> _Over | None:
        match record(raw):
            case {"why": str(why), "ranks": [*ranks], "message": str(message)} if all(type(r) is int for r in ranks):
                return cls(why, tuple(ranks), one_block(message))
            case _:
                return None

    @property
    def rank(self) -> int:
        return self.ranks[0] if self.ranks else -1

    @property
    def error(self) -> EprtError:
        if self.why == "mismatch":
            return WorldMismatch(self.message)
        return RankLost(self.message, self.rank, self.why, self.ranks)


class _Stale(Exception):
    """Rank 0 asked for another meeting."""


class _Table:
    """A meeting under way: bounded calls to the store, below one prefix."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, silent_s: float, host: str) -> None:
        self.store, self.rank, self.size, self._host = store, rank, size, host
        self.timeout_s, self._silent_s = timeout_s, silent_s
        self.deadline = time.monotonic() + timeout_s
        self.members: dict[int, Member] = {}
        self._moved: Callable[[], bool] = lambda: False

    def ask(self, call: Callable[[], T]) -> T:
        try:
            return bounded(call, self._silent_s)
        except TimeoutError as error:
            message = f"the control store gave no answer for {self._silent_s:g} s: {self._host} is stopped or cut off"
            raise self._store_lost(message, "silent") from error
        except dist.DistNetworkError as error:
            raise self._store_lost(
                f"the control store is gone while ranks met: {self._host} ended", "exited"
            ) from error

    def _store_lost(self, message: str, why: str) -> RankLost:
        rank = 0 if self._host == "rank 0" else -1
        return RankLost(f"{message}. Restart the job.", rank, "store" if rank < 0 else why)

    def sit_down(self, me: Member) -> None:
        """Take this rank's seat in the meeting that rank 0 asks for.

        The store may hold the keys of attempts and Worlds before, and no number of torchrun's tells attempts apart: its
        agents share one store, and each counts restarts by itself. So rank 0 asks under a new name; to that only the
        living answer.
        """
        base, record_of_me = self.store, json.dumps(asdict(me))
        if self.rank == 0:
            name = secrets.token_hex(8)
            self.store = dist.PrefixStore(name, base)
            self.ask(lambda: self.store.set("member/0", record_of_me))
            _BEEN.add((name, 0))
            self._claim_zero(base, name, me)
            return
        stale: _Over | None = None
        while time.monotonic() <= self.deadline:
            name = self._asked(base)
            if name and (name, self.rank) not in _BEEN:
                self.store = dist.PrefixStore(name, base)
                stale = self._over()
                if stale is None and self._take_seat(me, record_of_me):
                    _BEEN.add((name, self.rank))
                    self._moved = lambda name=name: self._asked(base) != name
                    return
            time.sleep(_LOOK_S)
        if stale is not None:
            raise stale.error
        self.store = dist.PrefixStore("nobody asked", base)
        self.end(_Over("silent", (0,), self._absent([0])))

    def _claim_zero(self, base: dist.Store, name: str, me: Member) -> None:
        """Ask for the meeting. A living rank 0 of the one before is either a World ago, this process, or a stranger."""
        before = self._asked(base)
        holder = Member.parse(bytes(self.ask(lambda: base.get(f"{before}/member/0")))) if before else None
        if holder is not None and holder.process != me.process and holder.home == me.home and not ended(holder.pid):
            self.store = dist.PrefixStore(before, base)
            self._refuse(holder, me)
        self.ask(lambda: base.set("asked", name))

    def _asked(self, base: dist.Store) -> str:
        """The name that stands in the store; "" for none, or garbage."""
        if not self.ask(lambda: base.check(["asked"])):
            return ""
        name = bytes(self.ask(lambda: base.get("asked"))).decode(errors="replace")
        return name if name.isalnum() and len(name) == 16 else ""

    def _take_seat(self, me: Member, record_of_me: str) -> bool:
        """False if a process that may be of an earlier attempt holds it: rank 0 will ask anew if it is."""
        seat = f"member/{self.rank}"
        there = self.ask(lambda: bytes(self.store.compare_set(seat, "", record_of_me)))
        holder = Member.parse(there)
        if holder is None:
            logger.warning("the store's key %s held garbage: overwritten", seat)
            self.ask(lambda: self.store.set(seat, record_of_me))
            return True
        if holder.process == me.process:
            return True
        if holder.home == me.home and not ended(holder.pid):
            self._refuse(holder, me)
        return False

    def _refuse(self, holder: Member, me: Member) -> NoReturn:
        message = (
            f"two processes say that they are rank {self.rank} of this world: {holder}, and {me}. Two jobs share a "
            "MASTER_PORT, or one was started twice: give each job a port of its own, and set EPRT_JOB"
        )
        over = _Over("foreign", (self.rank,), message)
        self.ask(lambda: self.store.compare_set(OVER, "", json.dumps(asdict(over))))
        raise WorldMismatch(message)

    def all(self, what: str, mine: str | None) -> list[bytes]:
        """Every rank's `what`. Raises what the ranks agree went wrong, in the same words on all of them."""
        names = [f"{what}/{rank}" for rank in range(self.size)]
        if mine is not None:
            self.ask(lambda: self.store.set(names[self.rank], mine))
        look_closer = time.monotonic() + _LOOK_CLOSER_S
        while not self.ask(lambda: self.store.check(names)):
            if self._moved():
                raise _Stale
            self.raise_if_over()
            now = time.monotonic()
            if now > look_closer:
                look_closer = now + _LOOK_CLOSER_S
                self._look_for_dead()
            if now > self.deadline:
                self._end_late(names)
            time.sleep(_LOOK_S)
        self.raise_if_over()
        return [bytes(self.ask(lambda name=name: self.store.get(name))) for name in names]

    def leave(self) -> None:
        """Whoever serves the store stays until all have read what they need of it."""
        if self._host == f"rank {self.rank}":
            self.all("read", "")
        else:
            self.ask(lambda: self.store.set(f"read/{self.rank}", ""))

    def excuse(self, error: BaseException) -> None:
        """Tell the others why this rank goes, if the store can still be asked."""
        words = (
            f"rank {self.rank} raised: {type(error).__name__}: {error}; others were still to meet it. Restart the job."
        )
        over = _Over("raised", (self.rank,), one_block(words))
        with suppress(EprtError, RuntimeError, OSError):
            self.ask(lambda: self.store.compare_set(OVER, "", json.dumps(asdict(over))))

    def end(self, over: _Over) -> NoReturn:
        """Write that it is over, and raise what stands there: another rank may have been first."""
        over = replace(over, message=one_block(over.message))
        self.ask(lambda: self.store.compare_set(OVER, "", json.dumps(asdict(over))))
        if self._host == f"rank {self.rank}":
            time.sleep(10 * _LOOK_S)  # the store goes with this process: let the others read
        self.raise_if_over()
        raise over.error

    def raise_if_over(self) -> None:
        over = self._over()
        if over is not None:
            raise over.error

    def _over(self) -> _Over | None:
        if not self.ask(lambda: self.store.check([OVER])):
            return None
        return _Over.parse(bytes(self.ask(lambda: self.store.get(OVER))))

    def _absent(self, missing: list[int]) -> str:
        return (
            f"ranks {missing} of {self.size} didn't come within {self.timeout_s:g} s of start-up; look at their logs. "
            "Restart the job."
        )

    def _end_late(self, names: list[str]) -> None:
        missing = [rank for rank, name in enumerate(names) if not self.ask(lambda name=name: self.store.check([name]))]
        if not missing:
            return
        self.end(_Over("silent", tuple(missing), self._absent(missing)))

    def _look_for_dead(self) -> None:
        me = Member.here(self.size)
        for rank in range(self.size):
            name = f"member/{rank}"
            if rank not in self.members and self.ask(lambda name=name: self.store.check([name])):
                member = Member.parse(bytes(self.ask(lambda name=name: self.store.get(name))))
                if member is not None:
                    self.members[rank] = member
        dead = tuple(r for r, member in self.members.items() if member.home == me.home and ended(member.pid))
        if dead:
            words = "; ".join(f"rank {r} exited while ranks met: {self.members[r]} is gone" for r in dead)
            self.end(_Over("exited", dead, f"{words}. Restart the job."))


def meet(
    store: dist.Store, label: str, rank: int, size: int, timeout_s: float, silent_s: float, host: str, job: str
) -> Meeting:
    """Find the other ranks in `store`. Collective.

    Args:
        label: names the group of ranks; Worlds of one group are told apart by their order.
        timeout_s: how long to wait for a rank that isn't there; silent_s: for an answer of the store.
        host: who serves the store, for messages.
        job: what the launcher calls this job.

    Raises:
        RankLost: a rank didn't come, or ended meanwhile; the same on all ranks that came.
        WorldMismatch: another process has this rank's place, or the ranks run different versions.
    """
    base = dist.PrefixStore(f"eprt/{_digest(job)}/{label}", store)
    until = time.monotonic() + timeout_s
    while True:
        table = _Table(base, rank, size, timeout_s, silent_s, host)
        table.deadline = until
        table.sit_down(Member.here(size))
        try:
            return _hold(table, rank, job)
        except _Stale:
            logger.debug("rank 0 asked anew: what this rank had joined was of an earlier attempt")
        except EprtError:
            raise
        except BaseException as error:
            table.excuse(error)
            raise


def _hold(table: _Table, rank: int, job: str) -> Meeting:
    members: list[Member] = []
    for peer, raw in enumerate(table.all("member", None)):
        member = Member.parse(raw)
        if member is None:
            table.end(_Over("foreign", (peer,), f"the store's record of rank {peer} was overwritten by a stranger"))
        members.append(member)
    _compare(table, members)
    listener = listen(members)
    port = listener.getsockname()[1]
    offer = {"address": [listener.getsockname()[0], port], "nonce": secrets.token_hex(16)}
    addresses: list[tuple[str, int]] = []
    nonce = ""
    for peer, raw in enumerate(table.all("offer", json.dumps(offer))):
        found = _offer(raw)
        if found is None:
            table.end(_Over("foreign", (peer,), f"the store's offer of rank {peer} was overwritten by a stranger"))
        addresses.append(found[0])
        nonce = nonce or found[1]  # rank 0's
    table.leave()
    key = hashlib.sha256(f"{job}\0{nonce}".encode()).digest()
    return Meeting(rank, members, addresses, listener, nonce, key, dist.PrefixStore(nonce, table.store), table.store)


def claim_store(store: dist.Store, job: str, silent_s: float) -> None:
    """The store belongs to the job that came first. Raises WorldMismatch for another."""
    me = replace(Member.here(0), process=job[:200])
    first = Member.parse(bytes(bounded(lambda: store.compare_set("eprt/owner", "", json.dumps(asdict(me))), silent_s)))
    if first is not None and first.process != me.process:
        raise WorldMismatch(
            f"the control store of MASTER_PORT {os.environ.get('MASTER_PORT')} belongs to job {first.process!r} "
            f"({first}), this process ({me}) to job {me.process!r}: give each job a MASTER_PORT of its own, or its "
            "ranks the same EPRT_JOB"
        )


def job_name() -> str:
    """What the launcher calls this job; "" where none says."""
    return next((f"{name}={os.environ[name]}" for name in JOB_VARIABLES if os.environ.get(name)), "")


def _compare(table: _Table, members: list[Member]) -> None:
    for name in ("size", "eprt", "torch"):
        values = [str(getattr(member, name)) for member in members]
        if len(set(values)) > 1:
            rows = "\n".join(f"{rank:4}  {value:16}  {members[rank]}" for rank, value in enumerate(values))
            what = {"size": "the world's size", "eprt": "eprt's version", "torch": "torch's version"}[name]
            message = f"the ranks disagree about {what}; start all of them alike:\nrank  {name:16}  process\n{rows}"
            table.end(_Over("mismatch", (), message))


def _offer(raw: bytes) -> tuple[tuple[str, int], str] | None:
    match record(raw):
        case {"address": [str(host), int(port)], "nonce": str(nonce)} if nonce.isalnum() and 0 < port < 65536:
            return (host, port), nonce
        case _:
            return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

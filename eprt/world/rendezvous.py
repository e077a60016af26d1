"""The rendezvous of a World: its ranks find each other in a store, and tell each other where they listen.

Every wait is bounded and ends on all ranks in the same words: what goes wrong is written to the store once, and all
that still wait read it. The names of keys hold the job's identity, so a process of another job that shares the port
is told so. What the ranks prove themselves by afterwards is erased from the store as soon as all have read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn, TypeVar

import torch.distributed as dist

from eprt.errors import ConfigError, EprtError, RankLost, WorldMismatch, aligned, one_block
from eprt.world.addresses import listen, named_interface
from eprt.world.process import Member, bounded, ended, job_name, record
from eprt.world.termination import TERMINATION, Termination, ask

logger = logging.getLogger("eprt")
T = TypeVar("T")

_NOBODY_ASKED = "nobody asked"  # below it the record stands that ends the wait for rank 0
_FILES, _OPEN = 24, "/dev/fd"  # of a World, beside those to each rank; of this process
_LOOK_S = 0.05
_LOOK_CLOSER_S = 0.5  # at the processes that are there: has one of them ended?
_ALIKE = {
    "size": "the world's size",
    "layout": "the world's layout",
    "eprt": "eprt's version",
    "torch": "torch's version",
}
_JOINED: set[tuple[object, int]] = set()  # (rendezvous, rank) that this process took part in, or heard the end of


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous: who takes part, and where each rank listens.

    Attributes:
        rank: this process's number; `members` and `addresses` have one entry for each rank, in order.
        listener: this rank's.
        nonce: the name of this meeting, equal on all ranks; anybody may know it.
        key: by which these processes prove that they met. All of them drew a part of it, and `erase` it from the store.
        store: a part of the store for these processes' groups; base: the part that they met in.
    """

    rank: int
    members: dict[int, Member]
    addresses: dict[int, tuple[str, int]]
    listener: socket.socket
    nonce: str
    key: bytes
    store: dist.Store
    base: dist.Store

    @property
    def generation(self) -> int:
        """Returns how often the job was restarted: the most that any rank's launcher counts."""
        return max(member.restarts for member in self.members.values())

    @property
    def ranks(self) -> list[int]:
        """Returns the ranks that met, ascending. A rank's place among them is its number in process groups."""
        return list(self.members)

    def erase(self) -> None:
        """Erases this rank's part of the key from the store. All ranks have read it; who comes later can't."""
        self.base.delete_key(f"offer/{self.rank}")


class _Stale(Exception):
    """Rank 0 asked for another rendezvous."""


class _Attempt:
    """A rendezvous under way: bounded calls to the store, below one prefix."""

    def __init__(
        self, base: dist.Store, rank: int, size: int, timeout_s: float, deadline: float, silent_s: float, host: str
    ) -> None:
        self.store = self._base = base
        self.rank, self.ranks, self.host = rank, range(size), host
        self.timeout_s, self.deadline, self._silent_s = timeout_s, deadline, silent_s
        self.members: dict[int, Member] = {}
        self.refusal: EprtError | None = None  # why this rank will not take part: told as soon as the others listen
        self._joined = ""  # what rank 0's request said, on the others

    def ask(self, call: Callable[[], T]) -> T:
        """Returns what a call to the store does. Raises as `ask`."""
        return ask(call, self._silent_s, self.host)

    def _read(self, store: dist.Store, key: str) -> bytes:
        """Returns what stands under a key; nothing where nobody wrote it."""
        return bytes(self.ask(lambda: store.get(key))) if self.ask(lambda: store.check([key])) else b""

    def join(self, me: Member) -> None:
        """Joins the rendezvous that rank 0 asks for.

        The store may hold the keys of attempts and Worlds before, and no number of torchrun's tells attempts apart: its
        agents share one store, and each counts restarts by itself. So rank 0 asks under a new name; to that only the
        living answer. A rank that comes after its rendezvous ended hears what ended it (`Termination.of_this_attempt`).
        """
        mine = json.dumps(asdict(me))
        if self.rank == 0:
            self._hear_the_end_of(_NOBODY_ASKED, mine)
            self._ask_anew(me, mine)
            return
        while time.monotonic() <= self.deadline:
            name = self._asked()
            if name and (name, self.rank) not in _JOINED:
                self._hear_the_end_of(name, mine)
                self.store = dist.PrefixStore(name, self._base)
                if self._termination() is None and self._claim_rank(me, mine):
                    _JOINED.add((name, self.rank))
                    self._joined = name
                    return
            time.sleep(_LOOK_S)
        self.store = dist.PrefixStore(_NOBODY_ASKED, self._base)
        if self.refusal is None:
            self._end_absent([0])

    def _hear_the_end_of(self, name: str, mine: str) -> None:
        """Raises what ended this attempt's rendezvous before this rank came, once, and says that it heard of it."""
        store = dist.PrefixStore(name, self._base)
        ending = Termination.parse(self._read(store, TERMINATION))
        if ending is None or (ending, self.rank) in _JOINED or not ending.of_this_attempt(self.host):
            return
        _JOINED.add((ending, self.rank))
        self.ask(lambda: store.set(f"member/{self.rank}", mine))
        raise ending.error

    def _ask_anew(self, me: Member, mine: str) -> None:
        """Asks for a rendezvous under a new name. If rank 0 of the last one still lives, it is this process (a World
        before this one) or a stranger."""
        name = secrets.token_hex(8)
        self.store = dist.PrefixStore(name, self._base)
        if self.refusal is not None:
            self.report_error(self.refusal)
        self.ask(lambda: self.store.set(f"member/{self.rank}", mine))
        _JOINED.add((name, self.rank))
        before = self._asked()
        holder = Member.parse(self._read(self._base, f"{before}/member/{self.rank}")) if before else None
        if holder is not None and holder.process != me.process and holder.home == me.home and not ended(holder.pid):
            self.store = dist.PrefixStore(before, self._base)
            self._refuse(holder, me)
        self.ask(lambda: self._base.set("asked", name))

    def _asked(self) -> str:
        """Returns the name that rank 0 asks under; "" for none, or garbage."""
        name = self._read(self._base, "asked").decode(errors="replace")
        return name if name.isalnum() and len(name) == 16 else ""

    def _claim_rank(self, me: Member, mine: str) -> bool:
        """Returns False if a process that may be of an earlier attempt holds it: rank 0 will ask anew if it is."""
        key = f"member/{self.rank}"
        if self.refusal is not None:
            if free := Member.parse(self._read(self.store, key)) is None:
                self.report_error(self.refusal)  # before this rank is there: its layout isn't compared
                self.ask(lambda: self.store.set(key, mine))
            return free
        there = self.ask(lambda: bytes(self.store.compare_set(key, "", mine)))
        holder = Member.parse(there)
        if holder is None:
            logger.warning("the store's key %s held garbage: overwritten", key)
            self.ask(lambda: self.store.set(key, mine))
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
        self._write(Termination("foreign", (self.rank,), message))
        raise WorldMismatch(message)

    def all(self, what: str, mine: str | None) -> list[bytes]:
        """Returns every rank's `what`. Raises what the ranks agree went wrong, in the same words on all of them."""
        names = [f"{what}/{rank}" for rank in self.ranks]
        if mine is not None:
            self.ask(lambda: self.store.set(f"{what}/{self.rank}", mine))
        look_closer = time.monotonic() + _LOOK_CLOSER_S
        while not self.ask(lambda: self.store.check(names)):
            if self._joined and bytes(self.ask(lambda: self._base.get("asked"))) != self._joined.encode():
                raise _Stale
            self.raise_if_terminated()
            now = time.monotonic()
            if now > look_closer:
                look_closer = now + _LOOK_CLOSER_S
                self._look_for_dead()
            if now > self.deadline:
                there = [self.ask(lambda name=name: self.store.check([name])) for name in names]
                if missing := [rank for rank, came in zip(self.ranks, there, strict=True) if not came]:
                    self._end_absent(missing)
            time.sleep(_LOOK_S)
        self.raise_if_terminated()
        # A store may be far away: this is one round trip, not one for each rank.
        return [bytes(raw) for raw in self.ask(lambda: self.store.multi_get(names))]

    def each(self, what: str, mine: str | None, parse: Callable[[bytes], T | None]) -> dict[int, T]:
        """Returns every rank's `what`, parsed, by rank. Raises as `all`, and where a stranger wrote over one."""
        found: dict[int, T] = {}
        for peer, raw in zip(self.ranks, self.all(what, mine), strict=True):
            if (value := parse(raw)) is None:
                message = f"the store's {what} record of rank {peer} was overwritten by a stranger"
                self.end(Termination("foreign", (peer,), message))
            found[peer] = value
        return found

    def leave(self) -> None:
        """Waits, on the rank that serves the store, until all have read what they need of it."""
        if self.host == f"rank {self.rank}":
            self.all("read", "")
        else:
            self.ask(lambda: self.store.set(f"read/{self.rank}", ""))

    def report_error(self, error: BaseException) -> None:
        """Tells the others why this rank goes, if the store can still be asked."""
        words = f"rank {self.rank} raised: {type(error).__name__}: {error}; others still wait for it. Restart the job."
        with suppress(EprtError, RuntimeError, OSError):
            self._write(Termination("raised", (self.rank,), one_block(words)))
        if self.host == f"rank {self.rank}":
            _ENDED.append(self)

    def end(self, found: Termination) -> NoReturn:
        """Writes the termination record, and raises what stands there: another rank may have been first."""
        ending = replace(found, message=one_block(found.message))
        self._write(ending)
        if self.host == f"rank {self.rank}":
            time.sleep(10 * _LOOK_S)  # the store goes with this process: let the others read
        self.raise_if_terminated()
        raise ending.error

    def _write(self, ending: Termination) -> None:
        """Writes the termination record, unless one is there."""
        self.ask(lambda: self.store.compare_set(TERMINATION, "", json.dumps(asdict(ending))))

    def raise_if_terminated(self) -> None:
        if (ending := self._termination()) is not None:
            if self.host == f"rank {self.rank}":
                _ENDED.append(self)
            raise ending.error

    def await_late(self) -> None:
        """Waits until every rank has come, or would come too late."""
        names = [f"member/{rank}" for rank in self.ranks]
        with suppress(RuntimeError, OSError):
            while time.monotonic() < self.deadline and not self.store.check(names):
                time.sleep(_LOOK_S)

    def _termination(self) -> Termination | None:
        return Termination.parse(self._read(self.store, TERMINATION))

    def _end_absent(self, missing: list[int]) -> NoReturn:
        words = f"ranks {missing} of {len(self.ranks)} didn't come within {self.timeout_s:g} s of start-up"
        self.end(Termination("silent", tuple(missing), f"{words}; look at their logs. Restart the job."))

    def _look_for_dead(self) -> None:
        me, started = Member.here(len(self.ranks)), time.monotonic()
        for rank in sorted(self.ranks, key=lambda rank: abs(rank - self.rank)):  # those of this host are near
            if time.monotonic() - started > _LOOK_CLOSER_S:  # the store is far away
                break
            if rank not in self.members and (member := Member.parse(self._read(self.store, f"member/{rank}"))):
                self.members[rank] = member
        dead = tuple(r for r, member in self.members.items() if member.home == me.home and ended(member.pid))
        if dead:
            words = "; ".join(f"rank {r} exited while ranks met: {self.members[r]} is gone" for r in dead)
            self.end(Termination("exited", dead, f"{words}. Restart the job."))


_ENDED: list[_Attempt] = []  # in a store that this process serves


def await_late() -> None:
    """Keeps a store that this process serves until the ranks that are still to come have heard how their rendezvous
    ended; no longer than they would have been awaited without that end."""
    while _ENDED:
        _ENDED.pop().await_late()


def meet(
    store: dist.Store,
    label: str,
    rank: int,
    size: int,
    timeout_s: float,
    silent_s: float,
    host: str,
    layout: str = "",
    refusal: EprtError | None = None,
) -> Rendezvous:
    """Finds the other ranks in `store`. Collective.

    Args:
        label: names the group of ranks; Worlds of one group are told apart by their order.
        timeout_s: how long to wait for a rank that isn't there; silent_s: for an answer of the store.
        host: who serves the store, for messages.
        layout: how the World is to be divided, in words; the same on all ranks.
        refusal: why this rank can't take part: told to the others once rank 0 asks, and raised when all have come.

    Raises:
        RankLost: a rank didn't come, or ended meanwhile; the same on all ranks that came, or come later.
        WorldMismatch: another process has this rank's place, or ranks run other versions or mean other Worlds.
        ConfigError: see `named_interface`, `require_files`.
    """
    named_interface()  # one that is there, or an error before ranks meet
    job = hashlib.sha256(job_name().encode()).hexdigest()[:16]
    base, deadline = dist.PrefixStore(f"eprt/{job}/{label}", store), time.monotonic() + timeout_s
    while True:
        attempt = _Attempt(base, rank, size, timeout_s, deadline, silent_s, host)
        attempt.refusal = refusal
        attempt.join(Member.here(size, layout))
        if refusal is not None:
            with suppress(TimeoutError):
                bounded(attempt.await_late, timeout_s)  # or they would take the next call for this one
            raise refusal
        try:
            require_files(size)
            return exchange_addresses(attempt)
        except _Stale:
            logger.debug("rank 0 asked anew: what this rank had joined was of an earlier attempt")
        except (RankLost, WorldMismatch):  # the others know
            raise
        except BaseException as error:
            attempt.report_error(error)
            raise


def require_files(size: int) -> None:
    """Raises ConfigError where this process may not open as many files as a World of so many ranks does: without them
    torch ends the process, or connections are missing that a firewall might have dropped."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir(_OPEN)) if os.path.isdir(_OPEN) else 0
    needed = _FILES + 2 * size  # a guard's links, and gloo's
    if most < opened + needed and most != resource.RLIM_INFINITY:
        raise ConfigError(
            f"at most {most} open files here, {opened} of them open: {size} ranks take {needed} more; raise `ulimit -n`"
        )


def exchange_addresses(attempt: _Attempt) -> Rendezvous:
    """Tells the ranks that joined where this one listens, and returns what all of them told."""
    members = attempt.each("member", None, Member.parse)
    _compare(attempt, members)
    listener = listen(list(members.values()))
    offer = {"address": listener.getsockname()[:2], "secret": secrets.token_hex(16)}
    offers = attempt.each("offer", json.dumps(offer), _offer)
    addresses = {peer: address for peer, (address, _) in offers.items()}
    attempt.leave()
    key = hashlib.sha256("\0".join([job_name(), *(secret for _, secret in offers.values())]).encode()).digest()
    nonce = hashlib.sha256(b"name of " + key).hexdigest()[:32]
    inner = dist.PrefixStore(nonce, attempt.store)
    return Rendezvous(attempt.rank, members, addresses, listener, nonce, key, inner, attempt.store)


def claim_store(store: dist.Store, silent_s: float, host: str) -> None:
    """Claims the store for the job that comes first. Raises WorldMismatch for another, RankLost as `ask`."""
    me = replace(Member.here(0), process=job_name()[:200])
    mine = json.dumps(asdict(me))
    first = Member.parse(bytes(ask(lambda: store.compare_set("eprt/owner", "", mine), silent_s, host)))
    if first is not None and first.process != me.process:
        raise WorldMismatch(
            f"the control store of MASTER_PORT {os.environ.get('MASTER_PORT')} belongs to job {first.process!r} "
            f"({first}), this process ({me}) to job {me.process!r}: give each job a MASTER_PORT of its own, or its "
            "ranks the same EPRT_JOB"
        )


def _compare(attempt: _Attempt, members: dict[int, Member]) -> None:
    """Ends the rendezvous of ranks that were started with other sizes or other versions."""
    for name, what in _ALIKE.items():
        values = {rank: str(getattr(member, name)) for rank, member in members.items()}
        if len(set(values.values())) > 1:
            rows = [("rank", name, "process"), *((str(r), value, str(members[r])) for r, value in values.items())]
            message = f"the ranks disagree about {what}; start all of them alike:\n{aligned(rows)}"
            attempt.end(Termination("mismatch", (), message))


def _offer(raw: bytes) -> tuple[tuple[str, int], str] | None:
    """Returns the address and the part of the key that these bytes offer, or None."""
    match record(raw):
        case {"address": [str(host), int(port)], "secret": str(secret)} if secret.isalnum() and 0 < port < 65536:
            return (host, port), secret
        case _:
            return None

"""Lets a guard hear: authenticated connections to the other ranks' guards, and a watch on the control store.

Each rank listens, and connects to the ranks below it. Both ends prove that they know the World's key before anything
they say is read, so a stranger that finds the port is closed out. Then JSON messages travel, each behind its length
and a proof over a key of this connection's own, its direction and its number: none can be made up, repeated or moved.
All of it runs on the event loop of one guard's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import torch.distributed as dist

from eprt.errors import one_block

logger = logging.getLogger("eprt")

MAX_MESSAGE_BYTES = 1 << 18  # the addresses that gloo tells for some thousand ranks
_MAX_UNSENT_BYTES = 65_536  # to a peer that stopped reading: it misses heartbeats, not verdicts
_CHALLENGE_BYTES = 16
_HELLO = struct.Struct(f">{_CHALLENGE_BYTES}sI")
_LENGTH = struct.Struct(">I")
_MAC_BYTES = 32
_MAX_UNPROVEN = 64  # connections beside one for each rank; then the oldest goes
_HANDSHAKE_S = 5.0
_RETRY_S = 0.1
# After an end, until somebody is accused: what was sent before arrives, and who ended with it is heard of.
GRACE_S = 1.0


class LoopThread(threading.Thread):
    """An event loop in a thread of its own: other threads hand work to it, and wait for it a bounded time.

    The loop is `loop`; `begin` is called in it first.
    """

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.loop = asyncio.new_event_loop()
        self._begin = begin

    @property
    def here(self) -> bool:
        """Returns whether the caller is this thread."""
        return threading.current_thread() is self

    def do(self, call: Callable[[], None]) -> None:
        """Runs `call` in the thread and waits for it at most a second: it must happen before this process ends. Does
        nothing once the thread has ended."""
        if self.here:
            call()
        if self.here or not self.is_alive():
            return
        done = threading.Event()
        with suppress(RuntimeError):  # the loop ended in between
            self.loop.call_soon_threadsafe(call)
            self.loop.call_soon_threadsafe(done.set)
            done.wait(1.0)

    def stop(self) -> None:
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self.is_alive() and not self.here:
            self.join(timeout=2.0)

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.call_soon(self._begin)
            self.loop.run_forever()
            pending = asyncio.all_tasks(self.loop)  # what never came about
            for task in pending:
                task.cancel()
            # gather() of nothing asks for the thread's loop, which a policy set since (uvloop's) doesn't know.
            if pending:
                self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        finally:
            self.loop.close()


class Links:
    """One rank's connections to all others, on the running event loop.

    Args:
        ranks: who may take part.
        greeting: what a peer is told as soon as its connection is proven.
        heard: called with (rank, message) for everything a peer says.
        closed: called with the rank whose connection ended.
    """

    def __init__(
        self,
        rank: int,
        ranks: Iterable[int],
        key: bytes,
        greeting: Callable[[], list[object]],
        heard: Callable[[int, Any], None],
        closed: Callable[[int], None],
    ) -> None:
        self.rank, self.key = rank, key
        self._peers = set(ranks) - {rank}
        self._greeting, self.heard, self._closed = greeting, heard, closed
        self._open: dict[int, _Link] = {}
        self._unproven: dict[_Link, None] = {}  # in order of their coming
        self._warned = False
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._ending = False

    async def start(self, listener: socket.socket, addresses: dict[int, tuple[str, int]]) -> None:
        """Listens on `listener` and goes on connecting to the lower ranks' `addresses` until they answer."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        backlog = len(addresses) + _MAX_UNPROVEN
        self._server = await loop.create_server(lambda: _Link(self, None), sock=listener, backlog=backlog)
        self._tasks = [loop.create_task(self._connect(peer, addresses[peer])) for peer in addresses if peer < self.rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._open

    def send(self, rank: int, message: object, must: bool = True) -> None:
        """Sends to one peer. Does nothing if it isn't connected or, unless it `must`, if the peer doesn't read."""
        if rank in self._open:
            self._open[rank].send(message, must)

    def send_all(self, message: object, must: bool = True) -> None:
        for rank in list(self._open):
            self.send(rank, message, must)

    def close(self) -> None:
        """Closes all connections; what was sent still goes out."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for link in [*self._open.values(), *self._unproven]:
            link.transport.close()

    def drop(self, rank: int) -> None:
        """Closes the connection to a rank that takes part no more, and lets it make no other."""
        self._peers.discard(rank)
        if (link := self._open.pop(rank, None)) is not None:
            link.transport.close()

    async def _connect(self, peer: int, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        while not self._ending and peer in self._peers and peer not in self._open:
            try:
                await asyncio.wait_for(loop.create_connection(lambda: _Link(self, peer), *address), _HANDSHAKE_S)
            except (OSError, asyncio.TimeoutError) as error:
                logger.debug("rank %d can't be reached at %s yet: %s", peer, address, error)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def came(self, link: _Link) -> None:
        """Counts a connection that has proven nothing yet. Strangers can't take all descriptors of this process: if
        there are too many, the oldest goes, since a rank proves itself at once."""
        self._unproven[link] = None
        if len(self._unproven) > len(self._peers) + _MAX_UNPROVEN:
            next(iter(self._unproven)).refuse("too many connections that proved nothing")

    def left(self, link: _Link) -> None:
        self._unproven.pop(link, None)

    def refused(self, why: str) -> None:
        """Logs one line for all strangers; `debug` has each."""
        if not self._warned:
            logger.warning("%s; further ones are logged as debug", why)
        logger.debug("%s", why)
        self._warned = True

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs what asyncio couldn't do (accept, without descriptors), not its stack."""
        self.refused(one_block(f"{context['message']}: {context.get('exception')!r}", 300))

    def opened(self, peer: int, link: _Link) -> bool:
        """Returns whether the link may stay: a peer is a rank of this World, and has one connection."""
        self.left(link)
        if self._ending or peer not in self._peers or self._open.setdefault(peer, link) is not link:
            return False
        for message in self._greeting():
            link.send(message, must=True)
        return True

    def ended(self, peer: int, link: _Link) -> None:
        if self._open.get(peer) is link:
            del self._open[peer]
            if not self._ending:
                self._closed(peer)


class _Link(asyncio.Protocol):
    """One connection. `peer` is the rank that was called, None for a caller who has yet to prove its rank."""

    transport: asyncio.Transport

    def __init__(self, links: Links, peer: int | None) -> None:
        self._links = links
        self._called = peer
        self._peer = peer
        self._mine = secrets.token_bytes(_CHALLENGE_BYTES)
        self._theirs = b""
        self._trusted = False
        self._unread = bytearray()
        self._sent = self._received = 0
        self._keys: dict[bool, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._links.came(self)
        self.transport.write(_HELLO.pack(self._mine, self._links.rank))
        asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._expect_trust)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self._trusted:
            self._shake_hands()
        while self._trusted and not self.transport.is_closing() and len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > MAX_MESSAGE_BYTES:
                self.refuse(f"a message of {length} bytes, over the limit of {MAX_MESSAGE_BYTES}")
                return
            if len(self._unread) < _LENGTH.size + _MAC_BYTES + length:
                return
            self._take(_LENGTH.size)
            proof, message = self._take(_MAC_BYTES), self._take(length)
            if not hmac.compare_digest(proof, self._seal(message, self._received, self._called is None)):
                self.refuse("a message without its proof")
                return
            self._received += 1
            self._deliver(message)

    def _shake_hands(self) -> None:
        """Answers the other end's challenge, then looks at its proof, each once it has come."""
        if not self._theirs and len(self._unread) >= _HELLO.size:
            self._theirs, rank = _HELLO.unpack(self._take(_HELLO.size))
            if self._called is None:
                self._peer = rank
            self.transport.write(self._proof(self._called is not None))
        if self._theirs and len(self._unread) >= _MAC_BYTES:
            self._trusted = hmac.compare_digest(self._take(_MAC_BYTES), self._proof(self._called is None))
            if not self._trusted:
                self.refuse("it doesn't know this World's key")
            elif self._peer is None or not self._links.opened(self._peer, self):
                self.refuse(f"rank {self._peer} is connected already, or is no peer")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._links.left(self)
        if self._trusted and self._peer is not None:
            self._links.ended(self._peer, self)

    def send(self, message: object, must: bool) -> None:
        if must or self.transport.get_write_buffer_size() < _MAX_UNSENT_BYTES:
            data = json.dumps(message).encode()
            proof = self._seal(data, self._sent, self._called is not None)
            self._sent += 1
            self.transport.write(_LENGTH.pack(len(data)) + proof + data)

    def _deliver(self, data: bytes) -> None:
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            logger.warning("rank %s sent something that isn't JSON: ignored", self._peer)
            return
        if self._peer is not None:
            self._links.heard(self._peer, message)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._unread[:size])
        del self._unread[:size]
        return taken

    def _seal(self, message: bytes, number: int, by_caller: bool) -> bytes:
        """Returns the proof of a message: over a key that both challenges are part of, its direction and its number."""
        if by_caller not in self._keys:
            text = b"messages" + self._proof(by_caller)
            self._keys[by_caller] = hmac.new(self._links.key, text, hashlib.sha256).digest()
        return hmac.new(self._keys[by_caller], number.to_bytes(8, "big") + message, hashlib.sha256).digest()

    def _proof(self, by_caller: bool) -> bytes:
        """Returns the proof that one end knows the key: over both challenges and both ranks, different for each end."""
        ends = [(self._mine, self._links.rank), (self._theirs, self._peer or 0)]
        caller, called = ends if self._called is not None else ends[::-1]
        text = b"".join((b"caller" if by_caller else b"called", _HELLO.pack(*caller), _HELLO.pack(*called)))
        return hmac.new(self._links.key, text, hashlib.sha256).digest()

    def _expect_trust(self) -> None:
        if not self._trusted and not self.transport.is_closing():
            self.refuse(f"no proof within {_HANDSHAKE_S:g} s")

    def refuse(self, why: str) -> None:
        self._links.left(self)
        self._links.refused(f"a connection from {self.transport.get_extra_info('peername')} was refused: {why}")
        self.transport.abort()


class StoreWatch(threading.Thread):
    """Watches from a thread of its own whether the store's host still answers: a torchrun agent that is gone starts
    nothing again. What the store holds is nobody's concern. A call to it may never return.

    Args:
        store: one that no other thread uses (a clone); None: nothing is watched.
    """

    def __init__(self, store: dist.Store | None, beat_s: float, silent_after_s: float) -> None:
        super().__init__(name="eprt-store-watch", daemon=True)
        self._store = store
        self._beat_s, self._silent_after_s = beat_s, silent_after_s
        self._asked_at: float | None = None
        self._error: str | None = None
        self._gone_at: float | None = None
        self._ending = threading.Event()

    def start(self) -> None:
        if self._store is not None:
            super().start()

    def stop(self) -> None:
        """Ends the watch. A thread inside a call that doesn't return stays behind, alive."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=2.0)
        self._store = None

    def put_off(self, seconds: float) -> None:
        """Gives the store longer to answer, by the time in which this process was stopped."""
        if (asked_at := self._asked_at) is not None:
            self._asked_at = asked_at + seconds

    def complaint(self, now: float, somebody_ended: bool) -> str:
        """Returns what is wrong with the store, "" for nothing. An ended rank that served it explains its end."""
        if self._error is not None:
            self._gone_at = self._gone_at or now
            if not somebody_ended and now - self._gone_at > GRACE_S:  # else only who waits for that rank is lost
                return "the control store is gone, its host ended (torchrun's agent?)"
        elif self._asked_at is not None and now - self._asked_at > self._silent_after_s + 2 * self._beat_s:
            return f"the control store gave no answer for {self._silent_after_s:g} s: its host is stopped or cut off"
        return ""

    def run(self) -> None:
        store = self._store
        while store is not None and not self._ending.wait(self._beat_s):
            try:
                self._asked_at = time.monotonic()
                store.check(["answers"])
                self._asked_at = None
            except (RuntimeError, OSError) as error:
                self._error = str(error)
                return

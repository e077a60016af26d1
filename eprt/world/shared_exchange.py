"""Exchanges a few words between all ranks of one host through memory that they share, without sockets.

Each rank has a row in each of two buffers. It writes its words there behind their exchange's number and a checksum over
both, then reads the other rows until each carries that number and fits its checksum.

Why that is enough:
- No fences. A row that is read while it is written, or whose parts become visible out of order, doesn't fit its
  checksum and is read again; one that fits is the row. (32 bits of chance, in the nanoseconds of a torn read.)
- Two buffers. A rank writes row n + 1 after it has read all rows n, so every rank has begun exchange n, so every rank
  has read all rows n - 1: their buffer, which n + 1 overwrites, is read by nobody. A rank that gave up waiting in
  exchange n (an interrupt) first reads it to its end before it begins the next.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from eprt.errors import WorldMismatch

MAX_WORDS = 61
_FOLDER = Path("/dev/shm")
_ROW_BYTES = 512  # checksum, number, how many words, words
_HEAD = struct.Struct("<3q")
_NAME_BYTES = 128
_TOKEN_BYTES = 16


class SharedExchange:
    """One rank's view of the rows. `open_exchange` makes it.

    Args:
        memory: 2 * size rows, zero before the first exchange.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory = memory
        self._rank, self._size = rank, size
        self._number = 0
        self._pending = False

    def gather(self, words: Sequence[int], pauses: Iterator[None]) -> list[tuple[int, ...]]:
        """Returns every rank's words, in rank order. Collective.

        Args:
            words: at most `MAX_WORDS` int64; equally many on every rank.
            pauses: advanced between two looks at rows that aren't there yet; raises what ends the waiting.

        Raises:
            WorldMismatch: the ranks bring different numbers of words, which no two equal calls do.
        """
        if self._pending:
            self._read_all(pauses)
        self._number += 1
        self._write(words)
        self._pending = True
        rows = self._read_all(pauses)
        self._pending = False
        if any(len(row) != len(words) for row in rows):
            raise WorldMismatch(
                f"the ranks exchange different numbers of words ({', '.join(str(len(row)) for row in rows)}, by rank): "
                "make the same calls on every rank"
            )
        return rows

    def close(self) -> None:
        self._memory.close()

    def _start(self, rank: int) -> int:
        return ((self._number & 1) * self._size + rank) * _ROW_BYTES

    def _write(self, words: Sequence[int]) -> None:
        body = struct.pack(f"<{2 + len(words)}q", self._number, len(words), *words)
        start = self._start(self._rank)
        self._memory[start : start + 8 + len(body)] = zlib.crc32(body).to_bytes(8, "little") + body

    def _read_all(self, pauses: Iterator[None]) -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        missing = list(range(self._size))
        while True:
            for rank in missing:
                row = self._read(rank)
                if row is not None:
                    found[rank] = row
            if len(found) == self._size:
                return [found[rank] for rank in range(self._size)]
            missing = [rank for rank in missing if rank not in found]
            next(pauses)

    def _read(self, rank: int) -> tuple[int, ...] | None:
        """Returns a rank's row of the current exchange; None while it isn't there as a whole."""
        start = self._start(rank)
        if _HEAD.unpack_from(self._memory, start)[1] != self._number:
            return None
        raw = self._memory[start : start + _ROW_BYTES]  # one copy: what is checked is what is used
        checksum, number, count = _HEAD.unpack_from(raw)
        if number != self._number or not 0 <= count <= MAX_WORDS:
            return None
        if zlib.crc32(raw[8 : 24 + 8 * count]) != checksum:
            return None
        return struct.unpack_from(f"<{count}q", raw, 24)


def open_exchange(
    rank: int, size: int, gather: Callable[[torch.Tensor], torch.Tensor], folder: Path = _FOLDER
) -> SharedExchange | None:
    """Opens memory that all ranks see, or returns None on all of them: no such folder, no room, ranks of several
    containers or users. Collective.

    Args:
        gather: uint8 x[n] -> [W, n], over the control group.
    """
    name, token = "", os.urandom(_TOKEN_BYTES)
    memory: mmap.mmap | None = None
    try:
        if rank == 0:
            name, memory = _create(folder, size, token)
        said = bytes(gather(_bytes(name.encode().ljust(_NAME_BYTES, b"\0") + token))[0].tolist())
        if rank != 0:
            said_name = said[:_NAME_BYTES].rstrip(b"\0").decode(errors="replace")
            memory = _open(folder / said_name, size, said[_NAME_BYTES:]) if said_name else None
        # Each rank leaves its mark, and then every rank must see every mark: a file of the same name isn't enough.
        mark = said[_NAME_BYTES:] + rank.to_bytes(8, "little")
        if memory is not None:
            memory[rank * _ROW_BYTES : rank * _ROW_BYTES + len(mark)] = mark
        everywhere = bool(gather(_bytes(bytes([memory is not None]))).all())
    finally:
        if name:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    seen = memory is not None and everywhere and _sees_all(memory, size, said[_NAME_BYTES:])
    agreed = bool(gather(_bytes(bytes([seen]))).all())
    if memory is None or not agreed:
        if memory is not None:
            memory.close()
        return None
    memory[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES] = bytes(_ROW_BYTES)
    gather(_bytes(b"\0"))  # nobody writes a row that its owner is still going to clear, or reads a mark as a row
    return SharedExchange(memory, rank, size)


def _sees_all(memory: mmap.mmap, size: int, token: bytes) -> bool:
    return all(
        memory[rank * _ROW_BYTES :][: _TOKEN_BYTES + 8] == token + rank.to_bytes(8, "little") for rank in range(size)
    )


def _create(folder: Path, size: int, token: bytes) -> tuple[str, mmap.mmap | None]:
    """Makes a file of mode 0600 with room for the rows, the token at its end; ("", None) where that can't be had."""
    try:
        file, path = tempfile.mkstemp(prefix=f"eprt-{os.getpid()}-", dir=folder)
    except OSError:
        return "", None
    try:
        rows = 2 * size * _ROW_BYTES
        os.posix_fallocate(file, 0, rows + _TOKEN_BYTES)  # now, or a full folder would be a SIGBUS later
        memory = mmap.mmap(file, rows + _TOKEN_BYTES)
        memory[rows:] = token
    except OSError:
        return Path(path).name, None
    finally:
        os.close(file)
    return Path(path).name, memory


def _open(path: Path, size: int, token: bytes) -> mmap.mmap | None:
    """Opens the file that rank 0 made; None where this rank sees no such file, or another one."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    rows = 2 * size * _ROW_BYTES
    try:
        if os.fstat(file).st_size != rows + _TOKEN_BYTES:
            return None
        memory = mmap.mmap(file, rows + _TOKEN_BYTES)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    if memory[rows:] != token:
        memory.close()
        return None
    return memory


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

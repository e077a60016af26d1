"""Keeps the answers of `eprt generate --output` on the disk, so that a later run goes on where one was ended."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, BinaryIO

from eprt.errors import ConfigError, one_block
from eprt.files import is_strangers_link, named

_KEY = "eprt generate"
_REMEDY = "name another file, or remove it to begin again"


class Journal:
    """The answers that earlier runs left in a file, and those that follow.

    Its first line says what made it: {"eprt generate": settings}. Each line after it is an answer, in the prompts'
    order. A last line that was cut off isn't counted, nor are the answers of a round that isn't whole: they are made
    again, so that the same prompts share a batch as without the interruption. Nothing else is ever overwritten.

    Args:
        path: made if it isn't there.
        settings: what decides the answers; those of the file must be equal.
        round_size: prompts that are answered together. A file of other rounds is gone on with after its last answer.
        prompts: all of them, as JSON objects; each answer repeats its own as "given".

    Attributes:
        done: how many prompts are answered.

    Raises:
        ConfigError: the file can't be read or written, isn't a regular one, wasn't begun by `eprt generate`, or holds
            answers to other prompts or under other settings, or another process writes it. It is left as it is.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], round_size: int, prompts: Sequence[str]) -> None:
        self._path, self.done = path, 0
        header = json.dumps({_KEY: {**settings, "round": round_size}}).encode() + b"\n"
        try:
            self._file = _opened(path)
            _lock(self._file, path)
            held = self._file.read()
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from error
        try:
            kept = b"" if header.startswith(held) else self._kept(held, settings, round_size, prompts)
            self._file.seek(len(kept))
            self._file.truncate()
            self._append(b"" if kept else header)
        except BaseException:
            self.close()
            raise

    def _kept(self, held: bytes, settings: Mapping[str, Any], round_size: int, prompts: Sequence[str]) -> bytes:
        """Returns the whole lines that count, and counts them. Raises ConfigError."""
        first, *lines = held.split(b"\n")
        ours = _object(first).get(_KEY) if lines else None
        if not isinstance(ours, dict):
            raise ConfigError(f"--output {self._path}: not begun by eprt generate, and left as it is: {_REMEDY}")
        other = [
            f"{name} {ours.get(name)!r}, now {value!r}" for name, value in settings.items() if ours.get(name) != value
        ]
        if other:
            raise ConfigError(f"--output {self._path} holds answers of {one_block('; '.join(other))}: {_REMEDY}")
        lines.pop()  # cut off, or empty
        for number, line in enumerate(lines):
            row = _object(line)
            given = json.dumps(row.get("given")) if isinstance(row.get("tokens"), list) else ""
            if number >= len(prompts) or given != prompts[number]:
                raise ConfigError(
                    f"{self._path}:{number + 2} answers no prompt, or another than --prompts has there: {_REMEDY}"
                )
        whole = ours.get("round") != round_size or len(lines) == len(prompts)
        self.done = len(lines) if whole else len(lines) // round_size * round_size
        return b"".join(line + b"\n" for line in (first, *lines[: self.done]))

    def write(self, answers: Sequence[str]) -> None:
        """Appends answers, JSON objects, and waits until they are on the disk. Raises OSError, which names the file."""
        self._append("".join(f"{answer}\n" for answer in answers).encode())

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        with named(self._path):
            while rest:  # in one write where the system takes it: a signal finds all of a round there, or nothing
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def as_line(given: str, said: Mapping[str, Any]) -> str:
    """Returns an answer as a JSON object: the prompt as it was given, a JSON object itself, apart from what is said."""
    return f'{{"given": {given}, {json.dumps(said)[1:]}'


def _opened(path: Path) -> BinaryIO:
    """Opens a file to read and write, unbuffered. Raises OSError, ConfigError."""
    if is_strangers_link(path):
        raise ConfigError(f"--output {path}: a link that another user made; name another file")
    try:
        found = path.stat()
    except FileNotFoundError:
        return path.resolve().open("x+b", buffering=0)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"--output {path}: not a regular file; without --output, answers go to stdout")
    if found.st_nlink > 1:
        raise ConfigError(f"--output {path}: a file with {found.st_nlink} names (hard links); {_REMEDY}")
    return path.open("r+b", buffering=0)


def _lock(file: BinaryIO, path: Path) -> None:
    """Holds the file until it is closed. Raises ConfigError where another process does: two would write over each
    other's answers."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"--output {path}: another eprt generate writes it: wait, or name another file") from error
    except OSError:  # a file system without locks
        pass


def _object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object in a line, or an empty one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}

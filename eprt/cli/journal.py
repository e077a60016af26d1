"""Answers in a file, one JSON line a prompt, in the prompts' order: what is there need not be made again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eprt.errors import ConfigError


class Journal:
    """The answers that an earlier run left in a file, and those that follow.

    A last line that was cut off as the run ended isn't counted, and is overwritten.

    Args:
        path: made if it isn't there.
        prompts: all of them; each answer repeats its prompt's fields.

    Attributes:
        done: how many prompts are answered.

    Raises:
        ConfigError: the file can't be read or written, or holds answers to other prompts.
    """

    def __init__(self, path: Path, prompts: Sequence[dict[str, Any]]) -> None:
        try:
            self._file = path.open("r+b" if path.exists() else "x+b")
            lines = self._file.read().splitlines(keepends=True)
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from error
        whole = lines[:-1] if lines and not _is_answer(lines[-1]) else lines
        for number, line in enumerate(whole):
            if number >= len(prompts) or not _answers(line, prompts[number]):
                raise ConfigError(
                    f"{path}:{number + 1} answers another prompt than --prompts has there: name another file, or "
                    "remove it to begin again"
                )
        self.done = len(whole)
        self._file.seek(sum(map(len, whole)))
        self._file.truncate()

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append answers, and wait until they are on the disk. Raises OSError."""
        self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _is_answer(line: bytes) -> bool:
    return line.endswith(b"\n") and _parsed(line) is not None


def _answers(line: bytes, prompt: dict[str, Any]) -> bool:
    row = _parsed(line)
    return row is not None and {name: row.get(name) for name in prompt} == prompt


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The answer in a line, or None."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("tokens"), list) else None

"""Prints what a command reports: tables for people, one JSON object for programs, errors as one block. Imports no
torch."""

from __future__ import annotations

import io
import json as json_format
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from eprt.errors import ConfigError, aligned
from eprt.json_files import finite
from eprt.ranks.scratch import Scratch

NO_OUTPUT = 74  # EX_IOERR
PIPE_CLOSED = 141  # what a shell says of a process that SIGPIPE ended
_CONTROLS = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

# One column of a table: the row's key or attribute ("support.reason"), with a format if one is needed ("us:.0f"), or
# two of them to show both ("p50/p99:.1f"); or a function of the row.
Column = str | Callable[[Any], object]


def columns(text: str, **functions: Callable[[Any], object]) -> dict[str, Column]:
    """Returns columns by heading, from "heading = key | heading = key:format | ...".

    A heading alone is its own key; a key that names one of `functions` stands for it.
    """
    parts = (part.partition("=") for part in text.split("|"))
    keys = {heading.strip(): (key or heading).strip() for heading, _, key in parts}
    return {heading: functions.get(key, key) for heading, key in keys.items()}


class OutputLost(Exception):
    """Raised when standard output takes nothing any more. `code` is the command's exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"standard output is lost, exit code {code}")
        self.code = code


def write(text: str) -> None:
    """Writes a line or block to standard output. Raises OutputLost; unless the reader closed the pipe, the reason is
    printed first."""
    try:
        sys.stdout.write(harmless(text) + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise lost(sys.stdout, error) from error


def lost(stream: TextIO, error: OSError) -> OutputLost:
    """Prints why `stream` failed, and discards what it still buffers."""
    _discard(stream)
    if isinstance(error, BrokenPipeError):
        return OutputLost(PIPE_CLOSED)
    _complain(f"eprt: the result couldn't be written: {error.strerror or error}")
    return OutputLost(NO_OUTPUT)


def _complain(text: str) -> None:
    """Writes to standard error, unless that is lost, too: the exit code says it then."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discards what a stream still buffers: Python would try again at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def harmless(text: str) -> str:
    """Returns text, parts of which somebody else wrote, without what a terminal obeys: escape codes and the like."""
    return text.translate(_CONTROLS)


def show_everything() -> None:
    """Makes both streams escape what the locale's encoding lacks (a path's accents under LC_ALL=C)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Terminal:
    """Standard output and error of a command, of the one rank that speaks.

    Args:
        json: say nothing on stdout but the one `result` object; progress and errors go to stderr anyway.
        speaks: False silences everything (ranks other than 0 under torchrun).
    """

    def __init__(self, json: bool = False, speaks: bool | None = None) -> None:
        self.json = json
        self.speaks = os.environ.get("RANK", "0") == "0" if speaks is None else speaks

    def say(self, *texts: str) -> None:
        """Prints lines or blocks for people."""
        if self.speaks and not self.json and texts:
            write("\n".join(texts))

    def note(self, text: str) -> None:
        """Prints a line on stderr, for a command whose stdout is data."""
        if self.speaks:
            _complain(harmless(text))

    def result(self, value: dict[str, Any]) -> None:
        """Prints the JSON object, if it was asked for."""
        if self.speaks and self.json:
            write(json_format.dumps(finite(value), allow_nan=False))

    def error(self, text: str, shared: bool = True) -> None:
        """Prints one block on stderr; every rank prints it, with its number, if `shared` is False."""
        if self.speaks or not shared:
            whose = "" if self.speaks else f" rank {os.environ.get('RANK')}:"
            _complain(f"eprt:{whose} {harmless(text)}")

    def table(self, title: str, columns: Mapping[str, Column], rows: Iterable[Any]) -> None:
        """Prints one line for each row, with the columns' headings above.

        Args:
            columns: what each column shows of a row, by its heading. None, and a key that the row hasn't got, are
                shown as "-".
        """
        cells = [[_cell(row, column) for column in columns.values()] for row in rows]
        self.say(f"\n{title}\n{plain_table(list(columns), cells)}")

    @contextmanager
    def progress(self, what: str, total: int, ticks_each: int = 1) -> Iterator[Advance]:
        """Yields a function that counts one of `total` parts as done, with a note: each prints one line on stderr,
        where a terminal also has a bar. A byte appended to its `ticks` moves the bar by 1 / ticks_each of a part."""
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True, soft_wrap=True, quiet=self.json or not self.speaks)
        if console.quiet or not console.is_terminal:
            yield Advance(what, total, (lambda _: None) if console.quiet else _complain)  # rich exits at a closed pipe
            return
        advance = Advance(what, total, partial(console.out, highlight=False))

        class Bar(Progress):
            def get_renderables(self) -> Iterable[Any]:  # asked for some times a second
                for task in self.tasks:
                    self.update(task.id, completed=advance.done(ticks_each))
                return super().get_renderables()

        with Scratch("progress") as folder, Bar(console=console, transient=True) as bar:
            advance.ticks = folder / "ticks"
            advance.ticks.touch()
            bar.add_task(what, total=total)
            yield advance


class Advance:
    """Counts parts of a command's work as done: `advance(note)`.

    Attributes:
        total: how many parts there are.
        ticks: a file to which anybody may append a byte for a fraction of a part; None where nobody looks.
    """

    def __init__(self, what: str, total: int, say: Callable[[str], None]) -> None:
        self.total = total
        self.ticks: Path | None = None
        self._what, self._say = what, say
        self._done = self._seen = 0

    def __call__(self, note: str) -> None:
        self._done += 1
        self._seen = self._size()
        self._say(f"{self._what} {self._done}/{self.total}: {harmless(note)}")

    def done(self, ticks_each: int) -> float:
        """Returns the parts that are done, with the fraction of the present one."""
        return min(self._done + max(0, self._size() - self._seen) / ticks_each, self.total)

    def _size(self) -> int:
        return 0 if self.ticks is None else self.ticks.stat().st_size


def _cell(row: Any, column: Column) -> str:
    if not isinstance(column, str):
        values, spec = [column(row)], ""
    else:
        keys, _, spec = column.partition(":")
        values = [row.get(key) if isinstance(row, dict) else attrgetter(key)(row) for key in keys.split("/")]
    return "-" if any(value is None for value in values) else "/".join(format(value, spec) for value in values)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the lines of a table; columns of numbers are right-aligned."""
    columns: list[list[str]] = []
    for name, *cells in zip(header, *rows, strict=True):
        numbers = bool(cells) and all(re.match(r"-?[\d,]*\.?\d|-?$", cell) for cell in cells)
        width = max(map(len, (name, *cells))) if numbers else 0
        columns.append([cell.rjust(width) for cell in (name, *cells)])
    return aligned(list(zip(*columns, strict=True)))


@contextmanager
def stdout_of_our_own() -> Iterator[None]:
    """Keeps standard output for Python's `sys.stdout`: what libraries print from C++ (gloo in torch 2.10, when ranks
    connect) goes to standard error, so that a result stays one JSON object. Does nothing where stdout was replaced."""
    if sys.stdout is not sys.__stdout__:
        yield
        return
    replaced, kept = sys.stdout, os.dup(1)
    replaced.flush()
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", encoding=replaced.encoding, errors=replaced.errors, closefd=False)
    try:
        yield
    finally:
        ours, sys.stdout = sys.stdout, replaced
        try:
            ours.flush()
        except OSError as error:
            lost(ours, error)
        os.dup2(kept, 1)
        os.close(kept)


def counted(number: int, what: str) -> str:
    """Returns "1 rank", "2 ranks"."""
    return f"{number} {what}{'s' * (number != 1)}"


def configure_logging() -> None:
    """Gives the logger `eprt` a handler, at the level of EPRT_LOG (default WARNING). Leaves the root logger alone.

    Raises ConfigError for a level that doesn't exist.
    """
    name = (os.environ.get("EPRT_LOG") or "WARNING").upper()
    if not isinstance(logging.getLevelName(name), int):  # of a name it knows, its number
        raise ConfigError(f"EPRT_LOG={name!r} is not a logging level: use DEBUG, INFO, WARNING or ERROR")
    logger = logging.getLogger("eprt")
    size = os.environ.get("WORLD_SIZE", "1")
    prefix = f"[rank {os.environ.get('RANK', '0')}/{size}] " if size != "1" else ""
    if not logger.handlers:
        handler, form = logging.StreamHandler(), logging.Formatter(f"{prefix}%(levelname)s %(name)s: %(message)s")
        handler.format = lambda record: harmless(form.format(record))  # words may come from a file or a peer
        logger.addHandler(handler)
    logger.setLevel(name)

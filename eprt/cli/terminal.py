"""What a command says: tables for people, one JSON object for programs, errors as one block. Imports no torch."""

from __future__ import annotations

import json as json_format
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from eprt.errors import ConfigError


class Terminal:
    """Standard output of the rank that speaks.

    Args:
        json: say nothing on stdout but the one `result` object; progress and errors go to stderr anyway.
        speaks: False silences everything (ranks other than 0 under torchrun).
    """

    def __init__(self, json: bool = False, speaks: bool | None = None) -> None:
        self.json = json
        self.speaks = os.environ.get("RANK", "0") == "0" if speaks is None else speaks
        self._tty = sys.stdout.isatty() and not json

    def say(self, text: str = "") -> None:
        """A line or block for people."""
        if self.speaks and not self.json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line for people on stderr, for a command whose stdout is data."""
        if self.speaks:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def lines(self, values: Iterable[dict[str, Any]]) -> None:
        """JSON objects, one a line, on stdout."""
        if self.speaks:
            sys.stdout.write("".join(json_format.dumps(_as_json(value), allow_nan=False) + "\n" for value in values))
            sys.stdout.flush()

    def result(self, value: dict[str, Any]) -> None:
        """The JSON object, if it was asked for."""
        if self.speaks and self.json:
            sys.stdout.write(json_format.dumps(_as_json(value), allow_nan=False) + "\n")
            sys.stdout.flush()

    def error(self, text: str, shared: bool = True) -> None:
        """One block on stderr; from every rank, with its number, if not all ranks say the same."""
        if self.speaks or not shared:
            whose = "" if self.speaks else f" rank {os.environ.get('RANK')}:"
            sys.stderr.write(f"eprt:{whose} {text}\n")
            sys.stderr.flush()

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Rows of cells; numbers are right-aligned. rich on a terminal, plain text otherwise."""
        if not self.speaks or self.json:
            return
        cells = [[str(cell) for cell in row] for row in rows]
        if self._tty:
            self._rich_table(title, header, cells)
        else:
            self.say(f"\n{title}\n{plain_table(header, cells)}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[_Progress]:
        """Progress of `total` parts: a bar on a terminal, else a line for each part; on stderr."""
        if self.speaks and not self.json and sys.stderr.isatty():
            with _bar(what, total) as bar:
                yield bar
        else:
            yield _Lines(what, total, self.speaks and not self.json)

    def _rich_table(self, title: str, header: Sequence[str], cells: list[list[str]]) -> None:
        """Only where it fits: folded cells of numbers can't be read."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
        for column, name in enumerate(header):
            numeric = all(_is_number(row[column]) for row in cells)
            table.add_column(escape(name), justify="right" if numeric else "left", no_wrap=True)
        for row in cells:
            table.add_row(*map(escape, row))
        if console.measure(table).minimum > console.width:
            self.say(f"\n{title}\n{plain_table(header, cells)}")
        else:
            console.print(f"\n[bold]{escape(title)}[/bold]", table)


def _as_json(value: Any) -> Any:
    """Numbers that JSON hasn't got (NaN, infinity) as null."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Progress(Protocol):
    def advance(self, note: str) -> None:
        """One more part is done."""


class _Lines(_Progress):
    def __init__(self, what: str, total: int, speaks: bool) -> None:
        self._what, self._total, self._speaks, self._done = what, total, speaks, 0

    def advance(self, note: str) -> None:
        self._done += 1
        if self._speaks:
            sys.stderr.write(f"{self._what} {self._done}/{self._total}: {note}\n")
            sys.stderr.flush()


@contextmanager
def _bar(what: str, total: int) -> Iterator[_Progress]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        class Bar(_Progress):
            def advance(self, note: str) -> None:
                progress.update(task, advance=1, description=f"{what}: {note}")

        yield Bar()


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded with spaces; those of numbers are right-aligned."""
    lines: list[list[str]] = [list(header), *map(list, rows)]
    columns = range(len(header))
    widths = [max(len(line[c]) for line in lines) for c in columns]
    right = [bool(rows) and all(_is_number(row[c]) for row in rows) for c in columns]
    return "\n".join(
        "  ".join(line[c].rjust(widths[c]) if right[c] else line[c].ljust(widths[c]) for c in columns).rstrip()
        for line in lines
    )


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.replace(",", "").replace(".", "", 1).lstrip("-")[:1].isdigit()


@contextmanager
def stdout_of_our_own() -> Iterator[None]:
    """Only Python's `sys.stdout` reaches standard output; what libraries print from C++ (gloo in torch 2.10, when ranks
    meet) goes to standard error, so that a result stays one JSON object. Does nothing where stdout was replaced."""
    if sys.stdout is not sys.__stdout__:
        yield
        return
    replaced, kept = sys.stdout, os.dup(1)
    replaced.flush()
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", encoding=replaced.encoding, closefd=False)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = replaced
        os.dup2(kept, 1)
        os.close(kept)


def configure_logging() -> None:
    """A handler on the logger `eprt`, at the level of EPRT_LOG (default WARNING). Leaves the root logger alone.

    Raises ConfigError for a level that doesn't exist.
    """
    name = os.environ.get("EPRT_LOG", "WARNING").upper()
    if not isinstance(logging.getLevelName(name), int):  # of a name it knows, its number
        raise ConfigError(f"EPRT_LOG={name!r} is not a logging level: use DEBUG, INFO, WARNING or ERROR")
    logger = logging.getLogger("eprt")
    size = os.environ.get("WORLD_SIZE", "1")
    prefix = f"[rank {os.environ.get('RANK', '0')}/{size}] " if size != "1" else ""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(name)

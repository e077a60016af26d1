"""Runs the `eprt` command. Parsing imports no torch; a command's own module is imported when it runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from eprt.cli.terminal import (
    NO_OUTPUT,
    OutputLost,
    Terminal,
    configure_logging,
    lost,
    show_everything,
    stdout_of_our_own,
)
from eprt.errors import ConfigError, EprtError

INTERRUPTED = 130  # an exit code, beside those of `EprtError.exit_code`
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/1", "/dev/fd/2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses and runs one command; returns its exit code."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller
        if sys.stderr is not None:
            sys.stderr.write("eprt: standard output is closed: there is nowhere to write the result\n")
        return NO_OUTPUT
    show_everything()
    try:
        from eprt.cli.arguments import Ranked  # takes half a second, in which there may be a Ctrl-C, too
        from eprt.cli.parsing import RUNS

        command = _parsed(arguments)
        joins = isinstance(command, Ranked) or getattr(command, "run", False)
        terminal = Terminal(json=getattr(command, "json", False), speaks=None if joins else True)
        with stdout_of_our_own(), _ended_by_signals():
            return _run(RUNS[type(command)], command, terminal)
    except OutputLost as error:
        return error.code
    except (KeyboardInterrupt, _Ended) as ended:
        why, code = (
            ("interrupted", INTERRUPTED) if isinstance(ended, KeyboardInterrupt) else (str(ended), ended.exit_code)
        )
        with suppress(OSError):  # after SIGHUP there may be no terminal
            Terminal().error(f"{why}; all ranks that this command started have been ended")
        return code


class _Ended(BaseException):
    """Raised by a signal that ends the process; says which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def _parsed(arguments: Sequence[str] | None) -> Any:
    from eprt.cli.parsing import parse

    try:
        try:
            return parse(arguments)
        finally:
            sys.stdout.flush()  # help and version end the process
    except OSError as error:
        raise lost(sys.stdout, error) from error


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind, as Ctrl-C does: ranks end and temporary folders go. torchrun's ranks just
    end."""
    if "RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise _Ended(number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _require_files(command: Any) -> None:
    """Refuses files that couldn't be written at the end of a command, minutes later. Raises OSError, ConfigError."""
    from eprt.cli.arguments import Generate
    from eprt.files import drawn, new_figure, require_writable

    for name in ("output", "out", "plot"):
        if (path := getattr(command, name, None)) is None:
            continue
        if str(path) in _STREAMS:
            raise ConfigError(f"--{name} {path}: what the command says goes there; name a file")
        if not isinstance(command, Generate):  # whose journal has rules of its own
            require_writable(path)
    if (path := getattr(command, "plot", None)) is not None:
        drawn(new_figure(1, 1), path, "--plot ")


def _run(where: str, command: Any, terminal: Terminal) -> int:
    module, _, name = where.partition(":")
    try:
        configure_logging()
        if plugins := getattr(command, "plugin", ()):
            from eprt.ranks.process import load_plugins

            if os.getcwd() not in sys.path:  # the console script leaves the current folder out
                sys.path.append(os.getcwd())
            load_plugins(plugins)
        if terminal.speaks:
            _require_files(command)
        function: Callable[[Any, Terminal], int] = getattr(importlib.import_module(module), name)
        return function(command, terminal)
    except OutputLost:
        raise
    except OSError as error:  # of the system: a full disk, a folder that can't be written
        terminal.error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", shared=False)
        if os.environ.get("EPRT_LOG", "").upper() == "DEBUG":
            raise
        return NO_OUTPUT
    except EprtError as error:  # one block that names what to do; anything else is a bug and keeps its traceback
        terminal.error(f"{type(error).__name__}: {error}", error.shared)
        return error.exit_code

"""The `eprt` command. Parsing its arguments imports no torch; a command's own module is imported when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from eprt.cli.terminal import Terminal, configure_logging, stdout_of_our_own
from eprt.errors import EprtError

# Exit codes, beside those of `EprtError.exit_code`.
OK, FAILED, INTERRUPTED = 0, 1, 130

_COMMANDS = {
    "Run": "eprt.cli.run:run",
    "Explain": "eprt.cli.explain:explain",
    "Doctor": "eprt.cli.doctor:doctor",
    "BenchLayer": "eprt.cli.bench:bench_layer",
    "BenchDispatch": "eprt.cli.bench:bench_dispatch",
    "BenchExperts": "eprt.cli.bench:bench_experts",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run one command; the exit code."""
    from eprt.cli.arguments import STDOUT, parse

    command = parse(arguments)
    terminal = Terminal(json=command.json in (True, STDOUT))
    with stdout_of_our_own():
        return _run(command, terminal)


def _run(command: Any, terminal: Terminal) -> int:
    module, _, name = _COMMANDS[type(command).__name__].partition(":")
    try:
        configure_logging()
        function: Callable[[Any, Terminal], int] = getattr(importlib.import_module(module), name)
        return function(command, terminal)
    except KeyboardInterrupt:
        terminal.error("interrupted; all ranks that this command started have been ended")
        return INTERRUPTED
    except EprtError as error:  # one block that names what to do; anything else is a bug and keeps its traceback
        terminal.error(f"{type(error).__name__}: {error}")
        return error.exit_code

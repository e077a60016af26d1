"""Parses a command line into one of the dataclasses of `eprt.cli.arguments`. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, make_dataclass, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

import eprt.cli.arguments as commands
from eprt import __version__

# A command's arguments, and the function that runs it, by the words of the command line.
COMMANDS: dict[str, tuple[type[Any], str]] = {
    "run": (commands.Run, "eprt.cli.run:run"),
    "generate": (commands.Generate, "eprt.cli.generate:generate"),
    "explain": (commands.Explain, "eprt.cli.explain:explain"),
    "tune": (commands.Tune, "eprt.cli.tune:tune"),
    "warm": (commands.Warm, "eprt.cli.warm:warm"),
    "plan-experts": (commands.PlanExperts, "eprt.cli.plan_experts:plan_experts"),
    "doctor": (commands.Doctor, "eprt.cli.doctor:doctor"),
    "bench layer": (commands.BenchLayer, "eprt.cli.bench_layer:bench_layer"),
    "bench dispatch": (commands.BenchDispatch, "eprt.cli.bench_dispatch:bench_dispatch"),
    "bench experts": (commands.BenchExperts, "eprt.cli.bench:bench_experts"),
    "bench router": (commands.BenchRouter, "eprt.cli.bench:bench_router"),
    "bench exchange": (commands.BenchExchange, "eprt.cli.bench:bench_exchange"),
    "bench step": (commands.BenchStep, "eprt.cli.bench:bench_step"),
}
NARROWEST = 40  # columns: tyro takes minutes to lay its help out in five
RUNS: dict[type[Any], str] = dict(COMMANDS.values())
_ABOUT = (
    "Expert-parallel runtime for Mixture-of-Experts inference on torch.distributed. `eprt --version` prints the "
    "version, `eprt COMMAND --help` a command's flags."
)
_BENCH = "Measure a layer, the transports, the executors, the router, the ranks' agreement or a whole step."


def parse(words: Sequence[str] | None = None) -> Any:
    """Returns the arguments of the command that `words` (default: the process's own) ask for: an instance of one of the
    classes in `COMMANDS`. Prints help, version or an error and exits."""
    if (width := shutil.get_terminal_size().columns) < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
        try:
            return parse(words)
        finally:
            os.environ["COLUMNS"] = str(width)
    words = list(sys.argv[1:] if words is None else words)
    if words == ["--version"]:
        sys.stdout.write(f"eprt {__version__}\n")
        raise SystemExit(0)
    # A command that is named is parsed by itself, so that an unknown flag is answered with that command's own.
    for count in (1, 2):
        if (name := " ".join(words[:count])) in COMMANDS:
            return _parse(COMMANDS[name][0], f"eprt {name}", words[count:])
    # What is left is help, or an error.
    kinds = {name: kind for name, (kind, _) in COMMANDS.items()}
    benches = {name.removeprefix("bench "): kinds.pop(name) for name in COMMANDS if name.startswith("bench ")}
    if words[:1] == ["bench"]:
        return _parse(_any_of(benches), "eprt bench", _without_flags(words[1:]), _BENCH)
    bench = make_dataclass("Bench", [])
    bench.__doc__ = _BENCH
    return _parse(_any_of({**kinds, "bench": bench}), "eprt", _without_flags(words), _ABOUT)


def changed(arguments: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns those of a command's options that aren't at their defaults: values by flag."""
    values = {name: getattr(arguments, name) for name in names}
    kind = type(arguments)
    return {f"--{name.replace('_', '-')}": value for name, value in values.items() if value != getattr(kind, name)}


def _without_flags(words: list[str]) -> list[str]:
    """Returns the first word alone if it is no flag: a command that doesn't exist has no help, either."""
    return words if not words or words[0].startswith("-") else words[:1]


def _any_of(kinds: dict[str, type[Any]]) -> Any:
    return reduce(or_, (Annotated[kind, subcommand(name)] for name, kind in kinds.items()))


def _parse(kind: Any, prog: str, words: list[str], about: str | None = None) -> Any:
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
    return _without_doubles(tyro.cli(kind, prog=prog, description=about, args=words, config=config))


def _without_doubles(value: Any) -> Any:
    """Returns arguments whose lists have each value once: what is named twice isn't measured twice."""
    if isinstance(value, tuple):
        return tuple(dict.fromkeys(value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _without_doubles(getattr(value, field.name)) for field in fields(value)})

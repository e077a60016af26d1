"""From words on the command line to the arguments of one command. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from eprt.cli.arguments import (
    BenchDispatch,
    BenchExchange,
    BenchExperts,
    BenchLayer,
    BenchRouter,
    BenchStep,
    Doctor,
    Explain,
    Generate,
    PlanExperts,
    Run,
    Tune,
)


@dataclass(frozen=True)
class Bench:
    """Measure a layer, the transports, the executors, the router, the ranks' agreement or a whole step."""

    what: (
        Annotated[BenchLayer, subcommand("layer")]
        | Annotated[BenchDispatch, subcommand("dispatch")]
        | Annotated[BenchExperts, subcommand("experts")]
        | Annotated[BenchRouter, subcommand("router")]
        | Annotated[BenchExchange, subcommand("exchange")]
        | Annotated[BenchStep, subcommand("step")]
    )


AnyBench = BenchLayer | BenchDispatch | BenchExperts | BenchRouter | BenchExchange | BenchStep
Command = Run | Generate | Explain | Tune | PlanExperts | Doctor | AnyBench
_COMMANDS: dict[str, type[Any]] = {
    "run": Run,
    "generate": Generate,
    "explain": Explain,
    "tune": Tune,
    "plan-experts": PlanExperts,
    "doctor": Doctor,
}
_BENCHES: dict[str, type[Any]] = {
    "layer": BenchLayer,
    "dispatch": BenchDispatch,
    "experts": BenchExperts,
    "router": BenchRouter,
    "exchange": BenchExchange,
    "step": BenchStep,
}
_All = (
    Annotated[Run, subcommand("run")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Explain, subcommand("explain")]
    | Annotated[Tune, subcommand("tune")]
    | Annotated[PlanExperts, subcommand("plan-experts")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Bench, subcommand("bench")]
)


def parse(arguments: Sequence[str] | None = None) -> Command:
    """The command that `arguments` (default: the process's own) ask for. Prints help, version or an error and exits."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        from eprt import __version__

        sys.stdout.write(f"eprt {__version__}\n")
        raise SystemExit(0)
    # A command that is named is parsed by itself, so that an unknown flag is answered with that command's own.
    match words:
        case [name, *rest] if name in _COMMANDS:
            return _parse(_COMMANDS[name], f"eprt {name}", rest)
        case ["bench", name, *rest] if name in _BENCHES:
            return _parse(_BENCHES[name], f"eprt bench {name}", rest)
        case _:
            parsed: Run | Generate | Explain | Tune | PlanExperts | Doctor | Bench = _parse(_All, "eprt", words)
            return parsed.what if isinstance(parsed, Bench) else parsed


def _parse(kind: Any, prog: str, words: list[str]) -> Any:
    about = "Expert-parallel runtime for Mixture-of-Experts inference on torch.distributed."
    return tyro.cli(
        kind,
        prog=prog,
        description=about if prog == "eprt" else None,
        args=words,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
    )

"""`eprt doctor --faults`: the fault matrix on this machine, as a table and as JSON."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from eprt.bench.report import Report
from eprt.cli.arguments import Doctor
from eprt.cli.terminal import Terminal
from eprt.conformance import faults
from eprt.errors import ConfigError

DEFAULT_TRIALS = 20  # on CPUs
COLUMNS = (
    "fault",
    "moment",
    "dispatcher",
    "then",
    "trials",
    "median s",
    "most s",
    "limit s",
    "went on s",
    "culprit",
    "late",
    "wrong",
    "left",
)


def break_ranks(arguments: Doctor, terminal: Terminal) -> list[dict[str, Any]]:
    """Run the trials; one row each, and first one for each dispatcher in which nothing breaks.

    Raises:
        ConfigError: fewer than two ranks, or numbers below one.
    """
    device = arguments.device
    world = torch.cuda.device_count() if device == "cuda" else arguments.world
    count = DEFAULT_TRIALS if arguments.trials is None and device == "cpu" else arguments.trials
    if min(arguments.jobs, 1 if count is None else count) < 1 or world < 2:
        raise ConfigError(
            f"--trials {count}, --jobs {arguments.jobs}, {world} {device} ranks: expected at least 1, 1 and 2"
        )
    calm = faults.controls(world, device)
    cells = faults.trials(world, device, count)
    results: list[faults.Result] = []
    facts = {"timeout_s": cells[0].timeout_s, "slack_s": faults.SLACK_S, "jobs": arguments.jobs}
    with terminal.progress("fault", len(calm) + len(cells)) as progress:
        for result in _run(calm, cells, arguments.jobs):
            results.append(result)
            if arguments.output is not None and terminal.speaks:
                _write(results, facts, arguments.output)
            trial = result.trial
            progress.advance(f"{trial.fault} of rank {trial.rank}, {trial.moment}, {trial.dispatcher}")
    _say(results, world, device, terminal)
    return [result.as_row() for result in results]


def _run(calm: list[faults.Trial], cells: list[faults.Trial], jobs: int) -> Iterable[faults.Result]:
    """Those in which nothing breaks come first: a dispatcher that can't run here fails once, not in every trial."""
    unable: set[str] = set()
    for result in faults.run_trials(calm, jobs):
        if not result.ok:
            unable.add(result.trial.dispatcher)
        yield result
    yield from faults.run_trials([cell for cell in cells if cell.dispatcher not in unable], jobs)


def _write(results: list[faults.Result], facts: dict[str, Any], path: Path) -> None:
    Report("faults", [result.as_row() for result in results], facts).write(path)


def _say(results: list[faults.Result], world: int, device: str, terminal: Terminal) -> None:
    groups: dict[tuple[str, ...], list[faults.Result]] = defaultdict(list)
    for result in results:
        trial = result.trial
        early = trial.moment in faults.START_UP
        where = ("start-up", "-") if early else (trial.moment, trial.dispatcher)
        groups[(trial.fault, *where, trial.then)].append(result)
    ranks = f"{world} {'gloo ranks' if device == 'cpu' else 'GPUs'}"
    terminal.table(
        f"Faults: {ranks}, one broken in each trial; seconds until the last of the others knew, and had gone on",
        [*COLUMNS],
        [[*key, *_line(groups[key])] for key in sorted(groups)],
    )
    for reason in sorted({result.trial.unknowable for result in results} - {""}):
        terminal.say(f"culprit -: {reason}")
    for result in itertools.islice((r for r in results if not r.ok), 10):
        terminal.say(f"FAIL {result.trial}: {result.as_row()}")
    good = sum(result.ok for result in results)
    terminal.say(f"\n{'PASS' if good == len(results) else 'FAIL'}: {good} of {len(results)} trials as promised")


def _line(results: list[faults.Result]) -> list[object]:
    known = [result.culprit for result in results if result.culprit is not None]
    return [
        len(results),
        *_middle_and_most([result.seconds for result in results]),
        f"{max(result.trial.limit_s for result in results):.1f}",
        _middle_and_most([result.resumed for result in results])[1],
        f"{sum(known)}/{len(known)}" if known else "-",
        sum(result.late for result in results),
        sum(result.wrong for result in results),
        sum(len(result.leftovers) for result in results),
    ]


def _middle_and_most(seconds: list[float | None]) -> tuple[str, str]:
    times = sorted(each for each in seconds if each is not None)
    return (f"{times[len(times) // 2]:.2f}", f"{times[-1]:.2f}") if times else ("-", "-")

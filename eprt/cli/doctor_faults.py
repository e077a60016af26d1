"""`eprt doctor --faults`: the fault matrix on this machine, as a table and as JSON."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import closing
from typing import Any

import torch

from eprt.cli.arguments import Doctor
from eprt.cli.fault_report import FaultReport
from eprt.cli.terminal import Terminal
from eprt.conformance import faults
from eprt.errors import ConfigError
from eprt.ranks.launcher import preload

DEFAULT_TRIALS = 20  # on CPUs
PRELOADED = ("eprt.conformance.faults", "triton", "torch.distributed._symmetric_memory")
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
    "nan",
    "left",
)


def break_ranks(arguments: Doctor, terminal: Terminal) -> list[dict[str, Any]]:
    """Run the trials; one row each, and first one for each dispatcher in which nothing breaks. Cut short by a signal it
    says what it found before it ends.

    Raises:
        ConfigError: fewer than two ranks, numbers below one, or an --output that --resume can't go on with.
    """
    device = arguments.device
    world = torch.cuda.device_count() if device == "cuda" else arguments.world
    count = DEFAULT_TRIALS if arguments.trials is None and device == "cpu" else arguments.trials
    if min(arguments.jobs, 1 if count is None else count) < 1 or world < 2:
        raise ConfigError(
            f"--trials {count}, --jobs {arguments.jobs}, {world} {device} ranks: expected at least 1, 1 and 2"
        )
    if arguments.resume and arguments.output is None:
        raise ConfigError("--resume leaves out trials that a file has: say which by --output")
    cells = faults.trials(world, device, count)
    found = FaultReport(cells, arguments.jobs, arguments.output if terminal.speaks else None)
    if arguments.resume:
        found.resume()
    left = found.left()
    names = {cell.dispatcher for cell in left}
    calm = [control for control in faults.controls(world, device) if control.dispatcher in names]
    found.forget(calm)
    if device == "cpu":  # on GPUs every trial ended by SIGSEGV with these there; whether by them isn't known
        preload(*PRELOADED)
    try:
        with (
            terminal.progress("fault", len(calm) + len(left)) as progress,
            closing(faults.run_trials([*calm, *left], arguments.jobs)) as results,
        ):
            for result in results:
                found.add(result)
                progress.advance(_in_words(result))
    except (KeyboardInterrupt, SystemExit):
        found.write()
        _say(found, world, device, terminal)
        raise
    _say(found, world, device, terminal)
    return found.rows()


def _in_words(result: faults.Result) -> str:
    trial = result.trial
    outcome = "as promised" if result.ok else "FAIL"
    seconds = "" if result.seconds is None else f", {result.seconds:.1f} s"
    return f"{trial.fault} of rank {trial.rank}, {trial.moment}, {trial.dispatcher}, {trial.then}: {outcome}{seconds}"


def _say(found: FaultReport, world: int, device: str, terminal: Terminal) -> None:
    results = found.results
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
    for note in found.notes():
        terminal.say(note)
    terminal.say(f"\n{'PASS' if 0 < good == len(results) else 'FAIL'}: {good} of {len(results)} trials as promised")


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
        sum(result.nan for result in results),
        sum(len(result.leftovers) for result in results),
    ]


def _middle_and_most(seconds: list[float | None]) -> tuple[str, str]:
    times = sorted(each for each in seconds if each is not None)
    return (f"{times[len(times) // 2]:.2f}", f"{times[-1]:.2f}") if times else ("-", "-")

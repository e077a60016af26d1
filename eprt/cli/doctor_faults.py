"""Runs `eprt doctor --faults`: the fault matrix on this machine, as a table and as a file that several runs fill."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from eprt.bench.report import Report, provenance, this_command
from eprt.cli.arguments import Doctor
from eprt.cli.terminal import Column, Terminal
from eprt.conformance import faults
from eprt.conformance.faults import Result, Trial
from eprt.errors import ConfigError
from eprt.ranks.launcher import preload

DEFAULT_TRIALS = 20  # on CPUs
PRELOADED = ("eprt.conformance.faults", "triton", "torch.distributed._symmetric_memory")
_OF_A_RUN = ("time", "machine", "versions", "commit", "command")


class FaultReport:
    """The trials that this run and the runs it resumes have found.

    Args:
        asked: cells of the matrix, all runs together.
        output: the file, written after each trial; None: nothing is written.

    Attributes:
        results: in the order in which they came.
    """

    def __init__(self, asked: Sequence[Trial], jobs: int, output: Path | None) -> None:
        self._asked, self._output = asked, output
        self._facts = {"timeout_s": asked[0].timeout_s, "slack_s": faults.SLACK_S, "jobs": jobs, "cells": len(asked)}
        self._earlier: list[dict[str, Any]] = []
        self._run_of: list[int] = []
        self.results: list[Result] = []

    def resume(self) -> None:
        """Takes over what the file has. Trials that didn't take place are to be run again.

        Raises:
            ConfigError: it isn't such a file, or of other devices or another number of ranks.
        """
        path = self._output
        if path is None or not path.exists():
            return
        try:
            earlier = json.loads(path.read_text())
            runs = earlier.get("runs") or [{name: earlier[name] for name in _OF_A_RUN}]
            found = [(row.get("run", 0), Result.of_row(row)) for row in earlier["rows"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--resume: {path} is no result of `eprt doctor --faults` ({error})") from error
        here = _where(self._asked[0], provenance()["machine"])
        for there in {_where(result.trial, runs[run]["machine"]) for run, result in found}:
            if there != here:
                raise ConfigError(f"--resume: {path} is of {there}, these are {here}: give another --output")
        self._earlier = runs
        self._keep((run, result) for run, result in found if not result.failed or result.leftovers)

    def left(self) -> list[Trial]:
        """Returns the cells that no run has done yet."""
        done, left = Counter(result.trial for result in self.results), list[Trial]()
        for cell in self._asked:
            if done[cell] > 0:
                done[cell] -= 1
            else:
                left.append(cell)
        return left

    def forget(self, again: Sequence[Trial]) -> None:
        """Leaves out what earlier runs found in these trials, which are run again."""
        self._keep([pair for pair in zip(self._run_of, self.results, strict=True) if pair[1].trial not in again])

    def add(self, result: Result) -> None:
        """Adds a result of this run, and writes the file."""
        self._run_of.append(len(self._earlier))
        self.results.append(result)
        self.write()

    def notes(self) -> list[str]:
        """Says that the report is partial, if it is."""
        left = len(self.left())
        ran = len(self._asked) - left
        return [f"partial: {ran} of {len(self._asked)} cells ran; --resume runs the others"] if left else []

    def rows(self) -> list[dict[str, Any]]:
        return [{**result.as_row(), "run": run} for run, result in zip(self._run_of, self.results, strict=True)]

    def write(self) -> None:
        """Writes the file, unless there is no result yet: an earlier file stays."""
        if self._output is None or not self.results:
            return
        runs = self._earlier
        if len(runs) in self._run_of:
            runs = [*runs, {**provenance(), "command": this_command(), "jobs": self._facts["jobs"]}]
        facts = {**self._facts, "ran": len(self._asked) - len(self.left())}
        Report("faults", self.rows(), facts, self.notes(), runs=runs).write(self._output)

    def _keep(self, pairs: Iterable[tuple[int, Result]]) -> None:
        kept = list(pairs)
        self._run_of, self.results = [run for run, _ in kept], [result for _, result in kept]


def _where(trial: Trial, machine: list[str]) -> str:
    """Names the ranks and, on GPUs, their kind ("cuda:0: NVIDIA H200, sm90, ...")."""
    names = sorted({line.partition(": ")[2].partition(",")[0] for line in machine if line.startswith("cuda")})
    return f"{trial.world} ranks on {', '.join(names) if trial.device == 'cuda' else 'the CPU'}"


def break_ranks(arguments: Doctor, terminal: Terminal) -> list[dict[str, Any]]:
    """Runs the trials, and first one for each dispatcher in which nothing breaks; returns one row for each. Cut short
    by a signal it prints what it found before it ends.

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
    found = FaultReport(
        faults.trials(world, device, count), arguments.jobs, arguments.output if terminal.speaks else None
    )
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


def _in_words(result: Result) -> str:
    trial = result.trial
    outcome = "as promised" if result.ok else "FAIL"
    seconds = "" if result.seconds is None else f", {result.seconds:.1f} s"
    return f"{trial.fault} of rank {trial.rank}, {trial.moment}, {trial.dispatcher}, {trial.then}: {outcome}{seconds}"


def _seconds(results: list[Result], name: str) -> list[float]:
    return sorted(time for result in results if (time := getattr(result, name)) is not None)


def _most(results: list[Result], name: str) -> str | None:
    return f"{times[-1]:.2f}" if (times := _seconds(results, name)) else None


def _median(results: list[Result]) -> str | None:
    return f"{times[len(times) // 2]:.2f}" if (times := _seconds(results, "seconds")) else None


def _named(results: list[Result]) -> str | None:
    known = [result.named for result in results if result.named is not None]
    return f"{sum(known)}/{len(known)}" if known else None


LINES: dict[str, Column] = {
    "fault": lambda line: line[0][0],
    "moment": lambda line: line[0][1],
    "dispatcher": lambda line: line[0][2],
    "then": lambda line: line[0][3],
    "trials": lambda line: len(line[1]),
    "median s": lambda line: _median(line[1]),
    "most s": lambda line: _most(line[1], "seconds"),
    "limit s": lambda line: f"{max(result.trial.limit_s for result in line[1]):.1f}",
    "went on s": lambda line: _most(line[1], "resumed"),
    "named": lambda line: _named(line[1]),
    "late": lambda line: sum(result.late for result in line[1]),
    "wrong": lambda line: sum(result.wrong for result in line[1]),
    "nan": lambda line: sum(result.nan for result in line[1]),
    "left": lambda line: sum(len(result.leftovers) for result in line[1]),
}


def _say(found: FaultReport, world: int, device: str, terminal: Terminal) -> None:
    results, groups = found.results, dict[tuple[str, ...], list[Result]]()
    for result in results:
        trial = result.trial
        where = ("start-up", "-") if trial.moment in faults.START_UP else (trial.moment, trial.dispatcher)
        groups.setdefault((trial.fault, *where, trial.then), []).append(result)
    ranks = f"{world} {'gloo ranks' if device == 'cpu' else 'GPUs'}"
    terminal.table(
        f"Faults: {ranks}, one broken in each trial; seconds until the last of the others knew, and had gone on",
        LINES,
        sorted(groups.items(), key=lambda line: line[0]),
    )
    for reason in sorted({result.trial.unknowable for result in results} - {""}):
        terminal.say(f"named -: {reason}")
    for result in itertools.islice((r for r in results if not r.ok), 10):
        terminal.say(f"FAIL {result.trial}: {result.as_row()}")
    good = sum(result.ok for result in results)
    for note in found.notes():
        terminal.say(note)
    terminal.say(f"\n{'PASS' if 0 < good == len(results) else 'FAIL'}: {good} of {len(results)} trials as promised")

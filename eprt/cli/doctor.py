"""Runs `eprt doctor`: reports what this machine is, what works on it, what doesn't and why; --run proves it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from eprt import diagnosis
from eprt.bench.report import Report, provenance, this_command
from eprt.cli.arguments import Doctor
from eprt.cli.parsing import changed
from eprt.cli.ranks import ranks, world_size
from eprt.cli.terminal import Column, Terminal, columns, counted
from eprt.conformance.checks import Check, CheckRow, run_checks, standard_checks, summarize
from eprt.conformance.faults.matrix import SLACK_S, START_UP, Trial, controls, trials
from eprt.conformance.faults.trial import Result, run_trials
from eprt.errors import ConfigError
from eprt.ranks.servers import preload
from eprt.support import Device

DEFAULT_TRIALS = 20  # on CPUs
PRELOADED = ("eprt.conformance.faults.trial", "triton", "torch.distributed._symmetric_memory")
FACTS: dict[str, Column] = {"": lambda fact: fact[0], " ": lambda fact: fact[1]}
BACKENDS: dict[str, Column] = {
    "": lambda row: "ok" if row["ok"] else "no",
    " ": "kind",
    **columns("name | what it is, or what is missing = reason"),
}
FIRST_USE = columns(
    "kernels | needed by = needed_by | takes | found here = cached", cached=lambda row: "yes" if row["cached"] else "no"
)
KEYS = ("check", "dispatcher", "tokens", "executor", "layer", "attention-TP x MoE-TP")
PROOF: dict[str, Column] = {name: name for name in ("", *KEYS, "passed", "worst error")}


def doctor(arguments: Doctor, terminal: Terminal) -> int:
    """Prints the report. Returns 1 if a conformance check of --run or a trial of --faults failed, else 0. Raises
    ConfigError for options of --run and --faults without them, which would do nothing."""
    _require_use(arguments)
    found = fault_report(arguments, terminal) if arguments.faults else None
    report: dict[str, Any] = {
        "versions": diagnosis.versions(),
        "devices": diagnosis.devices(),
        "host": diagnosis.host(),
        "links": diagnosis.links(),
        "backends": diagnosis.backends(),
        "first_use": diagnosis.first_use(),
        "problems": [asdict(problem) for problem in diagnosis.problems()],
    }
    _say(report, terminal)
    if arguments.run:
        worlds = [("cpu", arguments.world)]
        worlds += [("cuda", torch.cuda.device_count())] if torch.cuda.is_available() else []
        report["conformance"] = [_prove(device, size, terminal) for device, size in worlds]
    if found is not None:
        report["faults"] = break_ranks(found, arguments, terminal)
    terminal.result(report)
    failed = any(world["failures"] for world in report.get("conformance", ()))
    return int(failed or not all(row["ok"] for row in report.get("faults", ())))


def _require_use(arguments: Doctor) -> None:
    """Raises ConfigError for options that would do nothing, and for no rank."""
    given = changed(arguments, ("device", "trials", "seeds", "jobs", "output", "resume"))
    if given and not arguments.faults:
        raise ConfigError(f"{', '.join(given)}: of the trials of --faults: add it; --json prints the whole report")
    cpu = arguments.run or (arguments.faults and arguments.device == "cpu")
    if changed(arguments, ("world",)) and not cpu:
        raise ConfigError(
            f"--world {arguments.world}: CPU ranks of --run, and of --faults with --device cpu: add one of them, or "
            "leave it out; on GPUs there is a rank for each"
        )
    if arguments.run:
        world_size(arguments.world, "cpu")


def _say(report: dict[str, Any], terminal: Terminal) -> None:
    terminal.table("Versions (- is not installed)", FACTS, report["versions"].items())
    machine = [*(("device", line) for line in report["devices"]), *report["host"].items()]
    terminal.table("Machine", FACTS, machine)
    if report["links"]:
        terminal.say(f"\nLinks between GPUs\n{report['links']}")
    terminal.table("Usable here", BACKENDS, report["backends"])
    title = "Compiled on first use (World.warmup does it on all ranks at once)"
    terminal.table(title, FIRST_USE, report["first_use"])
    if report["problems"]:
        terminal.table("Problems", {"found": "what", "remedy": "remedy"}, report["problems"])
    else:
        terminal.say("\nNo problems found.")


def _prove(device: str, size: int, terminal: Terminal) -> dict[str, Any]:
    """Runs every conformance case on every pair that can run here, in one world."""
    groups: dict[tuple[str, ...], list[Check]] = defaultdict(list)
    size = world_size(size, device)
    for check in standard_checks(size, Device.here(device)):
        groups[_group(check)].append(check)
    started, rows, failures = time.monotonic(), list[dict[str, Any]](), list[CheckRow]()
    with ranks(size, device) as workers, terminal.progress(f"{device} x {size}", len(groups)) as advance:
        for key, checks in groups.items():
            results = summarize(workers.run(run_checks, checks=checks))
            bad = [row for row in results if not row.ok]
            failures += bad
            found = {"": "FAIL" if bad else "ok", "passed": f"{len(results) - len(bad)}/{len(results)}"}
            worst = {"worst error": f"{max(r.error for r in results):.1e}"}
            rows.append({**dict(zip(KEYS, key, strict=True)), **found, **worst})
            advance(" ".join(part for part in key if part))
    kind = f"{counted(size, 'gloo rank')} on the CPU" if device == "cpu" else counted(size, "GPU")
    terminal.table(f"Conformance: {kind}, every case of counts x routing", PROOF, rows)
    terminal.say(*(f"FAIL {r.check.name}: rank {r.rank}, error {r.error:.1e} {r.detail}" for r in failures[:10]))
    total = sum(map(len, groups.values()))
    verdict, seconds = "FAIL" if failures else "PASS", time.monotonic() - started
    where = counted(size, f"{device} rank")
    terminal.say(f"\n{verdict}: {total - len(failures)} of {total} checks on {where} in {seconds:.0f} s")
    failed = [{"check": r.check.name, "rank": r.rank, "error": r.error, "detail": r.detail} for r in failures]
    return {"device": device, "size": size, "checks": total, "failures": failed}


def _group(check: Check) -> tuple[str, ...]:
    """Returns the line of the table that a check belongs to: its values of `KEYS`."""
    layer = check.config if isinstance(check.config, str) else check.name.removesuffix(f"-{check.case.name}")
    sizes = f"{check.attention_tp_size} x {check.moe_tp_size}"
    return check.kind, check.dispatcher, check.token_format, check.executor, layer, sizes


# ---- --faults: the fault matrix on this machine, as a table and as a file that several runs fill -----------------


class FaultReport:
    """The trials that this run and the runs it resumes have found.

    Args:
        asked: cells of the matrix, all runs together.
        output: the file, written after each trial; None: nothing is written.

    Attributes:
        device, world: of the trials' ranks.
        results: of all trials so far.
    """

    def __init__(self, asked: Sequence[Trial], jobs: int, output: Path | None) -> None:
        self._asked, self._output = asked, output
        self.device, self.world = asked[0].device, asked[0].world
        self._facts = {"timeout_s": asked[0].timeout_s, "slack_s": SLACK_S, "jobs": jobs, "cells": len(asked)}
        self._earlier: list[dict[str, Any]] = []
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
            runs, found = earlier["runs"], [Result.of_row(row) for row in earlier["rows"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--resume: {path} is no result of `eprt doctor --faults` ({error})") from error
        here = _where(self._asked[0], provenance()["machine"])
        for there in {_where(result.trial, runs[result.run]["machine"]) for result in found}:
            if there != here:
                raise ConfigError(f"--resume: {path} is of {there}, these are {here}: give another --output")
        self._earlier = runs
        self.results = [result for result in found if not result.failed or result.leftovers]

    def left(self) -> list[Trial]:
        """Returns the cells that no run has done yet."""
        left = list(self._asked)
        for result in self.results:
            if result.trial in left:  # or it is a control
                left.remove(result.trial)
        return left

    def forget(self, again: Sequence[Trial]) -> None:
        """Leaves out what earlier runs found in these trials, which are run again."""
        self.results = [result for result in self.results if result.trial not in again]

    def add(self, result: Result) -> None:
        self.results.append(replace(result, run=len(self._earlier)))
        self.write()

    def notes(self) -> list[str]:
        """Says that the report is partial, if it is."""
        left = len(self.left())
        ran = len(self._asked) - left
        return [f"partial: {ran} of {len(self._asked)} cells ran; --resume runs the others"] if left else []

    def rows(self) -> list[dict[str, Any]]:
        return [result.as_row() for result in self.results]

    def write(self) -> None:
        """Writes the file, unless there is no result yet: an earlier file stays."""
        if self._output is None or not self.results:
            return
        runs = self._earlier
        if any(result.run == len(runs) for result in self.results):
            runs = [*runs, {**provenance(), "command": this_command(), "jobs": self._facts["jobs"]}]
        facts = {**self._facts, "ran": len(self._asked) - len(self.left())}
        Report("faults", self.rows(), facts, self.notes(), runs=runs).write(self._output)


def _where(trial: Trial, machine: list[str]) -> str:
    """Names the ranks and, on GPUs, their kind ("cuda:0: NVIDIA H200, sm90, ...")."""
    names = sorted({line.partition(": ")[2].partition(",")[0] for line in machine if line.startswith("cuda")})
    return f"{trial.world} ranks on {', '.join(names) if trial.device == 'cuda' else 'the CPU'}"


def fault_report(arguments: Doctor, terminal: Terminal) -> FaultReport:
    """Returns the report of the trials that are asked for, with what the file has of them under --resume.

    Raises ConfigError for fewer than two ranks, numbers below one, or an --output that --resume can't go on with.
    """
    device = arguments.device
    world = torch.cuda.device_count() if device == "cuda" else arguments.world
    count = DEFAULT_TRIALS if arguments.trials is None and device == "cpu" else arguments.trials
    seeds = len(arguments.seeds)
    if min(arguments.jobs, seeds, 1 if count is None else count) < 1:
        raise ConfigError(f"--trials {count}, --jobs {arguments.jobs}, {seeds} --seeds: expected at least 1 of each")
    if world < 2:
        raise ConfigError(f"--faults on {world} {device} ranks: it takes at least 2; use --device cpu --world 2")
    if arguments.resume and arguments.output is None:
        raise ConfigError("--resume leaves out trials that a file has: say which by --output")
    output = arguments.output if terminal.speaks else None
    asked = [cell for seed in arguments.seeds for cell in trials(world, device, count, seed)]
    found = FaultReport(asked, arguments.jobs, output)
    if arguments.resume:
        found.resume()
    return found


def break_ranks(found: FaultReport, arguments: Doctor, terminal: Terminal) -> list[dict[str, Any]]:
    """Runs the trials that aren't in `found` yet, and first one for each dispatcher in which nothing breaks; returns
    one row for each. Cut short by a signal it prints what it found before it ends."""
    left, device, world = found.left(), found.device, found.world
    calm = [one for one in controls(world, device) if any(one.dispatcher == cell.dispatcher for cell in left)]
    found.forget(calm)
    if device == "cpu":  # on GPUs every trial ended by SIGSEGV with these there; whether by them isn't known
        preload(*PRELOADED)
    todo = [*calm, *left]
    results = run_trials(todo, arguments.jobs)
    try:
        with terminal.progress("fault", len(todo)) as advance, closing(results):
            for result in results:
                found.add(result)
                advance(_in_words(result))
    finally:
        found.write()
        _say_faults(found, world, device, terminal)
    return found.rows()


def _in_words(result: Result) -> str:
    trial = result.trial
    outcome = "as promised" if result.ok else "FAIL"
    seconds = "" if result.seconds is None else f", {result.seconds:.1f} s"
    return f"{trial.fault} of rank {trial.rank}, {trial.moment}, {trial.dispatcher}, {trial.then}: {outcome}{seconds}"


LINES = columns(
    "fault | moment | dispatcher | then | trials | median s = median:.2f | most s = most:.2f | limit s = limit:.1f | "
    "went on s = went_on:.2f | named | late | wrong | nan | left"
)


def _line(key: tuple[str, ...], results: list[Result]) -> dict[str, Any]:
    times = sorted(result.seconds for result in results if result.seconds is not None)
    known = [result.named for result in results if result.named is not None]
    return {
        **dict(zip(("fault", "moment", "dispatcher", "then"), key, strict=True)),
        "trials": len(results),
        "median": times[len(times) // 2] if times else None,
        "most": times[-1] if times else None,
        "limit": max(result.trial.limit_s for result in results),
        "went_on": max((result.resumed for result in results if result.resumed is not None), default=None),
        "named": f"{sum(known)}/{len(known)}" if known else None,
        **{name: sum(getattr(result, name) for result in results) for name in ("late", "wrong", "nan")},
        "left": sum(len(result.leftovers) for result in results),
    }


def _say_faults(found: FaultReport, world: int, device: str, terminal: Terminal) -> None:
    results, groups = found.results, defaultdict[tuple[str, ...], list[Result]](list)
    for result in results:
        trial = result.trial
        where = ("start-up", "-") if trial.moment in START_UP else (trial.moment, trial.dispatcher)
        groups[(trial.fault, *where, trial.then)].append(result)
    ranks = f"{world} {'gloo ranks' if device == 'cpu' else 'GPUs'}"
    terminal.table(
        f"Faults: {ranks}, one broken in each trial; seconds until the last of the others knew, and had gone on",
        LINES,
        [_line(key, groups[key]) for key in sorted(groups)],
    )
    good = sum(result.ok for result in results)
    terminal.say(
        *(f"named -: {reason}" for reason in sorted({result.trial.unknowable for result in results} - {""})),
        *[f"FAIL {result.trial}: {result.as_row()}" for result in results if not result.ok][:10],
        *found.notes(),
        f"\n{'PASS' if 0 < good == len(results) else 'FAIL'}: {good} of {len(results)} trials as promised",
    )

"""The file of `eprt doctor --faults`: written after each trial, and filled by several runs with --resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eprt.bench.report import Report, provenance, this_command
from eprt.conformance import faults
from eprt.conformance.faults import Result, Trial
from eprt.errors import ConfigError

_OF_A_RUN = ("time", "machine", "versions", "commit", "command")


class FaultReport:
    """What this run found, and those that it resumes.

    Args:
        asked: cells of the matrix, all runs together.
        output: the file; None: nothing is written.

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
        """Take over what the file has. Trials that didn't take place are to be run again.

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
        """The cells that nobody has run yet."""
        done, left = Counter(result.trial for result in self.results), list[Trial]()
        for cell in self._asked:
            if done[cell] > 0:
                done[cell] -= 1
            else:
                left.append(cell)
        return left

    def forget(self, again: Iterable[Trial]) -> None:
        """Leave out what earlier runs found in these, which are run again."""
        trials = set(again)
        self._keep([pair for pair in zip(self._run_of, self.results, strict=True) if pair[1].trial not in trials])

    def add(self, result: Result) -> None:
        """One more of this run; the file has it, too, then."""
        self._run_of.append(len(self._earlier))
        self.results.append(result)
        self.write()

    def notes(self) -> list[str]:
        """That it is partial, if it is."""
        left = len(self.left())
        ran = len(self._asked) - left
        return [f"partial: {ran} of {len(self._asked)} cells ran; --resume runs the others"] if left else []

    def rows(self) -> list[dict[str, Any]]:
        return [{**result.as_row(), "run": run} for run, result in zip(self._run_of, self.results, strict=True)]

    def write(self) -> None:
        """Nothing where there is nothing to say: an earlier file stays."""
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
    """Ranks and, on GPUs, what they are ("cuda:0: NVIDIA H200, sm90, ...")."""
    names = sorted({line.partition(": ")[2].partition(",")[0] for line in machine if line.startswith("cuda")})
    return f"{trial.world} ranks on {', '.join(names) if trial.device == 'cuda' else 'the CPU'}"

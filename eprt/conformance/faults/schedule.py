"""Runs many trials, several at a time. A dispatcher's trials begin once its control trial has passed; when the run is
cut short, the ranks of all trials in progress are killed."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from eprt.conformance.faults.matrix import Trial
from eprt.conformance.faults.trial import Result, footprint, outlived, run_trial
from eprt.ranks.launcher import WorldPool

_KILL_AGAIN_S = 0.1


def run_trials(trials: Sequence[Trial], jobs: int = 1) -> Generator[Result]:
    """Yields results as they come. Trials that are cut short (the iterator is closed, or a signal raises here) yield
    none, and their ranks are killed.

    Trials are begun in their order. Those of a dispatcher wait for its trial in which nothing breaks, if there is one
    among them: it compiles what they need. If that fails they are left out: a dispatcher that can't run here fails
    once.

    Args:
        jobs: trials at a time. Worlds that start while another's ranks wait out a limit cost no time of their own; all
            share the GPUs. Shared memory that outlives trials is looked for behind the last one then.
    """
    before = footprint()
    with ThreadPoolExecutor(jobs) as threads:
        running = _Running(threads, alone=jobs == 1)
        try:
            yield from _in_turn(list(trials), jobs, running)
        finally:
            running.end()
    if jobs > 1 and (left := outlived(before)) and trials:
        yield Result(trials[-1], failed="shared memory outlived the trials", leftovers=tuple(left))


def _in_turn(waiting: list[Trial], jobs: int, running: _Running) -> Iterator[Result]:
    unproven = {trial.dispatcher for trial in waiting if trial.fault == "none"}
    while waiting or running.futures:
        free = [trial for trial in waiting if trial.fault == "none" or trial.dispatcher not in unproven]
        for trial in free[: jobs - len(running.futures)]:
            waiting.remove(trial)
            running.start(trial)
        for future in wait(running.futures, return_when=FIRST_COMPLETED).done:
            running.futures.remove(future)
            result = future.result()
            if result.trial.fault == "none" and result.ok:
                unproven.discard(result.trial.dispatcher)
            elif result.trial.fault == "none":
                waiting[:] = [trial for trial in waiting if trial.dispatcher != result.trial.dispatcher]
            yield result


class _Running:
    """The trials in progress and their worlds."""

    def __init__(self, threads: ThreadPoolExecutor, alone: bool) -> None:
        self.futures: set[Future[Result]] = set()
        self._threads, self._alone = threads, alone
        self._pools: list[WorldPool] = []
        self._over = False

    def start(self, trial: Trial) -> None:
        self.futures.add(self._threads.submit(run_trial, trial, alone=self._alone, holding=self._holding))

    def end(self) -> None:
        """Kills all ranks, those that are only starting, too, until no trial runs."""
        self._over = True
        while wait(self.futures, _KILL_AGAIN_S if self._pools else 0.01).not_done:
            for pool in list(self._pools):
                pool.kill()

    @contextmanager
    def _holding(self, pool: WorldPool) -> Iterator[None]:
        if self._over:
            raise TrialsEnded
        self._pools.append(pool)
        try:
            yield
        finally:
            self._pools.remove(pool)


class TrialsEnded(Exception):
    """Ends a trial that would begin now."""

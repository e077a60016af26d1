"""Many trials, several at a time: each dispatcher's once it was seen to work; cut short, their ranks are killed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

from eprt.conformance.faults.matrix import Trial
from eprt.conformance.faults.trial import Result, footprint, outlived, run_trial
from eprt.ranks.launcher import WorldPool

_KILL_AGAIN_S = 0.1


def run_trials(trials: Sequence[Trial], jobs: int = 1) -> Generator[Result]:
    """Results as they come; of trials that are cut short (the iterator is closed, or a signal raises here) none, and
    their ranks are killed.

    Trials are begun in their order. Those of a dispatcher wait for its trial in which nothing breaks, if there is one
    among them: it compiles what they need. If that fails they are left out: a dispatcher that can't run here fails
    once.

    Args:
        jobs: trials at a time. Worlds that start while another's ranks wait out a limit cost no time of their own; all
            share the GPUs. Shared memory that outlives trials is looked for behind the last one then.
    """
    before, worlds = footprint(), _Worlds()
    with ThreadPoolExecutor(jobs) as threads:
        running: dict[Future[Result], Trial] = {}
        try:
            run = partial(run_trial, alone=jobs == 1, holding=worlds.holding)
            yield from _in_turn(list(trials), jobs, partial(threads.submit, run), running)
        finally:
            worlds.end(running)
    if jobs > 1 and (left := outlived(before)) and trials:
        yield Result(trials[-1], failed="shared memory outlived the trials", leftovers=tuple(left))


def _in_turn(
    waiting: list[Trial], jobs: int, start: Callable[[Trial], Future[Result]], running: dict[Future[Result], Trial]
) -> Iterator[Result]:
    unproven = {trial.dispatcher for trial in waiting if trial.fault == "none"}
    while waiting or running:
        free = [trial for trial in waiting if trial.fault == "none" or trial.dispatcher not in unproven]
        for trial in free[: jobs - len(running)]:
            waiting.remove(trial)
            running[start(trial)] = trial
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            del running[future]
            result = future.result()
            if result.trial.fault == "none" and result.ok:
                unproven.discard(result.trial.dispatcher)
            elif result.trial.fault == "none":
                waiting[:] = [trial for trial in waiting if trial.dispatcher != result.trial.dispatcher]
            yield result


class _Worlds:
    """The worlds of the trials in progress."""

    def __init__(self) -> None:
        self._pools: list[WorldPool] = []
        self._over = False

    @contextmanager
    def holding(self, pool: WorldPool) -> Iterator[None]:
        if self._over:
            raise TrialsEnded
        self._pools.append(pool)
        try:
            yield
        finally:
            self._pools.remove(pool)

    def end(self, running: dict[Future[Result], Trial]) -> None:
        """Kill all ranks, those that are only starting, too, until no trial runs."""
        self._over = True
        while wait(running, _KILL_AGAIN_S if self._pools else 0.01).not_done:
            for pool in list(self._pools):
                pool.kill()


class TrialsEnded(Exception):
    """Ends a trial that would begin now."""

"""Runs trials of the fault matrix, each in a world of its own and several at a time, and judges them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from eprt.conformance.faults.job import NoNumbers, WrongOutput, ready, run
from eprt.conformance.faults.matrix import CUT, Trial
from eprt.errors import RankLost
from eprt.ranks.launcher import RankReport, WorldFailed, WorldPool
from eprt.ranks.process import Raised
from eprt.ranks.scratch import Scratch
from eprt.world.guard import LAST_WORDS

# To make processes, Worlds and layers, which isn't what is timed; and where kernels are compiled, too.
START_S = {"cpu": 60.0, "cuda": 90.0}
PATIENT_START_S = {"cpu": 60.0, "cuda": 300.0}
WRONG = (WrongOutput.__name__, NoNumbers.__name__)
_LOOK_S = 0.05
_KILL_AGAIN_S = 0.1
_MOMENT_S = 3.0
Holding = Callable[[WorldPool], AbstractContextManager[object]]


@dataclass(frozen=True)
class Result:
    """The outcome of a trial.

    Attributes:
        seconds: from the fault to the last survivor's error; None if one had none when the trial's limit ended.
        resumed: from the fault to the last survivor's first output without the victim, where they went on.
        verdicts: the survivors' errors, each wording once.
        named: whether all named the victim (or, for a mismatch, all saw the same table); None where nobody can know.
        wrong: number of outputs that weren't the oracle's.
        nan: number of outputs that were NaN in the step of the fault; a rank that got one must still raise an error.
        leftovers: processes, folders and shared memory that outlived the trial.
        failed: why the trial didn't take place, or how ranks ended where nothing was to break; "" if all was well.
        again: why it didn't take place at first, if it was started twice.
        run: the number of the run that found it, of those that fill one report.
    """

    trial: Trial
    seconds: float | None = None
    resumed: float | None = None
    verdicts: tuple[str, ...] = ()
    named: bool | None = None
    wrong: int = 0
    nan: int = 0
    leftovers: tuple[str, ...] = ()
    failed: str = ""
    again: str = ""
    run: int = 0

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Result:
        row = {**row, **{name: tuple(row[name]) for name in ("verdicts", "leftovers")}}
        trial = Trial(**{field.name: row[field.name] for field in fields(Trial)})
        return cls(trial, **{field.name: row[field.name] for field in fields(cls)[1:]})

    @property
    def late(self) -> bool:
        if self.trial.fault == "none":
            return False
        resumes = self.trial.then != "restart"
        over = self.seconds is None or self.seconds > self.trial.limit_s
        return over or (resumes and (self.resumed is None or self.resumed > self.trial.resume_s))

    @property
    def ok(self) -> bool:
        right = self.named if not self.trial.unknowable else bool(self.verdicts)
        return bool(right) and not self.late and not self.wrong and not self.leftovers and not self.failed

    def as_row(self) -> dict[str, Any]:
        """Returns the trial's and the result's fields as JSON values, with times rounded to milliseconds."""
        found = asdict(self)
        for name in ("seconds", "resumed"):
            found[name] = None if found[name] is None else round(found[name], 3)
        found |= {name: list(found[name]) for name in ("verdicts", "leftovers")}
        trial = {**found.pop("trial"), "limit_s": self.trial.limit_s, "unknowable": self.trial.unknowable}
        return {**trial, "ok": self.ok, **found}


def run_trial(trial: Trial, alone: bool = True, holding: Holding = nullcontext) -> Result:
    """Runs one trial in a world of its own. On GPUs a trial that couldn't take place is run once more, with more time:
    compiling or loading for seconds is no fault.

    Args:
        alone: nothing else of ours runs, so that what is left in shared memory is this trial's.
        holding: around the life of its ranks.
    """
    calm = trial.fault == "none"
    found = _try(trial, alone, holding, patient=calm)
    if found.failed and trial.device == "cuda" and not (calm or found.wrong or found.leftovers):
        return replace(_try(trial, alone, holding, patient=True), again=found.failed)
    return found


def _try(trial: Trial, alone: bool, holding: Holding, patient: bool) -> Result:
    before = footprint() if alone else set[str]()
    with Scratch("faults") as folder:
        grace_s = (trial.limit_s if trial.then == "restart" else trial.resume_s + 3.0) + 2.0
        limit_s = (PATIENT_START_S if patient else START_S)[trial.device] + grace_s
        hangs = trial.rank if trial.fault in ("stop", "sleep") else None
        pids: list[int] = []
        world: Path | None = None
        reports: Sequence[RankReport] = ()
        failed = ""
        try:
            with WorldPool(trial.world, trial.device, timeout_s=limit_s, grace_s=grace_s) as pool, holding(pool):
                pool.run(ready, dispatcher=trial.dispatcher)
                pids, world = pool.pids, pool.folder
                pool.run(run, not_awaited=hangs, trial=trial, folder=str(folder), patient=patient)
        except WorldFailed as found:
            reports = found.reports
            failed = "" if pids else str(found)
        diaries = [_read(folder / f"rank{rank}") for rank in range(trial.world)]
    leftovers = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    leftovers += [str(world)] if world is not None and world.exists() else []
    leftovers += outlived(before) if alone else []
    return judge(trial, reports, diaries, diaries[trial.rank].get("fault_at"), leftovers, failed)


def judge(
    trial: Trial,
    reports: Sequence[RankReport],
    diaries: Sequence[dict[str, Any]],
    at: float | None,
    leftovers: Sequence[str] = (),
    failed: str = "",
) -> Result:
    """Judges a trial by the ranks' reports (none if all finished) and diaries. `at`: time of the fault."""
    wrong = sum(report.raised is not None and report.raised.error in WRONG for report in reports)
    result = Result(trial, wrong=wrong, leftovers=tuple(leftovers), failed=failed)
    said = tuple(sorted({report.describe() for report in reports}))
    if trial.fault == "none":
        ends = "\n".join(f"rank {r.rank} {r.describe()}\n{r.stack}\n{r.log_tail}" for r in reports if r.outcome != "ok")
        return replace(result, verdicts=said, named=not reports, failed=failed or ends)
    if at is None:
        return replace(result, failed=failed or f"the victim never came to its fault: {'; '.join(said)}")
    return replace(result, **_heard(trial, reports, diaries, at))


def _heard(trial: Trial, reports: Sequence[RankReport], diaries: Sequence[dict[str, Any]], at: float) -> dict[str, Any]:
    """Returns what the survivors' errors and notes say: the times, the words, and whether they name the victim."""
    everybody = trial.why == "mismatch" or trial.unknowable or trial.fault == CUT  # who is cut off has to know it
    pairs = zip(reports, diaries, strict=False)
    said = {report.rank: _verdict_of(report, diary) for report, diary in pairs}
    heard = [verdict for rank, verdict in said.items() if everybody or rank not in trial.victims]
    found = [verdict for verdict in heard if verdict is not None]
    if trial.fault == CUT and trial.then == "restart":
        found = [_of_who_ended_first(trial, verdict, said) for verdict in found]
    whole = len(found) == len(heard) > 0
    words = tuple(sorted({verdict.message for verdict in found}))
    sides = 2 if trial.fault == CUT else 1
    resumed = [d["resumed_at"] for rank, d in enumerate(diaries) if rank != trial.rank and "resumed_at" in d]
    same = whole and len(words) <= sides and all(_names_victim(trial, verdict) for verdict in found)
    return {
        "seconds": max(verdict.at for verdict in found) - at if whole else None,
        "resumed": max(resumed) - at if len(resumed) == len(diaries) - 1 else None,
        "verdicts": words,
        "named": None if trial.unknowable else same,
        "nan": sum("nan" in diary for diary in diaries),
    }


def _names_victim(trial: Trial, verdict: Raised) -> bool:
    if trial.why == "mismatch":
        return verdict.error == "WorldMismatch"
    if verdict.lost_rank is None:  # the guard ended the process with a line in its log
        return f"rank {trial.rank} {trial.why}" in verdict.message
    return (verdict.error, verdict.lost_rank, verdict.why) == ("RankLost", trial.victims[0], trial.why)


def _of_who_ended_first(trial: Trial, verdict: Raised, said: dict[int, Raised | None]) -> Raised:
    """Takes "exited" for "silent" where a rank that was cut off had said before that it is: it may end on that before
    the others' limit, and on one host they see its process end."""
    own = [one for rank in trial.victims if (one := said.get(rank)) is not None]
    knew = any(one.why == trial.why and one.at <= verdict.at for one in own) and verdict not in own
    return replace(verdict, why=trial.why) if knew and verdict.why == "exited" else verdict


def _verdict_of(report: RankReport, diary: dict[str, Any]) -> Raised | None:
    """Returns the error that a survivor caught, raised, or had the guard write into its log."""
    if "words" in diary:
        rank = diary["ranks"][0] if diary["ranks"] else -1
        return Raised("RankLost", diary["words"], "", diary["verdict_at"], rank, diary["why"])
    if report.raised is not None:
        return report.raised
    _, said, words = report.log_tail.partition(LAST_WORDS)
    if report.exit_code == RankLost.exit_code and said and report.ended_at is not None:
        return Raised("RankLost", words.strip(), "", report.ended_at)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def outlived(before: set[str]) -> list[str]:
    """Returns the shared memory that is new since `before` and stays. Other programs' Worlds on this machine have a
    file for a moment, until all their ranks have mapped it."""
    left, deadline = footprint() - before, time.monotonic() + _MOMENT_S
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left &= footprint()
    return sorted(left)


def footprint() -> set[str]:
    """Returns the files of shared memory whose names our libraries give."""
    patterns = ("eprt*", "torch_*", "nccl*", "nvshmem*")
    return {str(path) for pattern in patterns for path in Path("/dev/shm").glob(pattern)}


# ---- many trials -------------------------------------------------------------------------------------------------


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
    before, running = footprint(), _Running(jobs)
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
            if result.trial.fault == "none":
                unproven.discard(result.trial.dispatcher)
                if not result.ok:
                    waiting[:] = [trial for trial in waiting if trial.dispatcher != result.trial.dispatcher]
            yield result


class _Running:
    """Holds the trials in progress and their worlds."""

    def __init__(self, jobs: int) -> None:
        self.futures: set[Future[Result]] = set()
        self._threads, self._alone = ThreadPoolExecutor(jobs), jobs == 1
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
        self._threads.shutdown()

    @contextmanager
    def _holding(self, pool: WorldPool) -> Iterator[None]:
        if self._over:
            raise CancelledError
        self._pools.append(pool)
        try:
            yield
        finally:
            self._pools.remove(pool)

"""One trial of the fault matrix in a world of its own, and what is judged of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from eprt.conformance.faults.job import NoNumbers, WrongOutput, ready, run
from eprt.conformance.faults.matrix import Trial
from eprt.ranks.launcher import RankReport, WorldFailed, WorldPool
from eprt.ranks.scratch import Scratch
from eprt.ranks.stacks import state_of
from eprt.world.guard import EXIT_CODE, LAST_WORDS

# To make processes, Worlds and layers, which isn't what is timed; and where kernels are compiled, too.
START_S = {"cpu": 60.0, "cuda": 90.0}
PATIENT_START_S = {"cpu": 60.0, "cuda": 300.0}
WRONG = (WrongOutput.__name__, NoNumbers.__name__)
_GONE = ("gone", "Z", "X")
_LOOK_S = 0.05
_MOMENT_S = 3.0
Holding = Callable[[WorldPool], AbstractContextManager[object]]


@dataclass(frozen=True)
class Result:
    """What a trial found.

    Attributes:
        seconds: from the fault to the last survivor's verdict; None if one had none when the trial's limit ended.
        resumed: from the fault to the last survivor's first output without the victim, where they went on.
        verdicts: what the survivors said, each wording once.
        culprit: whether all named the victim (or, for a mismatch, all saw the same table); None where nobody can know.
        wrong: outputs that weren't what the formula gives.
        nan: outputs that were NaN in the step of the fault; whoever got one still needs a verdict.
        leftovers: processes, folders and shared memory that outlived the trial.
        failed: what kept the trial from taking place, or how ranks ended where nothing was to break; "" if nothing did.
        again: what kept it from that at first, if it was started twice.
    """

    trial: Trial
    seconds: float | None = None
    resumed: float | None = None
    verdicts: tuple[str, ...] = ()
    culprit: bool | None = None
    wrong: int = 0
    nan: int = 0
    leftovers: tuple[str, ...] = ()
    failed: str = ""
    again: str = ""

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Result:
        """What `as_row` made a row of."""
        trial = Trial(**{field.name: row[field.name] for field in fields(Trial)})
        names = ("seconds", "resumed", "culprit", "wrong", "failed")
        found: dict[str, Any] = {name: row[name] for name in names}
        found |= {"again": row.get("again", ""), "nan": row.get("nan", 0)}
        found |= {name: tuple(row[name]) for name in ("verdicts", "leftovers")}
        return cls(trial, **found)

    @property
    def late(self) -> bool:
        if self.trial.fault == "none":
            return False
        resumes = self.trial.then != "restart"
        over = self.seconds is None or self.seconds > self.trial.limit_s
        return over or (resumes and (self.resumed is None or self.resumed > self.trial.resume_s))

    @property
    def ok(self) -> bool:
        right = self.culprit if not self.trial.unknowable else bool(self.verdicts)
        return bool(right) and not self.late and not self.wrong and not self.leftovers and not self.failed

    def as_row(self) -> dict[str, Any]:
        found = {"seconds": _rounded(self.seconds), "limit_s": self.trial.limit_s, "resumed": _rounded(self.resumed)}
        found |= {"culprit": self.culprit, "unknowable": self.trial.unknowable, "wrong": self.wrong, "nan": self.nan}
        found |= {"leftovers": list(self.leftovers), "ok": self.ok, "failed": self.failed, "again": self.again}
        return {**asdict(self.trial), **found, "verdicts": list(self.verdicts)}


def run_trial(trial: Trial, alone: bool = True, holding: Holding = nullcontext) -> Result:
    """One trial in a world of its own; a second time, with patience, if it couldn't take place on GPUs: what compiles
    or loads for seconds there is no fault.

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
        pids: list[int] = []
        folder_of_pool: Path | None = None
        reports: Sequence[RankReport] = ()
        failed = ""
        try:
            with WorldPool(trial.world, trial.device, timeout_s=limit_s, grace_s=grace_s) as pool, holding(pool):
                pool.run(ready, dispatcher=trial.dispatcher)
                pids, folder_of_pool = pool.pids, pool.folder
                with _ending_the_victim(trial, folder, pids):
                    pool.run(run, trial=trial, folder=str(folder), patient=patient)
        except WorldFailed as found:
            reports = found.reports
            failed = "" if pids else str(found)
        at = float((folder / "fault").read_text()) if (folder / "fault").exists() else None
        diaries = [_read(folder / f"rank{rank}") for rank in range(trial.world)]
    leftovers = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    leftovers += [str(folder_of_pool)] if folder_of_pool is not None and folder_of_pool.exists() else []
    leftovers += outlived(before) if alone else []
    return judge(trial, reports, diaries, at, leftovers, failed)


def judge(
    trial: Trial,
    reports: Sequence[RankReport],
    diaries: Sequence[dict[str, Any]],
    at: float | None,
    leftovers: Sequence[str] = (),
    failed: str = "",
) -> Result:
    """What the ranks' reports (none if all finished) and diaries amount to."""
    wrong = sum(report.raised is not None and report.raised.error in WRONG for report in reports)
    left = tuple(leftovers)
    if trial.fault == "none":
        said = tuple(sorted({report.describe() for report in reports}))
        ends = "\n".join(f"rank {r.rank} {r.describe()}\n{r.stack}\n{r.log_tail}" for r in reports if r.outcome != "ok")
        return Result(trial, verdicts=said, culprit=not reports, wrong=wrong, leftovers=left, failed=failed or ends)
    if at is None and not failed:
        failed = "the victim never came to its fault: " + "; ".join(sorted({r.describe() for r in reports}))
    everybody = trial.why == "mismatch" or bool(trial.unknowable)
    heard = [
        verdict
        for report, diary in zip(reports, diaries, strict=False)
        if everybody or report.rank != trial.rank
        for verdict in [_verdict_of(report, diary)]
    ]
    found = [verdict for verdict in heard if verdict is not None]
    whole = at is not None and len(found) == len(heard) > 0
    words = tuple(sorted({verdict.words for verdict in found}))
    resumed = [d["resumed_at"] for rank, d in enumerate(diaries) if rank != trial.rank and "resumed_at" in d]
    went_on = len(resumed) == len(diaries) - 1
    return Result(
        trial,
        seconds=max(verdict.at for verdict in found) - at if whole and at is not None else None,
        resumed=max(resumed) - at if at is not None and went_on else None,
        verdicts=words,
        culprit=None if trial.unknowable else whole and len(words) == 1 and all(v.names(trial) for v in found),
        wrong=wrong,
        nan=sum("nan" in diary for diary in diaries),
        leftovers=left,
        failed=failed,
    )


@dataclass(frozen=True)
class _Verdict:
    """How a rank said it. `rank` None: by a report of its guard before it ended the process."""

    error: str
    words: str
    at: float
    rank: int | None
    why: str

    def names(self, trial: Trial) -> bool:
        if trial.why == "mismatch":
            return self.error == "WorldMismatch"
        if self.rank is None:
            return f"rank {trial.rank} {trial.why}" in self.words
        return (self.error, self.rank, self.why) == ("RankLost", trial.rank, trial.why)


def _verdict_of(report: RankReport, diary: dict[str, Any]) -> _Verdict | None:
    if "words" in diary:
        rank = diary["ranks"][0] if diary["ranks"] else -1
        return _Verdict("RankLost", diary["words"], diary["verdict_at"], rank, diary["why"])
    raised = report.raised
    if raised is not None:
        return _Verdict(raised.error, raised.message, raised.at, raised.lost_rank, raised.why)
    _, said, words = report.log_tail.partition(LAST_WORDS)
    if report.exit_code == EXIT_CODE and said and report.ended_at is not None:
        return _Verdict("RankLost", words.strip(), report.ended_at, None, "")
    return None


@contextmanager
def _ending_the_victim(trial: Trial, folder: Path, pids: list[int]) -> Iterator[None]:
    """A stopped or sleeping victim is killed once all others have said what they saw, or ended: nobody waits for it
    then."""
    over = threading.Event()

    def watch() -> None:
        others = [rank for rank in range(trial.world) if rank != trial.rank]

        def ended(rank: int) -> bool:
            return "end" in _read(folder / f"rank{rank}") or state_of(pids[rank]) in _GONE

        while not over.wait(_LOOK_S):
            if (folder / "fault").exists() and all(map(ended, others)):
                with suppress(ProcessLookupError):
                    os.kill(pids[trial.rank], signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    if trial.fault in ("stop", "sleep"):
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if watcher.is_alive():
            watcher.join()


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def outlived(before: set[str]) -> list[str]:
    """Shared memory that is there to stay. Other programs' Worlds on this machine have a file for a moment, until all
    their ranks have mapped it."""
    left, deadline = footprint() - before, time.monotonic() + _MOMENT_S
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left &= footprint()
    return sorted(left)


def footprint() -> set[str]:
    """Shared memory by names that our libraries give."""
    patterns = ("eprt*", "torch_*", "nccl*", "nvshmem*")
    return {str(path) for pattern in patterns for path in Path("/dev/shm").glob(pattern)}

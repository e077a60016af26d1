"""Describes how each rank of a failed world ended, and finds the rank that broke it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar

from eprt.errors import EprtError, RankLost
from eprt.ranks.process import Raised

# Python files whose frames mean "waits for other ranks" (or for a kernel that does).
_WAITING = ("/torch/distributed/", "/eprt/world/", "/torch/cuda/")
_STATES = {"R": "running", "S": "sleeping", "D": "in an uninterruptible wait", "T": "stopped", "t": "stopped"}
_TAIL_LINES = 15
_TAIL_BYTES = 16384


@dataclass(frozen=True)
class RankReport:
    """One rank's end.

    Attributes:
        outcome: "ok" | "raised" | "died" (signal, or exit before the job's end) | "unfinished".
        state: of an unfinished rank: "running", "sleeping", "stopped", ...
        exit_code: of a rank that died: >= 0 an exit code, < 0 minus a signal number.
        raised: what it raised, if that is how it ended.
        stack: traceback of `raised`, or all threads of an unfinished rank, or what a crash left.
        waits_for_others: it is unfinished, and its main thread is inside a collective.
        log_tail: last lines of its stdout and stderr.
        ended_at: of a rank that died: when the parent knew (`time.monotonic`).
        result: what the job returned, of a rank that finished although another didn't.
    """

    rank: int
    outcome: str
    state: str = ""
    exit_code: int | None = None
    raised: Raised | None = None
    stack: str = ""
    waits_for_others: bool = False
    log_tail: str = ""
    ended_at: float | None = None
    result: Any = None

    @property
    def lost_rank(self) -> int | None:
        """The rank that this rank's RankLost names."""
        named = self.raised.lost_rank if self.raised else None
        return named if named is not None and named >= 0 else None

    @property
    def aborted(self) -> bool:
        return self.exit_code == -signal.SIGABRT

    def describe(self) -> str:
        if self.outcome == "ok":
            return "finished"
        if self.raised is not None:
            return f"raised {self.raised.error}: {self.raised.message.splitlines()[0] if self.raised.message else ''}"
        if self.outcome == "died":
            code = self.exit_code
            if code is not None and code < 0:
                return f"was killed by {signal.Signals(-code).name}"
            return f"exited with code {code} before it finished"
        where = "waits for other ranks" if self.waits_for_others else "does not wait for other ranks"
        return f"did not finish: {self.state}" + ("" if self.state == "stopped" else f", {where}")


class WorldFailed(EprtError, RuntimeError):
    """Raised when a started world broke: names the failed rank, shows every rank's stack.

    Attributes:
        failed_ranks: the ranks that broke it (all unfinished ones if nothing tells them apart).
        reports: one per rank, in rank order.
        late: whether the limit of time was over.
    """

    exit_code: ClassVar[int] = RankLost.exit_code

    def __init__(self, reports: Sequence[RankReport], seconds: float, timeout_s: float) -> None:
        self.reports = tuple(reports)
        self.failed_ranks = find_failed_ranks(reports)
        blamed = "; ".join(self._named(rank) for rank in self.failed_ranks)
        self.late = seconds >= timeout_s
        late = f" (limit {timeout_s:g} s)" if self.late else ""
        ranks = f"{len(reports)} rank{'s' * (len(reports) != 1)}"
        text = [f"a world of {ranks} failed after {seconds:.1f} s{late}: {blamed}"]
        for report in reports:
            text.append(f"--- rank {report.rank} {report.describe()}")
            text.append(indent(report.stack.strip() or "no stack: the process is gone or has finished", "    "))
            if report.log_tail and report.raised is None:  # else its end repeats the stack
                text += ["  log:", indent(report.log_tail.strip(), "    ")]
        super().__init__("\n".join(text))

    def _named(self, rank: int) -> str:
        if not 0 <= rank < len(self.reports):
            return f"rank {rank}"
        namers = [r.rank for r in self.reports if r.lost_rank == rank and r.rank != rank]
        said = f" (named by rank {', '.join(map(str, namers))})" if namers else ""
        return f"rank {rank} {self.reports[rank].describe()}{said}"


def find_failed_ranks(reports: Sequence[RankReport]) -> tuple[int, ...]:
    """Returns the ranks that broke the world: the strongest kind of evidence that exists decides.

    A rank that was killed or left early; a stopped one; one that the survivors' RankLost names; the first that
    raised; one that aborted (gloo aborts the innocent receiver of a wrong size, so this is weak); one that didn't
    finish without waiting for the others; at last all that didn't finish.
    """
    raised = [r for r in reports if r.raised is not None and r.raised.error != "RankLost"]
    first = min(raised, key=lambda r: r.raised.at if r.raised else 0.0, default=None)
    unfinished = [r for r in reports if r.outcome == "unfinished"]
    evidence: tuple[list[int], ...] = (
        [r.rank for r in reports if r.outcome == "died" and not r.aborted],
        [r.rank for r in unfinished if r.state == "stopped"],
        sorted({r.lost_rank for r in reports if r.lost_rank is not None}),
        [first.rank] if first else [],
        [r.rank for r in reports if r.aborted],
        [r.rank for r in unfinished if not r.waits_for_others],
        [r.rank for r in unfinished],
        [r.rank for r in reports if r.outcome != "ok"],
    )
    return tuple(next((ranks for ranks in evidence if ranks), []))


def state_of(pid: int) -> str:
    """Returns a process's state in words."""
    from eprt.world.process import state  # brings torch, which this module and the launcher do without

    letter = state(pid)
    return _STATES.get(letter, letter or "gone")


def read_stack(path: Path) -> tuple[str, bool]:
    """Returns faulthandler's dump, and whether the main thread was inside a collective. The file's first line is the
    main thread's id."""
    if not path.exists():
        return "", False
    main, _, dump = path.read_text(errors="replace").partition("\n")
    threads = dump.split("\n\n")
    of_main = [t for t in threads if f"0x{main}" in t.lstrip().split("\n", 1)[0]]
    return dump.strip(), any(mark in of_main[-1] for mark in _WAITING) if of_main else False


def tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])

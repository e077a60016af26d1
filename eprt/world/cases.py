"""What a rank knows of its peers, and what it holds against them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Peer:
    """What this rank last heard of another."""

    heard_at: float = field(default_factory=time.monotonic)
    ops: int = 0
    where: str = "start-up"
    ending: str = ""
    ended_at: float = 0.0
    closed: bool = False
    warned: bool = False


@dataclass(frozen=True)
class Case:
    """An accusation. `rank` -1 accuses nobody: the store is gone."""

    rank: int
    why: str
    detail: str

    def words(self) -> str:
        return f"rank {self.rank} {self.why}: {self.detail}" if self.rank >= 0 else self.detail


def sentence(cases: list[Case]) -> str:
    lost = "; ".join(case.words() for case in cases)
    return f"{lost}. The step's outputs are discarded; restart the job, or go on without it where `World.shrink` can."

"""How the end of a meeting, or of a World, stands in the store: what all that still wait read, in the same words."""

from __future__ import annotations

from dataclasses import dataclass

from eprt.errors import EprtError, RankLost, WorldMismatch, one_block
from eprt.world.members import record

OVER = "over"  # the key


@dataclass(frozen=True)
class Over:
    """Why it is over.

    Attributes:
        why: of a RankLost, or "mismatch".
        ranks: who is to blame.
    """

    why: str
    ranks: tuple[int, ...]
    message: str

    @classmethod
    def parse(cls, raw: bytes) -> Over | None:
        match record(raw):
            case {"why": str(why), "ranks": [*ranks], "message": str(message)} if all(type(r) is int for r in ranks):
                return cls(why, tuple(ranks), one_block(message))
            case _:
                return None

    @property
    def rank(self) -> int:
        return self.ranks[0] if self.ranks else -1

    @property
    def error(self) -> EprtError:
        if self.why == "mismatch":
            return WorldMismatch(self.message)
        return RankLost(self.message, self.rank, self.why, self.ranks)

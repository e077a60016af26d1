"""Tokens-per-rank geometry: one verdict for all ranks, in Python, before any launch.

T (a rank's own tokens) <= R (agreed by all ranks for this call) <= capacity (what the buffers were sized for).
The layer cuts a call of a larger R into rounds that keep this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eprt.errors import CapacityError, InputError

KNOB = "RuntimeConfig.max_tokens_per_rank"
MOST_TOKENS = (1 << 31) - 1


def require_agreed(tokens_per_rank: object) -> int:
    """A caller's R. Raises InputError unless it is an int from 1 to `MOST_TOKENS`."""
    if not isinstance(tokens_per_rank, int) or isinstance(tokens_per_rank, bool) or tokens_per_rank < 1:
        raise InputError(
            f"tokens_per_rank {tokens_per_rank!r}: expected an int of at least 1, also when every rank is idle"
        )
    if tokens_per_rank > MOST_TOKENS:
        raise InputError(f"tokens_per_rank {tokens_per_rank}: expected at most 2^31 - 1")
    return tokens_per_rank


@dataclass(frozen=True)
class Capacity:
    """What a dispatcher's buffers were sized for.

    Attributes:
        max_tokens_per_rank: the knob `RuntimeConfig.max_tokens_per_rank`.
        bytes_per_token: bytes of buffers a rank pays for each unit of the knob (0: buffers aren't kept).
    """

    max_tokens_per_rank: int
    bytes_per_token: int = 0

    def check_rows(self, tokens_per_rank: int) -> None:
        """Raises CapacityError unless R fits."""
        self._check("tokens_per_rank is", tokens_per_rank)

    def agree(self, tokens: Sequence[int], agreed: int, cut: bool = False) -> int:
        """R from every rank's T; 0 in `agreed` means "derive it". Same verdict on every rank.

        Raises CapacityError, with `cut` not for an R over the capacity. `agreed` was already found equal on all ranks
        and within `check_rows`.
        """
        largest = max(tokens)
        rows = agreed or max(largest, 1)
        if largest > rows:
            rank = tokens.index(largest)
            raise CapacityError(
                f"rank {rank} has {largest} tokens, the agreed tokens_per_rank is {rows}: "
                f"pass tokens_per_rank >= {largest} on every rank, or None to let the ranks agree"
            )
        if not agreed and not cut:
            self._check(f"rank {tokens.index(largest)} has", rows)
        return rows

    def _check(self, who: str, needed: int) -> None:
        if needed <= self.max_tokens_per_rank:
            return
        cost = f" ({needed * self.bytes_per_token:,} bytes a rank)" if self.bytes_per_token else ""
        raise CapacityError(
            f"{who} {needed} tokens, over the capacity of {self.max_tokens_per_rank}: "
            f"set {KNOB} >= {needed}{cost} or split the batch"
        )

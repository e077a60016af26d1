"""Every error a user can meet. Each names the value, the limit and the remedy, and is the same on every rank wherever
ranks compare what they do.

An error is also a `ValueError` (the input or configuration is wrong) or a `RuntimeError` (the call
came at the wrong time, or the world broke), so callers may catch either family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

LONGEST = 20_000  # characters of a message: a table of many ranks has so many


class EprtError(Exception):
    """Parent of every error that eprt raises on purpose.

    Attributes:
        exit_code: what a command that meets it ends with.
        shared: whether every rank raises the same.
    """

    exit_code: ClassVar[int] = 2
    shared: bool = False

    def __init__(self, *words: object) -> None:
        """Takes a message. Names in it may come from a file or a peer: none of them steers or floods a terminal."""
        super().__init__(*(one_block(word, LONGEST) if isinstance(word, str) else word for word in words))


class ConfigError(EprtError, ValueError):
    """A configuration, weight or placement value that can't work, whatever the input."""


class InputError(EprtError, ValueError):
    """A tensor given to one call has a wrong shape, dtype, device or value."""


class CapacityError(EprtError, ValueError):
    """More tokens than the buffers were sized for."""


class CheckpointError(EprtError, ValueError):
    """A checkpoint file or tensor that isn't what its config says. Names file and tensor."""


class UnsupportedError(EprtError, ValueError):
    """No dispatcher/executor pair can do what was asked; the message is the table of every candidate's reason."""


class UsageError(EprtError, RuntimeError):
    """A correct call at the wrong time: combine twice, use after close, lazy work after warm-up."""


class WorldMismatch(EprtError, RuntimeError):
    """The ranks disagree about the call they are making; the message is the per-rank table."""


class RankLost(EprtError, RuntimeError):
    """A peer died, went silent, raised or fell behind. Outputs of the step are discarded.

    Attributes:
        rank: the lost rank (in the World's numbering), or -1 where nobody is named: the control store itself is gone,
            the network is cut in two halves, or torch reported a failure of its own.
        why: `silent` | `exited` | `raised` | `left` | `behind` | `foreign` (two processes say they are that rank) |
            `store` | `unknown` (torch's error names nobody).
        ranks: all that were lost at the same moment, `rank` first of them.
    """

    exit_code: ClassVar[int] = 75  # EX_TEMPFAIL: the job may be started again

    def __init__(self, message: str, rank: int = -1, why: str = "silent", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.why = why
        self.ranks = ranks or ((rank,) if rank >= 0 else ())


_BY_NAME: dict[str, type[EprtError]] = {
    kind.__name__: kind
    for kind in (ConfigError, InputError, CapacityError, CheckpointError, UnsupportedError, UsageError, WorldMismatch)
}


def rebuild_error(name: str, message: str) -> EprtError:
    """The error a peer reported, as the same type here. Unknown names become `EprtError`."""
    return _BY_NAME.get(name, EprtError)(message)


def one_block(text: str, limit: int = 2000) -> str:
    """Text from elsewhere (a peer, a file) as it may be shown: no control characters but line ends, cut to `limit`."""
    clean = "".join(c if c.isprintable() or c == "\n" else "?" for c in text[: limit + 1])
    return clean if len(clean) <= limit else f"{clean[: limit - 4]} ..."


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of one line per row, for a message; the columns are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

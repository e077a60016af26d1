"""A step: one forward of the whole model on every rank, idle ranks included. What its ranks agreed on when it began."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from eprt.errors import InputError

MAX_WORDS = 8
_INT64 = 1 << 63
BROKEN_OFF = -1  # in a call log, for a layer: its last call was dispatched and never combined


@dataclass(frozen=True)
class Step:
    """What `World.step` agreed on; the same on every rank.

    Attributes:
        number: the caller's own count, or the World's.
        tokens: [W], every rank's num_tokens.
        words: [W], every rank's words.
        buckets: sizes that R is rounded up to, ascending (`Collectives.buckets`).
    """

    number: int
    tokens: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    buckets: tuple[int, ...] = ()

    @cached_property
    def tokens_per_rank(self) -> int:
        """R of every layer called inside: the largest num_tokens, at least 1, rounded up to a bucket that holds it."""
        return rounded(max(1, *self.tokens), self.buckets)


def rounded(tokens_per_rank: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds R; R itself above the largest."""
    return next((rows for rows in buckets if rows >= tokens_per_rank), tokens_per_rank)


@dataclass
class CallLog:
    """The layer calls that this rank's host made in a step: the next step compares them.

    Attributes:
        calls: (layer number, fingerprint) of each, in order.
    """

    calls: list[tuple[int, int]] = field(default_factory=list)
    failed: bool = False

    @property
    def fingerprint(self) -> int:
        """63 bits; 0 where a whole step passed without a call, as one that replays a CUDA graph does."""
        if not self.calls:
            return int(self.failed)
        raw = array("q", [fingerprint for _, fingerprint in self.calls]).tobytes()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1

    @property
    def settings(self) -> dict[str, str]:
        """What the fingerprint was made of, for the table of ranks that disagree."""
        names = " ".join(
            f"({layer} broken off)" if fingerprint == BROKEN_OFF else str(layer) for layer, fingerprint in self.calls
        )
        return {"layers of the last step": f"{names or 'none'}{', then an error' if self.failed else ''}"}


def checked_count(name: str, value: object) -> int:
    """Raises InputError unless it is an int that fits in int64 and isn't negative."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INT64:
        raise InputError(f"{name} {value!r}: expected an int from 0 to 2^63 - 1")
    return value


def checked_words(words: object) -> tuple[int, ...]:
    """Raises InputError unless they are at most `MAX_WORDS` ints that fit in int64."""
    found = tuple(words) if isinstance(words, (tuple, list)) else None
    if found is None or len(found) > MAX_WORDS:
        raise InputError(f"words {words!r}: expected a sequence of at most {MAX_WORDS} ints")
    for word in found:
        if not isinstance(word, int) or not -_INT64 <= word < _INT64:
            raise InputError(f"words {words!r}: {word!r} is no int64")
    return tuple(int(word) for word in found)

"""Memory that layers share on one rank: made once per key, counted, freed by its last user or with its owner."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class RankMemory(Protocol):
    """Memory in which kernels of several ranks work together. All of it is told when ranks are lost."""

    def release(self) -> None:
        """Lets kernels of this rank that wait for others go on, as far as the host can; what they make is garbage. Not
        collective; called again until the GPU is idle, and never again for ranks that are lost for good."""
        ...

    def resume(self, alive: tuple[bool, ...]) -> None:
        """Goes on with these ranks alone: forgets the calls in flight, and neither sends to the others nor waits for
        them. Every rank that is left does it, between two barriers, with an idle GPU.

        Raises:
            UsageError: it can't, on every rank.
        """
        ...


class SharedResources:
    """Opaque values under frozen keys; a key must name all that is baked into its value."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Any, Callable[[Any], None] | None, int]] = {}

    def acquire(self, key: Hashable, make: Callable[[], T], close: Callable[[T], None] | None) -> T:
        """Returns the value of `key`, made on first use. If `make` raises, nothing is held."""
        value, closer, users = self._held[key] if key in self._held else (make(), close, 0)
        self._held[key] = (value, closer, users + 1)
        return value

    def held(self, key: Hashable) -> Any:
        """Returns the value of `key` without counting a user; None if nobody holds it."""
        return self._held[key][0] if key in self._held else None

    def of_ranks(self) -> Iterator[RankMemory]:
        """Yields the memory that ranks share, in the order in which it was made."""
        return (value for value, _, _ in self._held.values() if isinstance(value, RankMemory))

    def release(self, key: Hashable) -> None:
        """Gives one `acquire` back; the last one frees. A key that isn't held is ignored: `close` came first."""
        if key not in self._held:
            return
        value, closer, users = self._held.pop(key)
        if users > 1:
            self._held[key] = (value, closer, users - 1)
        elif closer is not None:
            closer(value)

    def close(self) -> None:
        """Frees everything, the newest first, also when a closer raises; then raises the first such error."""
        try:
            while self._held:
                value, closer, _ = self._held.popitem()[1]
                if closer is not None:
                    closer(value)
        finally:
            if self._held:
                self.close()

"""Memory that layers share on one rank: made once per key, counted, freed by its last user or with its owner."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class SharedResources:
    """Opaque values under frozen keys; a key must name all that is baked into its value."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Any, Callable[[Any], None] | None, int]] = {}

    def acquire(self, key: Hashable, make: Callable[[], T], close: Callable[[T], None] | None) -> T:
        """The value of `key`, made on first use. If `make` raises, nothing is held."""
        value, closer, users = self._held[key] if key in self._held else (make(), close, 0)
        self._held[key] = (value, closer, users + 1)
        return value

    def held(self, key: Hashable) -> Any:
        """The value of `key` without counting a user; None if nobody holds it."""
        return self._held[key][0] if key in self._held else None

    def release(self, key: Hashable) -> None:
        """Give one `acquire` back; the last one frees. A key that isn't held is ignored: `close` came first."""
        if key not in self._held:
            return
        value, closer, users = self._held.pop(key)
        if users > 1:
            self._held[key] = (value, closer, users - 1)
        elif closer is not None:
            closer(value)

    def close(self) -> None:
        """Free everything, the newest first, also when a closer raises; then raises the first such error."""
        try:
            while self._held:
                value, closer, _ = self._held.popitem()[1]
                if closer is not None:
                    closer(value)
        finally:
            if self._held:
                self.close()

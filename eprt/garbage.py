"""Keeps Python's garbage collection out of the captures of graphs, which what is freed by chance could end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_enabled: list[bool] = []  # whether collections were, as each open block found them


@contextmanager
def without_collections() -> Iterator[None]:
    """Collects once before the block and not inside it. A block within another one doesn't collect again: beside torch
    and transformers a collection takes 0.2 s, and each layer has graphs of its own."""
    if not _enabled:
        gc.collect()
    _enabled.append(gc.isenabled())
    gc.disable()
    try:
        yield
    finally:
        enabled = _enabled.pop()
        if enabled and not _enabled:
            gc.enable()

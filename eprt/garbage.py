"""Keeps Python's garbage collection out of the captures of graphs, which what is freed by chance could end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_blocks: list[object] = []


@contextmanager
def without_collections() -> Iterator[None]:
    """Collects once before the block and not inside it. A block within another one doesn't collect again: beside torch
    and transformers a collection takes 0.2 s, and each layer has graphs of its own."""
    enabled = gc.isenabled()
    if not _blocks:
        gc.collect()
    gc.disable()
    _blocks.append(enabled)
    try:
        yield
    finally:
        _blocks.pop()
        if enabled:
            gc.enable()

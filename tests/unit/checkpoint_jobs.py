"""Jobs for test_checkpoint.py."""

from __future__ import annotations

from eprt.checkpoint import load_on_all_ranks
from eprt.errors import EprtError
from eprt.models import load_layer


def load(context, directories: list[str]) -> tuple[str, str]:
    """Every rank loads from its own directory; the error's type and text, or what was loaded."""
    world = context.world()
    path = directories[context.rank]
    try:
        parts = load_on_all_ranks(world, lambda: load_layer(path, 0, world.parallel, world.rank), layer=0)
    except EprtError as error:
        return type(error).__name__, str(error)
    return "loaded", str(parts.shard.first_expert)

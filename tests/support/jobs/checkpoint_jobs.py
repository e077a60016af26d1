"""Jobs for test_checkpoint.py."""

from __future__ import annotations

from eprt.config import ParallelConfig
from eprt.errors import EprtError
from eprt.models import build_layer, load_layer
from eprt.models.checkpoint import load_on_all_ranks


def load(context, directories: list[str]) -> tuple[str, str]:
    """Every rank loads from its own directory; the error's type and text, or what was loaded."""
    world = context.world()
    path = directories[context.rank]
    try:
        parts = load_on_all_ranks(world, lambda: load_layer(path, 0, world.parallel, world.rank), layer=0)
    except EprtError as error:
        return type(error).__name__, str(error)
    return "loaded", str(parts.shard.first_expert)


def build(context, directory: str, ranks: list[int], world_size: int) -> str:
    """A layer of the experts that were read for `ranks` of a world of `world_size`; the error, or what was built."""
    world = context.world()
    parts = load_layer(directory, 0, ParallelConfig(world_size), ranks[context.rank])
    try:
        layer = build_layer(parts, world)
    except EprtError as error:
        return f"{type(error).__name__}: {error}"
    layer.close()
    return "built"

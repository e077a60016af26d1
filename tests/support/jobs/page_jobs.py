"""What each rank runs for test_page_code.py: the blocks of a page, one after another."""

from __future__ import annotations

from typing import Any

import torch

from eprt.ranks.launcher import RankContext


def run_blocks(context: RankContext, page: str, blocks: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """The numbers, lists and shapes that the blocks leave behind. Their World is this rank's own, closed at the end."""
    space: dict[str, Any] = dict(names)
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, block {number}", "exec"), space)
    for layer in space.get("layers", ()):
        layer.close()
    space["world"].close()
    shapes = {name: tuple(value.shape) for name, value in space.items() if isinstance(value, torch.Tensor)}
    return shapes | {
        name: value for name, value in space.items() if isinstance(value, (int, list)) and name != "layers"
    }

"""What each rank runs for test_page_code.py: the blocks of a page, one after another."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from eprt.conformance.checks import CheckRow, run_checks, standard_checks
from eprt.ranks.launcher import RankContext
from eprt.support import Device


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


def check_backends(context: RankContext, folder: str, module: str, dispatcher: str, executor: str) -> list[CheckRow]:
    """Every conformance check of a dispatcher and an executor that `module` registers, each with the other."""
    sys.path.insert(0, folder)
    importlib.import_module(module)
    checks = standard_checks(context.size, Device("cpu"))
    return run_checks(context, [c for c in checks if c.dispatcher == dispatcher and c.executor in ("", executor)])

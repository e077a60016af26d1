"""Experts where a placement file says, in an engine that loads them in order."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

from eprt.errors import ConfigError
from eprt.integrations.engine.settings import PLACEMENT
from eprt.placement import ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.weights import ExpertWeights
from eprt.world import World


@functools.cache
def _read(path: str) -> PlacementFile:
    return PlacementFile.read(Path(path).expanduser())


def placement_of(options: dict[str, Any], name: str, num_experts: int, world: World) -> ExpertPlacement | None:
    """Returns the placement of the layer that the engine calls `name`, or None if the options name no file.

    Raises:
        ConfigError: there is no such file, it is for other sizes, or it lacks this layer.
    """
    path = options.get(PLACEMENT)
    if path is None:
        return None
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)  # 3 of `model.layers.3.mlp.experts`
    if len(numbers) != 1:
        raise ConfigError(
            f"layer {name!r} has {len(numbers)} numbers in its name: a placement file can't say which it is"
        )
    return _read(path).placement(int(numbers[0]), num_experts, world.parallel)


def redistribute(world: World, loaded: ExpertWeights, placement: ExpertPlacement) -> ExpertWeights:
    """Sends each rank's E / W experts, `loaded` in order, to the ranks whose slots name them. Collective.

    Returns one expert for each of this rank's slots; for an empty slot the one that `ExpertShard.experts` names.
    """
    held, ranks = loaded.num_local_experts, range(world.size)
    wanted = [sorted(set(placement.shard(rank).experts)) for rank in ranks]
    out = [[expert for expert in wanted[rank] if expert // held == world.rank] for rank in ranks]
    into = [[expert for expert in wanted[world.rank] if expert // held == rank] for rank in ranks]
    rows_out = torch.tensor([e - world.rank * held for part in out for e in part], device=loaded.device)
    arrived = {expert: row for row, expert in enumerate(e for part in into for e in part)}
    slots = torch.tensor([arrived[expert] for expert in placement.shard(world.rank).experts], device=loaded.device)

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.contiguous().view(torch.uint8).reshape(held, -1)
        width = rows.shape[1]
        received = rows.new_empty(len(arrived) * width)
        counts = ([len(part) * width for part in parts] for parts in (into, out))
        world.all_to_all(received, rows[rows_out.long()].flatten(), *counts)
        return received.view(-1, width)[slots].view(tensor.dtype).reshape(len(slots), *tensor.shape[1:])

    return loaded.map(exchanged)

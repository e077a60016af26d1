"""Experts where a placement file says, from a vLLM that loads them in order."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

from eprt.errors import ConfigError
from eprt.placement import ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.weights import ExpertWeights
from eprt.world import World

OPTION = "placement"  # beside RuntimeConfig's fields in `--additional-config`


@functools.cache
def read(path: str) -> PlacementFile:
    """The file, once a process. Raises ConfigError."""
    return PlacementFile.read(Path(path).expanduser())


def placement_of(options: dict[str, Any], name: str, num_experts: int, world: World) -> ExpertPlacement | None:
    """The placement of the layer that vLLM calls `name`; None without a file.

    Raises:
        ConfigError: no such file, one for other sizes, or without this layer.
    """
    path = options.get(OPTION)
    if path is None:
        return None
    if not isinstance(path, str):
        raise ConfigError(f"--additional-config eprt.{OPTION}: {path!r}: expected the path of a placement file")
    return read(path).placement(layer_number(name), num_experts, world.parallel)


def layer_number(name: str) -> int:
    """That of `model.layers.3.mlp.experts`. Raises ConfigError if there isn't one number."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise ConfigError(
            f"layer {name!r} has {len(numbers)} numbers in its name: a placement file can't say which it is"
        )
    return int(numbers[0])


def spread(world: World, loaded: ExpertWeights, placement: ExpertPlacement) -> ExpertWeights:
    """Every rank's experts, in order, sent to the ranks whose slots name them. Collective.

    Args:
        loaded: E / W experts of this rank, in order.

    Returns:
        one expert for each of this rank's slots; of an empty slot the one that `ExpertShard.experts` names.
    """
    held = loaded.num_local_experts
    wanted = [sorted(set(placement.shard(rank).experts)) for rank in range(world.size)]

    def sent(source: int, target: int) -> list[int]:
        return [expert for expert in wanted[target] if expert // held == source]

    out = [sent(world.rank, rank) for rank in range(world.size)]
    into = [sent(rank, world.rank) for rank in range(world.size)]
    here = torch.tensor([e - world.rank * held for part in out for e in part], dtype=torch.int64, device=loaded.device)
    arrived = {expert: place for place, expert in enumerate(e for part in into for e in part)}
    mine = placement.shard(world.rank).experts
    slots = torch.tensor([arrived[expert] for expert in mine], dtype=torch.int64, device=loaded.device)

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.contiguous().view(torch.uint8).reshape(held, -1)
        width = rows.shape[1]
        received = rows.new_empty(len(arrived) * width)
        world.all_to_all(
            received,
            rows[here].flatten(),
            [len(part) * width for part in into],
            [len(part) * width for part in out],
        )
        return received.view(-1, width)[slots].view(tensor.dtype).reshape(len(slots), *tensor.shape[1:])

    return loaded.map(exchanged)

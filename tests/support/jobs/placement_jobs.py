"""Jobs for test_placement.py: one layer under two placements, inside the ranks."""

from __future__ import annotations

import torch

from eprt.config import Activation, MoEConfig, RuntimeConfig
from eprt.errors import EprtError
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.tokens import TopK
from eprt.weights import Dense, ExpertWeights

E, K, H, I = 8, 3, 16, 8
# Whole numbers through ReLU^2: every sum is exact in float32 whatever its order, so placements must agree bit for bit.
CONFIG = MoEConfig(E, K, H, I, activation=Activation("relu2"), weight_format="f32")


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def outputs(context, slots, *, dispatcher, phase="decode", wrong_slot=False):
    """This rank's output under the placement, and what one process with all experts says."""
    world = context.world()
    placement = ExpertPlacement(E, world.parallel, tuple(slots))
    up, down = whole_numbers(E, I, H, seed=1), whole_numbers(E, H, I, seed=2)
    held = list(placement.shard(world.rank).experts)
    if wrong_slot:
        held[0] = (held[0] + 1) % E
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="reference", max_tokens_per_rank=16, phase=phase)
    layer = ExpertParallelMoE(
        CONFIG, world, ExpertWeights(Dense(up[held]), Dense(down[held])), runtime=runtime, placement=placement
    )
    T = (5, 0, 7, 1)[world.rank]
    x = whole_numbers(T, H, seed=10 + world.rank)
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(world.rank)).topk(K).indices.to(torch.int32)
    ids[:1, 0] = E  # no expert
    weights = whole_numbers(T, K, seed=20 + world.rank)
    found = layer(x, TopK(ids, weights))
    wanted = torch.zeros(T, H)
    for t in range(T):
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            if expert < E:
                wanted[t] += weight * ((x[t] @ up[expert].T).relu().square() @ down[expert].T)
    layer.close()
    return torch.equal(found, wanted)


def different_placements(context):
    """What every rank hears when rank 1 was given another placement."""
    world = context.world()
    slots = tuple(range(E)) if context.rank != 1 else tuple(reversed(range(E)))
    placement = ExpertPlacement(E, world.parallel, slots)
    held = list(placement.shard(world.rank).experts)
    up, down = whole_numbers(E, I, H, seed=1), whole_numbers(E, H, I, seed=2)
    try:
        ExpertParallelMoE(CONFIG, world, ExpertWeights(Dense(up[held]), Dense(down[held])), placement=placement)
    except EprtError as error:
        return f"{type(error).__name__}: {error}"
    return "built"

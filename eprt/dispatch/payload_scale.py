"""The second-level scale of NVFP4 tokens: one number for a layer, the same on every rank.

A token is quantised once, before anybody knows which experts it meets, so its scale must hold for all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from eprt.errors import ConfigError
from eprt.weights import ExpertWeights, Nvfp4

if TYPE_CHECKING:
    from eprt.world import World

UNCALIBRATED = 1.0


def calibrated_scale(weights: ExpertWeights) -> torch.Tensor | None:
    """float32 [1]: the largest `input_scale` of these experts' first matrices, or None for a checkpoint without.

    ModelOpt stores amax / (6 * 448) of what a calibration run saw, which is the factor itself: the largest of them
    keeps every value that any of the experts was calibrated for.
    """
    matrix = weights.gate_up
    if not isinstance(matrix, Nvfp4) or matrix.input_scale is None:
        return None
    return matrix.input_scale.amax().view(1)


def check_payload_scale(own: torch.Tensor | None) -> None:
    """Raises ConfigError if this rank's `calibrated_scale` isn't positive and finite."""
    if own is not None and not (math.isfinite(value := float(own)) and value > 0):
        raise ConfigError(f"gate_up.input_scale reaches {value}: expected positive numbers; check the checkpoint")


def agree_payload_scale(world: World, own: torch.Tensor | None) -> torch.Tensor:
    """The largest of all ranks' scales, float32 [1] on the world's device; 1.0 if none has one. Collective, after the
    ranks have compared their headers.

    Args:
        own: `calibrated_scale` of this rank's experts, checked.

    Raises:
        ConfigError: some ranks have a scale and others don't; the same on every rank.
    """
    value = 0.0 if own is None else float(own)
    values = world.gather_control(torch.tensor([value], dtype=torch.float32)).flatten()
    without = (values == 0).nonzero().flatten().tolist()
    if 0 < len(without) < world.size:
        raise ConfigError(
            f"gate_up.input_scale is missing on ranks {without} and set on the others: nvfp4 tokens need one scale for "
            "all ranks; load every rank from the same checkpoint"
        )
    agreed = UNCALIBRATED if without else float(values.max())
    return torch.full((1,), agreed, dtype=torch.float32, device=world.device)

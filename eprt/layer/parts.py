"""Checks what a layer is built of, before ranks do anything together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eprt.config import MoEConfig, ParallelConfig
from eprt.errors import ConfigError
from eprt.json_files import shown
from eprt.placement import ExpertPlacement
from eprt.routing import Router
from eprt.weights import LatentWeights, SharedExpertWeights

MAX_LAYER = 2**31 - 1


def check_number(layer: object) -> None:
    """Raises ConfigError unless `layer` is a layer's number."""
    if type(layer) is not int or not 0 <= layer <= MAX_LAYER:
        raise ConfigError(f"layer {shown(layer)}: expected the layer's number, from 0 to {MAX_LAYER}")


def check_parts(
    config: MoEConfig, router: Router | None, shared: SharedExpertWeights | None, latent: LatentWeights | None
) -> None:
    """Raises ConfigError unless these weights fit the config."""
    _require_pair("shared", config.shared, shared)
    _require_pair("latent", config.model_hidden_size, latent)
    for part in (shared, latent, router):
        if part is not None:
            part.check(config)


def placement_in(parallel: ParallelConfig, config: MoEConfig, placement: ExpertPlacement | None) -> ExpertPlacement:
    """Returns the layer's placement: contiguous if None. Raises ConfigError for one in a world of other sizes."""
    if placement is None:
        return ExpertPlacement(config.num_experts, parallel)
    found, here = ((sizes.ep_size, sizes.moe_tp_size) for sizes in (placement.parallel, parallel))
    if found != here:
        raise ConfigError(
            f"the placement is for (expert-parallel, MoE-TP) sizes {found}, the world has {here}: make it with "
            "world.parallel"
        )
    return placement


def check_dtypes(accepted: Sequence[tuple[torch.dtype, str]]) -> None:
    """Raises ConfigError where no tokens would suit every part that takes one dtype alone."""
    if len({dtype for dtype, _ in accepted}) > 1:
        found = ", ".join(f"{name} takes {dtype} tokens" for dtype, name in accepted)
        raise ConfigError(f"{found}: expected one dtype; cast the weights of shared expert and latent projection")


def _require_pair(name: str, wanted: object, given: object) -> None:
    if (wanted is None) != (given is None):
        raise ConfigError(f"{name} weights are {'missing' if given is None else 'given'}, the config says otherwise")

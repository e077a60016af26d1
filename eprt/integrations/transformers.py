"""A transformers model with expert parallelism in two lines.

    model = AutoModelForCausalLM.from_pretrained(directory)
    layers = parallelize(model, World.from_env(), directory)

Each rank keeps the whole attention (data parallel) and its share of the experts. Ranks may run batches of different
size; a rank without a batch calls `idle_step(layers)` for each forward of the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from eprt.checkpoint import Checkpoint, load_on_all_ranks
from eprt.config import RuntimeConfig
from eprt.errors import ConfigError
from eprt.layer import ExpertParallelMoE
from eprt.models import family_for, load_layer
from eprt.world import World


class MoEBlock(nn.Module):
    """Stands where the model had its MoE block, and returns what the model's decoder layer expects of it."""

    def __init__(self, layer: ExpertParallelMoE, returns_scores: bool) -> None:
        super().__init__()
        self.layer = layer
        self.returns_scores = returns_scores

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **_: Any) -> Any:
        output = self.layer(hidden_states, token_ids=input_ids)
        return (output, None) if self.returns_scores else output


def parallelize(
    model: nn.Module, world: World, checkpoint: str | Path, *, runtime: RuntimeConfig | None = None
) -> list[ExpertParallelMoE]:
    """Replace every MoE block of `model` by an `ExpertParallelMoE` that holds this rank's experts. Collective.

    Args:
        model: a transformers model of a family in `eprt.models.FAMILIES`, on the world's device. Its own experts are
            dropped.
        checkpoint: the directory the weights come from; only this rank's bytes are read.

    Returns:
        the layers, in model order. `World.warmup(*layers)` compiles and allocates before the first batch.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: the same on every rank; the model is then unchanged.
    """
    built: list[tuple[str, ExpertParallelMoE]] = []
    with Checkpoint(checkpoint) as files:
        family = family_for(files.config)
        for number in family.moe_layers(family.text_config(files.config)):
            parts = load_on_all_ranks(
                world, lambda number=number: load_layer(files, number, world.parallel, world.rank), number
            )
            layer = ExpertParallelMoE(
                parts.config,
                world,
                parts.experts,
                runtime=runtime,
                router=parts.router,
                shared=parts.shared,
                latent=parts.latent,
                layer=number,
            )
            built.append((parts.module_path, layer))
    for path, _ in built:
        _parent(model, path)
    for path, layer in built:
        parent, name = _parent(model, path)
        setattr(parent, name, MoEBlock(layer, _returns_scores(getattr(parent, name))))
    return [layer for _, layer in built]


def idle_step(layers: list[ExpertParallelMoE]) -> None:
    """One forward of a rank without tokens: it takes part in every layer's exchange and computes what others send."""
    for layer in layers:
        hash_routed = layer.config.routing.method == "hash"
        nothing = torch.empty(0, layer.config.input_size, dtype=_dtype(layer), device=layer.world.device)
        ids = torch.empty(0, dtype=torch.int64, device=layer.world.device) if hash_routed else None
        layer(nothing, token_ids=ids)


def _dtype(layer: ExpertParallelMoE) -> torch.dtype:
    """The dtype the other ranks' tokens have: the model's, which the router's weight has too."""
    return torch.bfloat16 if layer.router is None else layer.router.weight.dtype


def _returns_scores(block: nn.Module) -> bool:
    """gpt-oss's block returns (hidden_states, router_scores), and its decoder layer unpacks two."""
    return type(block).__name__ == "GptOssMLP"


def _parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent_path, _, name = path.rpartition(".")
    try:
        parent = model.get_submodule(parent_path)
        parent.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(f"{type(model).__name__} has no module {path}: is the checkpoint this model's?") from error
    return parent, name

"""Granite: all experts of a layer are one `input_linear` and one `output_linear`."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import MoEConfig, Routing
from eprt.models.base import FieldFamily
from eprt.models.checkpoint import Checkpoint
from eprt.models.formats import ExpertNames, Part, load_experts
from eprt.placement import ExpertShard
from eprt.weights import ExpertWeights

PUBLISHED: dict[Part, tuple[str, int, int]] = {
    "gate": ("input_linear.weight", 0, 2),
    "up": ("input_linear.weight", 1, 2),
    "down": ("output_linear.weight", 0, 1),
}


class GraniteMoe(FieldFamily):
    """ibm-granite/granite-3.0-1b-a400m, -3b-a800m."""

    module = "model.layers.{}.block_sparse_moe"
    blocks: ClassVar[tuple[str, ...]] = ("model.layers.{}.block_sparse_moe",)
    routers = ("router.layer", "router")
    num_experts = ("num_local_experts",)
    intermediate_size = ("intermediate_size",)

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("topk_softmax")

    def load_experts(self, checkpoint: Checkpoint, layer: int, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
        block = self.block(checkpoint, layer)
        if f"{block}.input_linear.weight" not in checkpoint:
            return super().load_experts(checkpoint, layer, config, shard)
        return load_experts(checkpoint, ExpertNames(block, config.num_experts, self.aliases, PUBLISHED), config, shard)

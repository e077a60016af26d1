"""Granite: all experts of a layer are one `input_linear` and one `output_linear`."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import MoEConfig, Routing
from eprt.models.base import ModelFamily
from eprt.models.checkpoint import Checkpoint
from eprt.models.formats import ExpertNames, Part, load_experts
from eprt.models.hf_config import check_moe_layer, expect, integer, num_layers, weight_format
from eprt.placement import ExpertShard
from eprt.weights import ExpertWeights

PUBLISHED: dict[Part, tuple[str, int, int]] = {
    "gate": ("input_linear.weight", 0, 2),
    "up": ("input_linear.weight", 1, 2),
    "down": ("output_linear.weight", 0, 1),
}


class GraniteMoe(ModelFamily):
    """ibm-granite/granite-3.0-1b-a400m, -3b-a800m."""

    module = "model.layers.{}.block_sparse_moe"
    blocks: ClassVar[tuple[str, ...]] = ("model.layers.{}.block_sparse_moe",)
    routers = ("router.layer", "router")

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        expect(hf, "hidden_act", "silu")
        return MoEConfig(
            num_experts=integer(hf, "num_local_experts"),
            top_k=integer(hf, "num_experts_per_tok"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            routing=Routing("topk_softmax"),
            weight_format=weight_format(hf, self.expert_modules(layer)),
        )

    def load_experts(self, checkpoint: Checkpoint, layer: int, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
        block = self.block(checkpoint, layer)
        if f"{block}.input_linear.weight" not in checkpoint:
            return super().load_experts(checkpoint, layer, config, shard)
        return load_experts(checkpoint, ExpertNames(block, config.num_experts, self.aliases, PUBLISHED), config, shard)

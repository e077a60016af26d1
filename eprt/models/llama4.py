"""Llama 4: one expert a token, whose input (not its output) the sigmoid of the router's logit multiplies.

Checkpoints hold a layer's experts as `gate_up_proj` [E, H, 2I], gate first, and `down_proj` [E, I, H].
"""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import MoEConfig, Routing, SharedExpert
from eprt.models.base import ModelFamily, NestedText
from eprt.models.checkpoint import Checkpoint
from eprt.models.formats import ExpertNames, load_experts
from eprt.models.hf_config import (
    check_moe_layer,
    expect,
    integer,
    integers,
    num_layers,
    plain_format,
)
from eprt.placement import ExpertShard
from eprt.weights import ExpertWeights


class Llama4Text(ModelFamily):
    """The text model of Llama 4 alone."""

    module = "model.layers.{}.feed_forward"
    blocks: ClassVar[tuple[str, ...]] = (
        "model.layers.{}.feed_forward",
        "language_model.model.layers.{}.feed_forward",
    )
    routers = ("router",)
    shared = "shared_expert"
    returns_scores = True

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        listed = integers(hf, "moe_layers")
        if listed is not None:
            return [layer for layer in sorted(set(listed)) if 0 <= layer < num_layers(hf)]
        step = integer(hf, "interleave_moe_layer_step", default=1, least=1)
        return list(range(step - 1, num_layers(hf), step))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        expect(hf, "hidden_act", "silu")
        intermediate = integer(hf, "intermediate_size")
        return MoEConfig(
            num_experts=integer(hf, "num_local_experts"),
            top_k=integer(hf, "num_experts_per_tok"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=intermediate,
            routing=Routing("topk_sigmoid", renormalize=False),
            weight_format=plain_format(hf, self.expert_modules(layer)),
            shared=SharedExpert(intermediate),
            weight_on_input=True,
        )

    def load_experts(self, checkpoint: Checkpoint, layer: int, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
        prefix = f"{self.block(checkpoint, layer)}.experts"
        names = ExpertNames(prefix, config.num_experts, self.aliases, self.stacked, transposed=True)
        return load_experts(checkpoint, names, config, shard)


class Llama4(NestedText, Llama4Text):
    """meta-llama/Llama-4-Scout-17B-16E, -Maverick-17B-128E: the text model's config is nested."""

    module = "language_model.model.layers.{}.feed_forward"

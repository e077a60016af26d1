"""ERNIE 4.5: softmax scores with a selection bias; the router is kept in float32."""

from __future__ import annotations

from typing import Any

from eprt.config import MoEConfig, Routing, SharedExpert
from eprt.models.base import ModelFamily
from eprt.models.hf_config import check_moe_layer, expect, integer, num_layers, weight_format
from eprt.routing.formulas import NORM_MIN


class Ernie45Moe(ModelFamily):
    """baidu/ERNIE-4.5-21B-A3B-PT, -300B-A47B-PT."""

    correction_biases = ("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias")
    float32_router = True
    router_weights = "tokens"

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        first = integer(hf, "moe_layer_start_index", default=1)
        last = integer(hf, "moe_layer_end_index", default=-1, least=-1)
        step = integer(hf, "moe_layer_interval", default=1, least=1)
        end = num_layers(hf) if last == -1 else min(last + 1, num_layers(hf))
        return [layer for layer in range(first, end) if (layer + 1) % step == 0]

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        for name, supported in (("hidden_act", "silu"), ("use_bias", False), ("moe_norm_min", NORM_MIN)):
            expect(hf, name, supported)
        intermediate = integer(hf, "moe_intermediate_size")
        num_shared = integer(hf, "moe_num_shared_experts", default=0)
        return MoEConfig(
            num_experts=integer(hf, "moe_num_experts", "num_experts"),
            top_k=integer(hf, "moe_k", "num_experts_per_tok"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=intermediate,
            routing=Routing("grouped_softmax", renormalize=True),
            weight_format=weight_format(hf, self.expert_modules(layer)),
            shared=SharedExpert(intermediate * num_shared) if num_shared else None,
        )

"""Hunyuan-A13B: softmax routing, a shared expert without a gate; sizes may be listed layer by layer."""

from __future__ import annotations

from typing import Any

from eprt.config import MoEConfig, Routing, SharedExpert
from eprt.models.base import ModelFamily
from eprt.models.hf_config import check_moe_layer, expect, integer, num_layers, of_layer, weight_format


class HunyuanV1Moe(ModelFamily):
    """tencent/Hunyuan-A13B-Instruct."""

    routers = ("gate.wg",)
    shared = "shared_mlp"

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        expect(hf, "moe_layer_num_skipped", 0)
        return list(range(num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        expect(hf, "hidden_act", "silu")
        hf = of_layer(hf, layer, "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
        intermediate = integer(hf, "intermediate_size")
        return MoEConfig(
            num_experts=integer(hf, "num_experts"),
            top_k=integer(hf, "moe_topk"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "moe_intermediate_size", default=intermediate),
            routing=Routing("softmax_topk", renormalize=True),
            weight_format=weight_format(hf, self.expert_modules(layer)),
            shared=SharedExpert(intermediate * integer(hf, "num_shared_expert", default=1, least=1)),
        )

"""Hunyuan-A13B: softmax routing, a shared expert without a gate; sizes may be listed layer by layer."""

from __future__ import annotations

from typing import Any

from eprt.config import MoEConfig, Routing, SharedExpert
from eprt.models.base import FieldFamily
from eprt.models.hf_config import expect, integer, of_layer


class HunyuanV1Moe(FieldFamily):
    """tencent/Hunyuan-A13B-Instruct."""

    routers = ("gate.wg",)
    shared = "shared_mlp"
    num_experts = ("num_experts",)
    top_k = ("moe_topk",)
    intermediate_size = ("moe_intermediate_size", "intermediate_size")

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        expect(hf, "moe_layer_num_skipped", 0)
        return super().moe_layers(hf)

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        listed = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
        return super().moe_config(of_layer(hf, layer, *listed), layer)

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("softmax_topk", renormalize=True)

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "intermediate_size") * integer(hf, "num_shared_expert", default=1, least=1))

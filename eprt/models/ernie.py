"""ERNIE 4.5: softmax scores with a selection bias; the router is kept in float32."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import Routing
from eprt.models.base import FieldFamily
from eprt.models.hf_config import integer, num_layers
from eprt.routing.formulas import NORM_MIN


class Ernie45Moe(FieldFamily):
    """baidu/ERNIE-4.5-21B-A3B-PT, -300B-A47B-PT."""

    correction_biases = ("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias")
    float32_router = True
    router_weights = "tokens"
    num_experts = ("moe_num_experts", "num_experts")
    top_k = ("moe_k", "num_experts_per_tok")
    num_shared = "moe_num_shared_experts"
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu", "use_bias": False, "moe_norm_min": NORM_MIN}

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        first = integer(hf, "moe_layer_start_index", default=1)
        last = integer(hf, "moe_layer_end_index", default=-1, least=-1)
        step = integer(hf, "moe_layer_interval", default=1, least=1)
        end = num_layers(hf) if last == -1 else min(last + 1, num_layers(hf))
        return [layer for layer in range(first, end) if (layer + 1) % step == 0]

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("grouped_softmax", renormalize=True)

"""Mixtral and its kind: blocks named `block_sparse_moe`, experts `w1` (gate), `w3` (up), `w2` (down)."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import Routing
from eprt.models.base import FieldFamily
from eprt.models.formats import Part
from eprt.models.hf_config import expect, real


class Mixtral(FieldFamily):
    """mistralai/Mixtral-8x7B, -8x22B; MiniMaxAI/MiniMax-Text-01-hf. The weights stay float32."""

    blocks = ("model.layers.{}.block_sparse_moe", "model.layers.{}.mlp")
    router_weights = "float32"
    aliases: ClassVar[dict[Part, tuple[str, ...]]] = {"gate": ("w1",), "up": ("w3",), "down": ("w2",)}
    intermediate_size = ("intermediate_size",)

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("softmax_topk", renormalize=True)


class MiniMaxM2(Mixtral):
    """MiniMaxAI/MiniMax-M2: sigmoid scores with a selection bias, which lies beside the router."""

    correction_biases = ("e_score_correction_bias",)
    float32_logits = False
    router_weights = "logits"

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        expect(hf, "scoring_func", "sigmoid")
        return Routing("grouped_sigmoid", renormalize=True)


class Phimoe(Mixtral):
    """microsoft/Phi-3.5-MoE-instruct: sparsemixer."""

    routers = ("gate", "router")
    router_weights = "logits"

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("sparsemixer", renormalize=False, jitter=real(hf, "router_jitter_noise", default=0.01))

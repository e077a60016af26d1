"""Llama 4: one expert per token, whose input (not its output) the sigmoid of the router's logit multiplies.

Checkpoints hold a layer's experts as `gate_up_proj` [E, H, 2I], gate first, and `down_proj` [E, I, H].
"""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import Routing, SharedExpert
from eprt.models.base import FieldFamily, NestedText
from eprt.models.hf_config import integer, integers, num_layers


class Llama4Text(FieldFamily):
    """The text model of Llama 4 alone."""

    module = "model.layers.{}.feed_forward"
    blocks: ClassVar[tuple[str, ...]] = ("model.layers.{}.feed_forward", "language_model.model.layers.{}.feed_forward")
    routers = ("router",)
    shared = "shared_expert"
    returns_scores = True
    transposed = True
    packed = False
    num_experts = ("num_local_experts",)
    intermediate_size = ("intermediate_size",)
    weight_on_input = True

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        listed = integers(hf, "moe_layers")
        if listed is not None:
            return [layer for layer in sorted(set(listed)) if 0 <= layer < num_layers(hf)]
        step = integer(hf, "interleave_moe_layer_step", default=1, least=1)
        return list(range(step - 1, num_layers(hf), step))

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("topk_sigmoid", renormalize=False)

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "intermediate_size"))


class Llama4(NestedText, Llama4Text):
    """meta-llama/Llama-4-Scout-17B-16E, -Maverick-17B-128E: the text model's config is nested."""

    module = "language_model.model.layers.{}.feed_forward"

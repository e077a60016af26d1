"""Qwen3-MoE; Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE with their shared expert behind a sigmoid gate; OLMoE."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import Routing, SharedExpert
from eprt.models.base import FieldFamily, NestedText
from eprt.models.hf_config import boolean, integer, integers, num_layers


class Qwen3Moe(FieldFamily):
    """Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B."""

    num_experts = ("num_experts", "num_local_experts")
    renormalize: ClassVar[bool] = False  # where the config doesn't say

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        step = integer(hf, "decoder_sparse_step", default=1, least=1)
        dense = set(integers(hf, "mlp_only_layers") or [])
        return [i for i in range(num_layers(hf)) if i not in dense and (i + 1) % step == 0]

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("softmax_topk", renormalize=boolean(hf, "norm_topk_prob", self.renormalize))


class Olmoe(Qwen3Moe):
    """allenai/OLMoE-1B-7B: every layer is a mixture of experts, whose width is the config's only one."""

    intermediate_size = ("intermediate_size",)

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))


class Qwen2Moe(Qwen3Moe):
    """Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B."""

    shared = "shared_expert"

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "shared_expert_intermediate_size"), gate=True)


class Qwen3Next(Qwen2Moe):
    """Qwen/Qwen3-Next-80B-A3B."""

    renormalize = True


class Qwen35MoeText(Qwen2Moe):
    """The text model of Qwen3.5-MoE alone. Every layer is a mixture of experts, weights always renormalised."""

    blocks = ("model.layers.{}.mlp", "model.language_model.layers.{}.mlp")

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("softmax_topk", renormalize=True)


class Qwen35Moe(NestedText, Qwen35MoeText):
    """Qwen/Qwen3.5-35B-A3B, Qwen3.5-397B-A17B: the text model's config is nested, its modules one level deeper."""

    module = "model.language_model.layers.{}.mlp"

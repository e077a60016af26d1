"""Qwen3-MoE; Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE with their shared expert behind a sigmoid gate; OLMoE."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import MoEConfig, Routing, SharedExpert
from eprt.models.base import ModelFamily, NestedText
from eprt.models.hf_config import (
    boolean,
    check_moe_layer,
    expect,
    integer,
    integers,
    num_layers,
    weight_format,
)


class Qwen3Moe(ModelFamily):
    """Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B."""

    intermediate: ClassVar[str] = "moe_intermediate_size"

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        step = integer(hf, "decoder_sparse_step", default=1, least=1)
        dense = set(integers(hf, "mlp_only_layers") or [])
        return [i for i in range(num_layers(hf)) if i not in dense and (i + 1) % step == 0]

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        return self._config(hf, layer, boolean(hf, "norm_topk_prob", False), None)

    def _config(self, hf: dict[str, Any], layer: int, renormalize: bool, shared: SharedExpert | None) -> MoEConfig:
        expect(hf, "hidden_act", "silu")
        return MoEConfig(
            num_experts=integer(hf, "num_experts", "num_local_experts"),
            top_k=integer(hf, "num_experts_per_tok"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, self.intermediate),
            routing=Routing("softmax_topk", renormalize=renormalize),
            weight_format=weight_format(hf, self.expert_modules(layer)),
            shared=shared,
        )


class Olmoe(Qwen3Moe):
    """allenai/OLMoE-1B-7B: every layer is a mixture of experts, whose width is the config's only one."""

    intermediate = "intermediate_size"

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))


class Qwen2Moe(Qwen3Moe):
    """Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B."""

    shared = "shared_expert"
    renormalize: ClassVar[bool] = False

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        shared = SharedExpert(integer(hf, "shared_expert_intermediate_size"), gate=True)
        return self._config(hf, layer, boolean(hf, "norm_topk_prob", self.renormalize), shared)


class Qwen3Next(Qwen2Moe):
    """Qwen/Qwen3-Next-80B-A3B."""

    renormalize = True


class Qwen35MoeText(Qwen3Moe):
    """The text model of Qwen3.5-MoE alone. Every layer is a mixture of experts, weights always renormalised."""

    blocks = ("model.layers.{}.mlp", "model.language_model.layers.{}.mlp")
    shared = "shared_expert"

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        shared = SharedExpert(integer(hf, "shared_expert_intermediate_size"), gate=True)
        return self._config(hf, layer, True, shared)


class Qwen35Moe(NestedText, Qwen35MoeText):
    """Qwen/Qwen3.5-35B-A3B, Qwen3.5-397B-A17B: the text model's config is nested, its modules one level deeper."""

    module = "model.language_model.layers.{}.mlp"

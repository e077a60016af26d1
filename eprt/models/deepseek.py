"""DeepSeek-V3 (grouped sigmoid routing with a selection bias) and DeepSeek-V4 (sqrt-softplus, or a token-id table)."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import Activation, MoEConfig, Routing, SharedExpert
from eprt.errors import ConfigError
from eprt.models.base import ModelFamily
from eprt.models.formats import Part
from eprt.models.hf_config import boolean, check_moe_layer, expect, integer, num_layers, real, strings, weight_format


class DeepseekV3(ModelFamily):
    """deepseek-ai/DeepSeek-V3, -V3.1, -R1; nvidia's NVFP4 exports of them."""

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        expect(hf, "moe_layer_freq", 1)
        return list(range(integer(hf, "first_k_dense_replace"), num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        expect(hf, "hidden_act", "silu")
        expect(hf, "scoring_func", "sigmoid")
        expect(hf, "topk_method", "noaux_tc")
        intermediate = integer(hf, "moe_intermediate_size")
        num_shared = integer(hf, "n_shared_experts", default=0)
        return MoEConfig(
            num_experts=integer(hf, "n_routed_experts", "num_local_experts"),
            top_k=integer(hf, "num_experts_per_tok"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=intermediate,
            routing=Routing(
                "grouped_sigmoid",
                renormalize=boolean(hf, "norm_topk_prob", True),
                num_groups=integer(hf, "n_group"),
                topk_groups=integer(hf, "topk_group"),
                scaling_factor=real(hf, "routed_scaling_factor"),
            ),
            weight_format=weight_format(hf, self.expert_modules(layer)),
            shared=SharedExpert(intermediate * num_shared) if num_shared else None,
        )


class DeepseekV4(ModelFamily):
    """deepseek-ai/DeepSeek-V4. Published names are `ffn`, `w1` (gate), `w3` (up), `w2` (down)."""

    blocks = ("model.layers.{}.ffn", "layers.{}.ffn", "model.layers.{}.mlp", "layers.{}.mlp")
    correction_biases = ("bias", "e_score_correction_bias")
    aliases: ClassVar[dict[Part, tuple[str, ...]]] = {
        "gate": ("w1", "gate_proj"),
        "up": ("w3", "up_proj"),
        "down": ("w2", "down_proj"),
    }

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        for name, supported in (("hidden_act", "silu"), ("scoring_func", "sqrtsoftplus"), ("mlp_bias", False)):
            expect(hf, name, supported)
        intermediate = integer(hf, "moe_intermediate_size")
        num_shared = integer(hf, "n_shared_experts", default=0)
        activation = Activation(limit=real(hf, "swiglu_limit"))
        shared = SharedExpert(intermediate * num_shared, activation=activation) if num_shared else None
        hashed = self._is_hash_layer(hf, layer)
        return MoEConfig(
            num_experts=integer(hf, "n_routed_experts", "num_local_experts"),
            top_k=integer(hf, "num_experts_per_tok"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=intermediate,
            activation=activation,
            routing=Routing("hash" if hashed else "sqrt_softplus", scaling_factor=real(hf, "routed_scaling_factor")),
            weight_format=weight_format(hf, self.expert_modules(layer)),
            shared=shared,
        )

    @staticmethod
    def _is_hash_layer(hf: dict[str, Any], layer: int) -> bool:
        """By `mlp_layer_types` (transformers) or `num_hash_layers` (the published config)."""
        kinds = strings(hf, "mlp_layer_types")
        if kinds is None:
            return layer < integer(hf, "num_hash_layers")
        if len(kinds) <= layer or kinds[layer] not in ("moe", "hash_moe"):
            found = kinds[layer] if layer < len(kinds) else f"{len(kinds)} entries"
            raise ConfigError(f"config.json: mlp_layer_types has {found!r} for layer {layer}: expected moe or hash_moe")
        return kinds[layer] == "hash_moe"

"""DeepSeek-V3 (grouped sigmoid routing with a selection bias) and what others built on it, DeepSeek-V2 (grouped
softmax), DeepSeek-V4 (sqrt-softplus, or a token-id table)."""

from __future__ import annotations

from typing import Any, ClassVar

from eprt.config import Activation, Routing
from eprt.errors import ConfigError
from eprt.json_files import shown
from eprt.models.base import FieldFamily
from eprt.models.hf_config import boolean, choice, expect, integer, listed, num_layers, real, where


class DeepseekV3(FieldFamily):
    """deepseek-ai/DeepSeek-V3, -V3.1, -R1; nvidia's NVFP4 exports of them; moonshotai/Kimi-K2."""

    correction_biases = ("gate.e_score_correction_bias",)
    float32_router = True
    num_experts = ("n_routed_experts", "num_local_experts")
    num_shared = "n_shared_experts"
    renormalize: ClassVar[bool] = True  # where the config doesn't say
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        expect(hf, "moe_layer_freq", 1)
        return list(range(integer(hf, "first_k_dense_replace"), num_layers(hf)))

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing(
            "grouped_sigmoid",
            renormalize=boolean(hf, "norm_topk_prob", self.renormalize),
            num_groups=integer(hf, "n_group"),
            topk_groups=integer(hf, "topk_group"),
            scaling_factor=real(hf, "routed_scaling_factor"),
        )


class DeepseekV32(DeepseekV3):
    """deepseek-ai/DeepSeek-V3.2; zai-org/GLM-5 and GLM-4.7-Flash: `mlp_layer_types` says which layers are sparse, or
    the published `first_k_dense_replace`."""

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        kinds = listed(hf, "mlp_layer_types", str)
        if kinds is None:
            return super().moe_layers(hf)
        return [layer for layer, kind in enumerate(kinds[: num_layers(hf)]) if kind == "sparse"]


class Dots1(DeepseekV3):
    """rednote-hilab/dots.llm1, whose config.json calls the choice of experts its scoring function."""

    renormalize = False
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu"}


class SolarOpen(DeepseekV3):
    """upstage/Solar-Open: every layer is a mixture of experts."""

    moe_layers = FieldFamily.moe_layers


class DeepseekV2(DeepseekV3):
    """deepseek-ai/DeepSeek-V2, -V2-Lite, -Coder-V2: softmax scores, a group counts as its best expert."""

    correction_biases = ()
    settings: ClassVar[dict[str, object]] = {
        "hidden_act": "silu",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "mlp_bias": False,
    }

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        methods = ("greedy", "group_limited_greedy")
        grouped = choice(hf, "topk_method", methods, default="greedy") == "group_limited_greedy"
        return Routing(
            "grouped_softmax",
            renormalize=False,
            num_groups=integer(hf, "n_group") if grouped else 1,
            topk_groups=integer(hf, "topk_group") if grouped else 1,
            scaling_factor=real(hf, "routed_scaling_factor", default=1.0),
        )


class DeepseekV4(FieldFamily):
    """deepseek-ai/DeepSeek-V4. Published names are `ffn`, `w1` (gate), `w3` (up), `w2` (down)."""

    blocks = ("model.layers.{}.ffn", "layers.{}.ffn", "model.layers.{}.mlp", "layers.{}.mlp")
    correction_biases = ("gate.bias", "gate.e_score_correction_bias")
    num_experts = ("n_routed_experts", "num_local_experts")
    num_shared = "n_shared_experts"
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu", "scoring_func": "sqrtsoftplus", "mlp_bias": False}

    def activation(self, hf: dict[str, Any]) -> Activation:
        return Activation(limit=real(hf, "swiglu_limit"))

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        method = "hash" if self._is_hash_layer(hf, layer) else "sqrt_softplus"
        return Routing(method, scaling_factor=real(hf, "routed_scaling_factor"))

    @staticmethod
    def _is_hash_layer(hf: dict[str, Any], layer: int) -> bool:
        """Decides by `mlp_layer_types` (transformers) or `num_hash_layers` (the published config)."""
        kinds = listed(hf, "mlp_layer_types", str)
        if kinds is None:
            return layer < integer(hf, "num_hash_layers")
        found = kinds[layer] if layer < len(kinds) else f"{len(kinds)} entries"
        if found not in ("moe", "hash_moe"):
            words = f"mlp_layer_types has {shown(found)} for layer {layer}: expected moe or hash_moe"
            raise ConfigError(f"{where(hf)}: {words}")
        return found == "hash_moe"

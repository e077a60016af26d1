"""Nemotron-H: experts without a gate (ReLU^2), in a latent width where the config has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from eprt.config import Activation, MoEConfig, Routing, SharedExpert
from eprt.errors import ConfigError
from eprt.models.base import FieldFamily
from eprt.models.checkpoint import Checkpoint
from eprt.models.formats import Part, load_linear
from eprt.models.hf_config import MAX_LAYERS, boolean, integer, real, strings, where
from eprt.weights import LatentWeights


class NemotronH(FieldFamily):
    """nvidia/Nemotron-3 family (Mamba-2, attention and MoE layers in one stack)."""

    module = "model.layers.{}.mixer"
    blocks = ("backbone.layers.{}.mixer", "model.layers.{}.mixer")
    correction_biases = ("gate.e_score_correction_bias",)
    aliases: ClassVar[dict[Part, tuple[str, ...]]] = {"up": ("up_proj",), "down": ("down_proj",)}
    stacked: ClassVar[dict[Part, tuple[str, int, int]]] = {"up": ("up_proj", 0, 1), "down": ("down_proj", 0, 1)}
    num_experts = ("n_routed_experts", "num_local_experts")
    settings: ClassVar[dict[str, object]] = {"mlp_hidden_act": "relu2", "mlp_bias": False}

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        kinds = strings(hf, "layers_block_type")
        pattern = hf.get("hybrid_override_pattern")
        if isinstance(layers := pattern if kinds is None else kinds, (str, list)) and len(layers) > MAX_LAYERS:
            raise ConfigError(f"{where(hf)}: {len(layers)} layers: expected at most {MAX_LAYERS}")
        if kinds is not None:
            return [layer for layer, kind in enumerate(kinds) if kind == "moe"]
        if not isinstance(pattern, str):
            raise ConfigError(f"{where(hf)}: field layers_block_type or hybrid_override_pattern is missing")
        return [layer for layer, kind in enumerate(pattern) if kind == "E"]

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        config = super().moe_config(hf, layer)
        latent = integer(hf, "moe_latent_size", default=0)
        return replace(config, hidden_size=latent, model_hidden_size=config.hidden_size) if latent else config

    def activation(self, hf: dict[str, Any]) -> Activation:
        return Activation("relu2")

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing(
            "grouped_sigmoid",
            renormalize=boolean(hf, "norm_topk_prob", True),
            num_groups=integer(hf, "n_group", default=1),
            topk_groups=integer(hf, "topk_group", default=1),
            scaling_factor=real(hf, "routed_scaling_factor", default=1.0),
        )

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "moe_shared_expert_intermediate_size"), activation=self.activation(hf))

    def load_latent(self, checkpoint: Checkpoint, layer: int, config: MoEConfig) -> LatentWeights | None:
        if config.model_hidden_size is None:
            return None
        block = self.block(checkpoint, layer)
        H, H_model = config.hidden_size, config.model_hidden_size
        return LatentWeights(
            into=load_linear(checkpoint, (f"{block}.fc1_latent_proj",), H, H_model),
            out_of=load_linear(checkpoint, (f"{block}.fc2_latent_proj",), H_model, H),
        )

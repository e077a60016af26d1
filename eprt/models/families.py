"""Reads the families that a few fields of config.json describe: Qwen, Mixtral, Granite, Llama 4, Nemotron, ..."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from eprt.config import Activation, MoEConfig, Routing, SharedExpert
from eprt.errors import ConfigError
from eprt.models.base import FieldFamily, NestedText
from eprt.models.checkpoint import Checkpoint
from eprt.models.fields import Part
from eprt.models.formats import ExpertNames, load_linear
from eprt.models.hf_config import MAX_LAYERS, boolean, expect, integer, listed, num_layers, of_layer, real, where
from eprt.routing.formulas import NORM_MIN
from eprt.weights import LatentWeights


class Qwen3Moe(FieldFamily):
    """Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B."""

    num_experts = ("num_experts", "num_local_experts")
    renormalize: ClassVar[bool] = False  # where the config doesn't say

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        step = integer(hf, "decoder_sparse_step", default=1, least=1)
        dense = set(listed(hf, "mlp_only_layers", int) or [])
        return [i for i in range(num_layers(hf)) if i not in dense and (i + 1) % step == 0]

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("softmax_topk", renormalize=boolean(hf, "norm_topk_prob", self.renormalize))


class Olmoe(Qwen3Moe):
    """allenai/OLMoE-1B-7B: every layer is a mixture of experts, whose width is the config's only one."""

    intermediate_size = ("intermediate_size",)

    moe_layers = FieldFamily.moe_layers


class Qwen2Moe(Qwen3Moe):
    """Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: a shared expert behind a sigmoid gate."""

    shared = "shared_expert"

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "shared_expert_intermediate_size"), gate=True)


class Qwen3Next(Qwen2Moe):
    """Qwen/Qwen3-Next-80B-A3B."""

    renormalize = True


class Qwen35MoeText(Qwen2Moe):
    """The text model of Qwen3.5-MoE alone. Every layer is a mixture of experts, weights always renormalised."""

    blocks = ("model.layers.{}.mlp", "model.language_model.layers.{}.mlp")

    fixed_routing = Routing("softmax_topk", renormalize=True)

    moe_layers = FieldFamily.moe_layers
    routing = FieldFamily.routing


class Qwen35Moe(NestedText, Qwen35MoeText):
    """Qwen/Qwen3.5-35B-A3B, Qwen3.5-397B-A17B: the text model's config is nested, its modules one level deeper."""

    module = "model.language_model.layers.{}.mlp"


class Mixtral(FieldFamily):
    """mistralai/Mixtral-8x7B, -8x22B; MiniMaxAI/MiniMax-Text-01-hf: `w1` is gate, `w3` up, `w2` down.

    The routing weights stay float32.
    """

    blocks = ("model.layers.{}.block_sparse_moe", "model.layers.{}.mlp")
    router_weights = "float32"
    intermediate_size = ("intermediate_size",)
    fixed_routing = Routing("softmax_topk", renormalize=True)


class MiniMaxM2(Mixtral):
    """MiniMaxAI/MiniMax-M2: sigmoid scores with a selection bias, which lies beside the router."""

    correction_biases = ("e_score_correction_bias",)
    float32_logits = False
    router_weights = "logits"
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu", "scoring_func": "sigmoid"}
    fixed_routing = Routing("grouped_sigmoid", renormalize=True)


class Phimoe(Mixtral):
    """microsoft/Phi-3.5-MoE-instruct: sparsemixer."""

    routers = ("gate", "router")
    router_weights = "logits"

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        return Routing("sparsemixer", renormalize=False, jitter=real(hf, "router_jitter_noise", default=0.01))


class GraniteMoe(FieldFamily):
    """ibm-granite/granite-3.0-1b-a400m, -3b-a800m: published experts are one `input_linear` and one `output_linear`."""

    module = "model.layers.{}.block_sparse_moe"
    blocks = ("model.layers.{}.block_sparse_moe",)
    routers = ("router.layer", "router")
    num_experts = ("num_local_experts",)
    intermediate_size = ("intermediate_size",)
    linears: ClassVar[dict[Part, tuple[str, int, int]]] = {
        "gate": ("input_linear.weight", 0, 2),
        "up": ("input_linear.weight", 1, 2),
        "down": ("output_linear.weight", 0, 1),
    }
    fixed_routing = Routing("topk_softmax")

    def expert_names(self, checkpoint: Checkpoint, block: str) -> ExpertNames:
        if f"{block}.input_linear.weight" in checkpoint:
            return ExpertNames(block, self.aliases, self.linears)
        return super().expert_names(checkpoint, block)


class HunyuanV1Moe(FieldFamily):
    """tencent/Hunyuan-A13B-Instruct: a shared expert without a gate; sizes may be listed layer by layer.

    The router works in float32.
    """

    routers = ("gate.wg",)
    float32_router = True
    float32_logits = True
    shared = "shared_mlp"
    num_experts = ("num_experts",)
    top_k = ("moe_topk",)
    intermediate_size = ("moe_intermediate_size", "intermediate_size")
    fixed_routing = Routing("softmax_topk", renormalize=True)

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        expect(hf, "moe_layer_num_skipped", 0)
        return super().moe_layers(hf)

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        by_layer = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
        return super().moe_config(of_layer(hf, layer, *by_layer), layer)

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "intermediate_size") * integer(hf, "num_shared_expert", default=1, least=1))


class Ernie45Moe(FieldFamily):
    """baidu/ERNIE-4.5-21B-A3B-PT, -300B-A47B-PT: the router is kept in float32."""

    correction_biases = ("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias")
    float32_router = True
    router_weights = "tokens"
    num_experts = ("moe_num_experts", "num_experts")
    top_k = ("moe_k", "num_experts_per_tok")
    num_shared = "moe_num_shared_experts"
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu", "use_bias": False, "moe_norm_min": NORM_MIN}
    fixed_routing = Routing("grouped_softmax", renormalize=True)

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        first = integer(hf, "moe_layer_start_index", default=1)
        last = integer(hf, "moe_layer_end_index", default=-1, least=-1)
        step = integer(hf, "moe_layer_interval", default=1, least=1)
        end = num_layers(hf) if last == -1 else min(last + 1, num_layers(hf))
        return [layer for layer in range(first, end) if (layer + 1) % step == 0]


class Llama4Text(FieldFamily):
    """The text model of Llama 4 alone: the sigmoid of the router's logit multiplies an expert's input, not its output.

    Checkpoints hold a layer's experts as `gate_up_proj` [E, H, 2I], gate first, and `down_proj` [E, I, H], those in FP8
    with scales [E, 1, 2I] and [E, 1, H]; or each for itself, as other models do.
    """

    module = "model.layers.{}.feed_forward"
    blocks = ("model.layers.{}.feed_forward", "language_model.model.layers.{}.feed_forward")
    routers = ("router",)
    shared = "shared_expert"
    returns_scores = True
    transposed = True
    num_experts = ("num_local_experts",)
    intermediate_size = ("intermediate_size",)
    weight_on_input = True
    fixed_routing = Routing("topk_sigmoid", renormalize=False)

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        named = listed(hf, "moe_layers", int)
        if named is not None:
            return [layer for layer in sorted(set(named)) if 0 <= layer < num_layers(hf)]
        step = integer(hf, "interleave_moe_layer_step", default=1, least=1)
        return list(range(step - 1, num_layers(hf), step))

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert:
        return SharedExpert(integer(hf, "intermediate_size"))


class Llama4(NestedText, Llama4Text):
    """meta-llama/Llama-4-Scout-17B-16E, -Maverick-17B-128E: the text model's config is nested."""

    module = "language_model.model.layers.{}.feed_forward"


class NemotronH(FieldFamily):
    """nvidia/Nemotron-3 family (Mamba-2, attention and MoE layers in one stack)."""

    module = "model.layers.{}.mixer"
    blocks = ("backbone.layers.{}.mixer", "model.layers.{}.mixer")
    correction_biases = ("gate.e_score_correction_bias",)
    float32_router = True
    aliases: ClassVar[dict[Part, tuple[str, ...]]] = {"up": ("up_proj",), "down": ("down_proj",)}
    stacked: ClassVar[dict[Part, tuple[str, int, int]]] = {"up": ("up_proj", 0, 1), "down": ("down_proj", 0, 1)}
    num_experts = ("n_routed_experts", "num_local_experts")
    settings: ClassVar[dict[str, object]] = {"mlp_hidden_act": "relu2", "mlp_bias": False}

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        kinds, sparse = listed(hf, "layers_block_type", str), "moe"
        if kinds is None:
            kinds, sparse = hf.get("hybrid_override_pattern"), "E"
            if not isinstance(kinds, str):
                raise ConfigError(f"{where(hf)}: field layers_block_type or hybrid_override_pattern is missing")
        if len(kinds) > MAX_LAYERS:
            raise ConfigError(f"{where(hf)}: {len(kinds)} layers: expected at most {MAX_LAYERS}")
        return [layer for layer, kind in enumerate(kinds) if kind == sparse]

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

"""transformers' own MoE blocks with random weights, and the same weights in eprt's canonical form.

The canonical form is written out here by hand, apart from `eprt.models`, so that the two witness each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from eprt.config import Activation, MoEConfig, Routing, SharedExpert
from eprt.routing import Router
from eprt.weights import Dense, ExpertWeights, LatentWeights, SharedExpertWeights

E, K, H, I, VOCABULARY = 8, 3, 64, 48, 32
WEIGHT_FORMAT = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass
class Block:
    """`reference(x [T, H], token_ids [T]) -> [T, H]`, and what an ExpertParallelMoE needs to equal it.

    `reference` is None where ranks get the rest of it, so that they needn't import transformers.
    """

    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    config: MoEConfig
    experts: ExpertWeights
    router: Router
    shared: SharedExpertWeights | None = None
    latent: LatentWeights | None = None


def _randomize(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Every parameter and float buffer drawn anew, so that gate != up, biases != 0 and corrections matter."""
    generator = torch.Generator().manual_seed(7)
    module = module.to(dtype).eval()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                scale = 0.5 if "bias" in name else 1.5 * tensor.shape[-1] ** -0.5
                tensor.copy_((torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype))
            else:
                tensor.copy_(torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(VOCABULARY)]))
    return module


def _mlp(mlp: nn.Module, gate: torch.Tensor | None = None) -> SharedExpertWeights:
    first = mlp.gate_proj.weight.data if hasattr(mlp, "gate_proj") else None
    return SharedExpertWeights(up=mlp.up_proj.weight.data, down=mlp.down_proj.weight.data, gate=first, output_gate=gate)


def gpt_oss(dtype: torch.dtype) -> Block:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP

    hf = GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
    hf._experts_implementation = "eager"
    block = _randomize(GptOssMLP(hf), dtype)
    experts, router = block.experts, block.router
    gate_up = experts.gate_up_proj.data.transpose(1, 2)
    bias = experts.gate_up_proj_bias.data
    weights = ExpertWeights(
        Dense(torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1).contiguous()),
        Dense(experts.down_proj.data.transpose(1, 2).contiguous()),
        torch.cat([bias[:, 0::2], bias[:, 1::2]], 1),
        experts.down_proj_bias.data,
    )
    config = MoEConfig(
        E, K, H, I, Activation("swiglu", 1.702, 1.0, 7.0), Routing("topk_softmax"), True, WEIGHT_FORMAT[dtype]
    )
    own = Router(router.weight.data, config.routing, K, bias=router.bias.data)
    return Block(lambda x, ids: block(x[None])[0][0], config, weights, own)


@dataclass(frozen=True)
class Row:
    """A block of the common shape: a router, stacked experts, maybe a shared expert, maybe a latent width around them.

    Attributes:
        names: transformers' model folder, block class and config class.
        fields: of that config, beside the sizes, which every family names in its own way.
        routing, top_k: ours.
        shared: the shared expert's name in the block, and its config.
        changes: other fields of our MoEConfig.
        router: other arguments of our Router.
        number: the layer's, where the block asks for it.
    """

    names: tuple[str, str, str]
    fields: dict[str, Any]
    routing: Routing
    top_k: int = K
    shared: tuple[str, SharedExpert] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    number: int | None = None

    def __call__(self, dtype: torch.dtype) -> Block:
        import transformers

        folder, block_class, config_class = self.names
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        name, shared = self.shared or ("", None)
        common = {"routing": self.routing, "weight_format": WEIGHT_FORMAT[dtype], "shared": shared}
        config = MoEConfig(E, self.top_k, H, I, **common, **self.changes)
        hf = getattr(transformers, config_class)(hidden_size=config.input_size, **self.fields)
        hf._experts_implementation = "eager"
        number = () if self.number is None else (self.number,)
        block = _randomize(getattr(modeling, block_class)(hf, *number), dtype)
        # Llama 4 keeps [E, in, out]; gate comes first everywhere.
        first, down = "gate_up_proj" if config.activation.gated else "up_proj", block.experts.down_proj.data
        gate_up = getattr(block.experts, first).data
        if folder == "llama4":
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
        gate = block.router if hasattr(block, "router") else block.gate
        gate = getattr(gate, "wg", gate)
        # The selection bias lies in the router, in the block beside it (MiniMax-M2) or as [1, E] (ERNIE 4.5).
        biases = [tensor for key, tensor in _tensors(block) if key.endswith("e_score_correction_bias")]
        router = {"correction_bias": biases[0].data.reshape(E) if biases else None} | self.router
        if hasattr(gate, "tid2eid"):
            router["token_table"] = gate.tid2eid
        output_gate = block.shared_expert_gate.weight.data if hasattr(block, "shared_expert_gate") else None
        latent = [linear.weight.data for key, linear in block.named_children() if key.endswith("latent_proj")]
        return Block(
            lambda x, ids: _first(block(x[None], *([ids[None]] if number else []))).view(x.shape),
            config,
            ExpertWeights(Dense(gate_up), Dense(down)),
            Router(gate.weight.data, config.routing, self.top_k, **router),
            None if shared is None else _mlp(getattr(block, name), output_gate),
            LatentWeights(*latent) if config.model_hidden_size else None,
        )


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


DEEPSEEK = {
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
GROUPED = Routing("grouped_sigmoid", True, 4, 2, 2.5)
TWO_SHARED = ("shared_experts", SharedExpert(2 * I))
MIXTRAL = {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": K}
QWEN = {"moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K, "shared_expert_intermediate_size": 40}
GATED_SHARED = ("shared_expert", SharedExpert(40, gate=True))


def _deepseek_kind(folder: str, stem: str) -> Row:
    return Row((folder, f"{stem}MoE", f"{stem}Config"), DEEPSEEK, GROUPED, shared=TWO_SHARED)


def _deepseek_v4(routing: str, number: int) -> Row:
    # A limit of 1 clamps many of these small activations, so a wrong clamp shows.
    activation = Activation("swiglu", 1.0, 0.0, 1.0)
    fields = {name: DEEPSEEK[name] for name in ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")}
    fields |= {"swiglu_limit": 1.0, "routed_scaling_factor": 1.5, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
    return Row(
        ("deepseek_v4", "DeepseekV4SparseMoeBlock", "DeepseekV4Config"),
        fields | {"mlp_layer_types": ["hash_moe", "moe"]},
        Routing(routing, True, 1, 1, 1.5),
        shared=("shared_experts", SharedExpert(I, activation=activation)),
        changes={"activation": activation},
        number=number,
    )


def _deepseek_v2(routing: Routing, **fields: Any) -> Row:
    names = ("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config")
    return Row(names, DEEPSEEK | {"norm_topk_prob": False} | fields, routing, shared=TWO_SHARED)


ROWS: dict[str, Row] = {
    "glm4_moe": _deepseek_kind("glm4_moe", "Glm4Moe"),
    "dots1": _deepseek_kind("dots1", "Dots1"),
    "solar_open": _deepseek_kind("solar_open", "SolarOpen"),
    "deepseek_v32": _deepseek_kind("deepseek_v32", "DeepseekV32"),
    "glm_moe_dsa": _deepseek_kind("glm_moe_dsa", "GlmMoeDsa"),
    "glm4_moe_lite": _deepseek_kind("glm4_moe_lite", "Glm4MoeLite"),
    "deepseek_v2": _deepseek_v2(Routing("grouped_softmax", False, 4, 2, 2.5), topk_method="group_limited_greedy"),
    "deepseek_v2_greedy": _deepseek_v2(Routing("grouped_softmax", False, 1, 1, 2.5), topk_method="greedy"),
    "mixtral": Row(
        ("mixtral", "MixtralSparseMoeBlock", "MixtralConfig"),
        MIXTRAL,
        Routing("softmax_topk", True),
        router={"weights": "float32"},
    ),
    "minimax": Row(
        ("minimax", "MiniMaxSparseMoeBlock", "MiniMaxConfig"),
        MIXTRAL,
        Routing("softmax_topk", True),
        router={"weights": "float32"},
    ),
    "minimax_m2": Row(
        ("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config"),
        MIXTRAL,
        Routing("grouped_sigmoid", True),
        router={"float32_logits": False},
    ),
    # A jitter of 0.3 leaves some logits in the softmax and others out.
    "phimoe": Row(
        ("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig"),
        MIXTRAL | {"num_experts_per_tok": 2, "router_jitter_noise": 0.3},
        Routing("sparsemixer", False, jitter=0.3),
        top_k=2,
    ),
    "granitemoe": Row(("granitemoe", "GraniteMoeMoE", "GraniteMoeConfig"), MIXTRAL, Routing("topk_softmax")),
    "olmoe": Row(
        ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig"),
        {"intermediate_size": I, "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": False},
        Routing("softmax_topk", False),
    ),
    "qwen2_moe": Row(
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig"),
        QWEN | {"norm_topk_prob": False},
        Routing("softmax_topk", False),
        shared=GATED_SHARED,
    ),
    "qwen3_next": Row(
        ("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig"),
        QWEN | {"norm_topk_prob": True},
        Routing("softmax_topk", True),
        shared=GATED_SHARED,
    ),
    "hunyuan_v1_moe": Row(
        ("hunyuan_v1_moe", "HunYuanMoEV1Moe", "HunYuanMoEV1Config"),
        {"intermediate_size": I, "num_experts": E, "moe_topk": K},
        Routing("softmax_topk", True),
        shared=("shared_mlp", SharedExpert(I)),
    ),
    "ernie4_5_moe": Row(
        ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig"),
        {"moe_intermediate_size": I, "moe_num_experts": E, "moe_k": K, "moe_num_shared_experts": 2},
        Routing("grouped_softmax", True),
        shared=TWO_SHARED,
        router={"weights": "tokens"},
    ),
    "llama4": Row(
        ("llama4", "Llama4TextMoe", "Llama4TextConfig"),
        MIXTRAL | {"num_experts_per_tok": 1},
        Routing("topk_sigmoid", False),
        top_k=1,
        shared=("shared_expert", SharedExpert(I)),
        changes={"weight_on_input": True},
    ),
}

RELU2 = Activation("relu2")
# Each with arithmetic that no other has.
DISTINCT: dict[str, Callable[[torch.dtype], Block]] = {
    "gpt_oss": gpt_oss,
    "qwen3_moe": Row(
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig"),
        {"moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": False},
        Routing("softmax_topk", False),
    ),
    "qwen3_5_moe": Row(
        ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeTextConfig"),
        QWEN,
        Routing("softmax_topk", True),
        shared=GATED_SHARED,
    ),
    "deepseek_v3": _deepseek_kind("deepseek_v3", "DeepseekV3"),
    "deepseek_v4_topk": _deepseek_v4("sqrt_softplus", 1),
    "deepseek_v4_hash": _deepseek_v4("hash", 0),
    "nemotron_h": Row(
        ("nemotron_h", "NemotronHMoE", "NemotronHConfig"),
        {"moe_latent_size": H, "moe_intermediate_size": I, "moe_shared_expert_intermediate_size": 56}
        | {
            "n_routed_experts": E,
            "num_experts_per_tok": K,
            "n_group": 2,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        Routing("grouped_sigmoid", True, 2, 2, 2.5),
        shared=("shared_experts", SharedExpert(56, activation=RELU2)),
        changes={"activation": RELU2, "model_hidden_size": 96},
    ),
}
BLOCKS: dict[str, Callable[[torch.dtype], Block]] = DISTINCT | ROWS

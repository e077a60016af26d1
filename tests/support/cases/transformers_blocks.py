"""transformers' own MoE blocks with random weights, and the same weights in eprt's canonical form.

The canonical form is written out here by hand, apart from `eprt.models`, so that the two witness each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def qwen3_moe(dtype: torch.dtype) -> Block:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    hf = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False
    )
    hf._experts_implementation = "eager"
    block = _randomize(Qwen3MoeSparseMoeBlock(hf), dtype)
    config = MoEConfig(E, K, H, I, routing=Routing("softmax_topk", False), weight_format=WEIGHT_FORMAT[dtype])
    return Block(
        lambda x, ids: block(x[None])[0],
        config,
        ExpertWeights(Dense(block.experts.gate_up_proj.data), Dense(block.experts.down_proj.data)),
        Router(block.gate.weight.data, config.routing, K),
    )


def qwen3_5_moe(dtype: torch.dtype) -> Block:
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock, Qwen3_5MoeTextConfig

    hf = Qwen3_5MoeTextConfig(
        hidden_size=H,
        moe_intermediate_size=I,
        shared_expert_intermediate_size=40,
        num_experts=E,
        num_experts_per_tok=K,
    )
    hf._experts_implementation = "eager"
    block = _randomize(Qwen3_5MoeSparseMoeBlock(hf), dtype)
    config = MoEConfig(
        E,
        K,
        H,
        I,
        routing=Routing("softmax_topk", True),
        weight_format=WEIGHT_FORMAT[dtype],
        shared=SharedExpert(40, gate=True),
    )
    return Block(
        lambda x, ids: block(x[None])[0],
        config,
        ExpertWeights(Dense(block.experts.gate_up_proj.data), Dense(block.experts.down_proj.data)),
        Router(block.gate.weight.data, config.routing, K),
        _mlp(block.shared_expert, block.shared_expert_gate.weight.data),
    )


def deepseek_v3(dtype: torch.dtype) -> Block:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    hf = DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=I,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    hf._experts_implementation = "eager"
    block = _randomize(DeepseekV3MoE(hf), dtype)
    config = MoEConfig(
        E,
        K,
        H,
        I,
        routing=Routing("grouped_sigmoid", True, 4, 2, 2.5),
        weight_format=WEIGHT_FORMAT[dtype],
        shared=SharedExpert(2 * I),
    )
    return Block(
        lambda x, ids: block(x[None])[0],
        config,
        ExpertWeights(Dense(block.experts.gate_up_proj.data), Dense(block.experts.down_proj.data)),
        Router(block.gate.weight.data, config.routing, K, correction_bias=block.gate.e_score_correction_bias),
        _mlp(block.shared_experts),
    )


def _deepseek_v4(dtype: torch.dtype, hashed: bool) -> Block:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4SparseMoeBlock

    # A limit of 1 clamps many of these small activations, so a wrong clamp shows.
    hf = DeepseekV4Config(
        hidden_size=H,
        moe_intermediate_size=I,
        n_routed_experts=E,
        num_experts_per_tok=K,
        swiglu_limit=1.0,
        routed_scaling_factor=1.5,
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        mlp_layer_types=["hash_moe", "moe"],
    )
    hf._experts_implementation = "eager"
    block = _randomize(DeepseekV4SparseMoeBlock(hf, 0 if hashed else 1), dtype)
    activation = Activation("swiglu", 1.0, 0.0, 1.0)
    config = MoEConfig(
        E,
        K,
        H,
        I,
        activation,
        Routing("hash" if hashed else "sqrt_softplus", True, 1, 1, 1.5),
        weight_format=WEIGHT_FORMAT[dtype],
        shared=SharedExpert(block.shared_experts.intermediate_size, activation=activation),
    )
    router = Router(
        block.gate.weight.data,
        config.routing,
        K,
        correction_bias=None if hashed else block.gate.e_score_correction_bias,
        token_table=block.gate.tid2eid if hashed else None,
    )
    return Block(
        lambda x, ids: block(x[None], ids[None])[0],
        config,
        ExpertWeights(Dense(block.experts.gate_up_proj.data), Dense(block.experts.down_proj.data)),
        router,
        _mlp(block.shared_experts),
    )


def deepseek_v4_topk(dtype: torch.dtype) -> Block:
    return _deepseek_v4(dtype, hashed=False)


def deepseek_v4_hash(dtype: torch.dtype) -> Block:
    return _deepseek_v4(dtype, hashed=True)


def nemotron_h(dtype: torch.dtype) -> Block:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMoE

    latent, width = H, 96
    hf = NemotronHConfig(
        hidden_size=width,
        moe_latent_size=latent,
        moe_intermediate_size=I,
        moe_shared_expert_intermediate_size=56,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=2,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    hf._experts_implementation = "eager"
    block = _randomize(NemotronHMoE(hf), dtype)
    relu2 = Activation("relu2")
    config = MoEConfig(
        E,
        K,
        latent,
        I,
        relu2,
        Routing("grouped_sigmoid", True, 2, 2, 2.5),
        weight_format=WEIGHT_FORMAT[dtype],
        shared=SharedExpert(56, activation=relu2),
        model_hidden_size=width,
    )
    return Block(
        lambda x, ids: block(x[None])[0],
        config,
        ExpertWeights(Dense(block.experts.up_proj.data), Dense(block.experts.down_proj.data)),
        Router(block.gate.weight.data, config.routing, K, correction_bias=block.gate.e_score_correction_bias),
        _mlp(block.shared_experts),
        LatentWeights(block.fc1_latent_proj.weight.data, block.fc2_latent_proj.weight.data),
    )


BLOCKS: dict[str, Callable[[torch.dtype], Block]] = {
    build.__name__: build
    for build in (gpt_oss, qwen3_moe, qwen3_5_moe, deepseek_v3, deepseek_v4_topk, deepseek_v4_hash, nemotron_h)
}

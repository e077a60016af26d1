"""As much of SGLang's arguments and layers as its plugin reads. Written from SGLang 0.5.17 and 0.5.23."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def arguments(**changes: Any) -> Any:
    """A ServerArgs of two ranks with data-parallel attention."""
    phases = SimpleNamespace(
        decode=SimpleNamespace(backend="full", max_bs=512), prefill=SimpleNamespace(backend="disabled", max_bs=None)
    )
    args = SimpleNamespace(
        model_path="none",
        revision=None,
        device="cuda",
        dtype="auto",
        quantization=None,
        tp_size=2,
        dp_size=2,
        ep_size=2,
        pp_size=1,
        enable_dp_attention=True,
        moe_a2a_backend="none",
        moe_runner_backend="auto",
        disable_shared_experts_fusion=False,
        disable_cuda_graph=False,
        disable_prefill_cuda_graph=False,
        cuda_graph_backend_prefill=None,
        cuda_graph_config=phases,
        chunked_prefill_size=4096,
        max_prefill_tokens=16384,
        max_running_requests=None,
        init_expert_location="trivial",
        enable_memory_saver=False,
        speculative_algorithm=None,
        speculative_num_draft_tokens=None,
        speculative_eagle_topk=None,
        speculative_draft_model_path=None,
        speculative_draft_model_revision=None,
        speculative_moe_a2a_backend=None,
        speculative_moe_runner_backend=None,
        speculative_draft_load_format=None,
        speculative_draft_model_quantization=None,
        model_impl="auto",
        json_model_override_args="{}",
        lora_target_modules=None,
    )
    vars(args).update(changes)
    return args


def runner_config(**changes: Any) -> Any:
    config = SimpleNamespace(
        activation="silu",
        is_gated=True,
        gemm1_alpha=None,
        gemm1_clamp_limit=None,
        swiglu_limit=None,
        gate_up_interleaved=True,
        apply_router_weight_on_input=False,
        no_combine=False,
        routed_scaling_factor=None,
    )
    vars(config).update(changes)
    return config


GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


class FusedMoE(SimpleNamespace):
    """`layers/moe/fused_moe_triton/layer.py`, what its constructor leaves."""


def fused_moe(method: Any, config: Any, **changes: Any) -> Any:
    """A FusedMoE of gpt-oss on one of two expert-parallel ranks."""
    layer = FusedMoE(
        layer_name="model.layers.0.mlp.experts",
        layer_id=0,
        quant_method=method,
        moe_runner_config=config,
        num_experts=128,
        num_local_experts=64,
        num_fused_shared_experts=0,
        moe_ep_rank=0,
        moe_ep_size=2,
        moe_tp_size=1,
        top_k=4,
        hidden_size=2880,
        intermediate_size_per_partition=2880,
        w2_weight=torch.empty(64, 2880, 1472, device="meta"),  # in padding for tiles of 64
        params_dtype=torch.bfloat16,
        with_bias=True,
        should_fuse_routed_scaling_factor_in_topk=False,
        reduce_results=False,
        dispatcher=SimpleNamespace(skip_local_expert_mapping=False),  # True: ids of all ranks' experts
    )
    vars(layer).update(changes)
    return layer


class TopK(nn.Module):
    """`layers/moe/topk.py` up to a routing function of its own, which comes behind groups."""

    def __init__(self, top_k: int, **given: Any) -> None:
        super().__init__()
        defaults = {
            "use_grouped_topk": False,
            "scoring_func": "softmax",
            "correction_bias": None,
            "custom_routing_function": None,
            "num_fused_shared_experts": 0,
            "apply_routed_scaling_factor_on_output": False,
        }
        self.topk_config = SimpleNamespace(top_k=top_k, **defaults | given)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
        config = self.topk_config
        assert not config.use_grouped_topk
        assert not config.apply_routed_scaling_factor_on_output
        return config.custom_routing_function(
            hidden_states=hidden_states,
            gating_output=router_logits,
            topk=config.top_k,
            renormalize=config.renormalize,
        )


class Qwen3MoeSparseMoeBlock(nn.Module):
    """`models/qwen3_moe.py`, forward_normal up to the choice."""

    def __init__(self, gate: nn.Module, topk: TopK, experts: Any) -> None:
        super().__init__()
        self.gate, self.topk, self.experts = gate, topk, experts

    def choose(self, hidden_states: torch.Tensor) -> Any:
        router_logits, _ = self.gate(hidden_states)
        return self.topk(hidden_states, router_logits)


class GptOssSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    """`models/gpt_oss.py`, forward_normal up to the choice."""

    @property
    def router(self) -> nn.Module:
        return self.gate


class MoEGate(nn.Module):
    """`models/deepseek_v2.py`: a weight and a bias for the choice alone."""

    def __init__(self, weight: torch.Tensor, e_score_correction_bias: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(e_score_correction_bias, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, gemm_output_zero_allocator: Any = None) -> torch.Tensor:
        raise AssertionError("SGLang's own gate")


class DeepseekV2MoE(Qwen3MoeSparseMoeBlock):
    """`models/deepseek_v2.py`, forward_normal up to the choice."""

    def choose(self, hidden_states: torch.Tensor) -> Any:
        router_logits = self.gate(hidden_states, None)
        assert router_logits.shape == (hidden_states.shape[0], self.gate.weight.shape[0])
        return self.topk(hidden_states, router_logits)

"""Finds the gates in a model of vLLM's whose product and choice eprt takes over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eprt.config import Routing
from eprt.integrations.engine.bound import bound_to
from eprt.integrations.engine.routing import biased_sigmoid, take_over, unrouted

# Blocks that call a gate of their own, under this name, and give its logits to the experts as they are.
_CALL_GATE = {"MLPBlock": "router"} | dict.fromkeys(
    ("MixtralMoE", "OlmoeMoE", "GraniteMoeMoE", "Glm4MoE", "Glm4MoeLite", "MiniMaxM2MoE", "Qwen2MoeSparseMoeBlock"),
    "gate",
)
_CORRECTION = "e_score_correction_bias"
# In `additional_config`, which is part of the key to vLLM's compiled graphs.
LAYERS, GATES = "eprt_layers", "eprt_gates"


def take_over_gates(model: nn.Module) -> None:
    """Lets eprt choose experts where eprt runs them, the gate is plain, and `_routing_of` knows the choice.

    What vLLM records of a choice, it still records. Graphs that vLLM compiled for its own experts don't fit eprt's, as
    the model's VllmConfig says: they sum over ranks what eprt has summed, or have the product of a gate, which moves
    into vLLM's opaque op.
    """
    modules = list(model.modules())
    blocks = {id(runner): block for block in modules if (runner := getattr(block, "experts", None)) is not None}
    outside = [name for runner in modules if (name := _take_over(runner, blocks.get(id(runner))))]
    found_in = [bound_to(getattr(runner, "routed_experts", None)) for runner in modules]
    told = {LAYERS: [bound.binding.name for bound in found_in if bound]} | ({GATES: outside} if outside else {})
    configs = {id(found): found for module in modules if (found := getattr(module, "vllm_config", None)) is not None}
    for config in configs.values() if told[LAYERS] else ():
        config.additional_config = {**(config.additional_config or {}), **told}


def _take_over(runner: Any, block: nn.Module | None) -> str:
    """Returns the layer's name where its gate, which is eprt's now, was part of the compiled graph, else ""."""
    bound = unrouted(getattr(runner, "routed_experts", None))
    choice: Any = getattr(runner, "router", None)
    routing = _routing_of(choice)
    if bound is None or routing is None or choice.eplb_state is not None or getattr(runner, "_fse_fuse_gate", False):
        return ""
    inside = getattr(runner, "gate", None)
    gate = getattr(block, _CALL_GATE.get(type(block).__name__, ""), None) if inside is None else inside
    if gate is None:
        return ""
    padding, correction = padding_of(runner.routed_experts.quant_method), getattr(choice, _CORRECTION, None)
    choose = take_over(bound, gate, choice.top_k, routing, correction=correction, padding=padding)
    if choose is None:
        return ""
    choice._compute_routing = choose
    return "" if gate is inside else bound.binding.name


def _routing_of(choice: Any) -> Routing | None:
    """Returns how a router of vLLM's chooses: by a softmax over all experts, or by a sigmoid with a bias for the choice
    alone, in groups or not. None: in another way."""
    kind, scored = type(choice).__name__, getattr(choice, "scoring_func", None)
    if kind == "FusedTopKRouter" and scored == "softmax":
        return Routing("softmax_topk", renormalize=choice.renormalize)
    grouped = kind == "GroupedTopKRouter"
    if not (grouped or kind == "FusedTopKBiasRouter") or scored != "sigmoid" or getattr(choice, _CORRECTION) is None:
        return None
    others = ("num_fused_shared_experts", "_hash_indices_table", "bias_vl")
    if any(getattr(choice, name, None) not in (None, 0) for name in others):
        return None
    groups = (choice.num_expert_group, choice.topk_group) if grouped else (1, 1)
    return biased_sigmoid(choice.renormalize, groups, choice.routed_scaling_factor)


def padding_of(method: Any) -> Callable[[], torch.Tensor | None] | None:
    """Returns what finds the mask of tokens that nobody reads, which vLLM has since 0.32: its own routers leave them
    out, too. It marks no sequence-parallel layer's rows, and isn't kept up where vLLM's switch for it is off."""
    if method.moe.is_sequence_parallel or not marks_padding():
        return None
    from vllm.forward_context import get_forward_context

    def marked() -> torch.Tensor | None:
        return get_forward_context().is_padding

    return marked


def marks_padding() -> bool:
    """Returns whether vLLM has that mask, by which some of its routers give tokens the id -1."""
    if not getattr(sys.modules.get("vllm.envs"), "VLLM_MOE_SKIP_PADDING", True):
        return False
    from vllm.forward_context import ForwardContext

    return "is_padding" in ForwardContext.__dataclass_fields__

"""Has experts chosen where and as eprt needs it: in a model of SGLang's whose layers eprt runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from eprt.config import Routing
from eprt.integrations.engine.bound import bound_to
from eprt.integrations.engine.routing import biased_sigmoid, take_over, unrouted
from eprt.integrations.sglang.method import output_scale

# Blocks that give the logits of a gate of this name to their `topk` as they are, and both what the experts get.
_GATES = {
    "DeepseekV2MoE": "gate",
    "Glm4MoeLiteSparseMoeBlock": "gate",
    "Glm4MoeSparseMoeBlock": "gate",
    "GptOssSparseMoeBlock": "router",
    "MiniMaxM2MoE": "gate",
    "MixtralMoE": "gate",
    "OlmoeMoE": "gate",
    "Qwen2MoeSparseMoeBlock": "gate",
    "Qwen3MoeSparseMoeBlock": "gate",
}


def take_over_gates(model: nn.Module) -> None:
    """Lets eprt choose experts where eprt runs them, the gate is plain, and `_routing_of` knows the choice."""
    for block in model.modules():
        if (name := _GATES.get(type(block).__name__)) is not None:
            _take_over(block, getattr(block, name, None))


def _take_over(block: Any, gate: Any) -> None:
    experts: Any = getattr(block, "experts", None)
    choice: Any = getattr(getattr(block, "topk", None), "topk_config", None)
    bound = unrouted(experts)
    if bound is None or gate is None or choice is None or (routing := _routing_of(choice)) is None:
        return
    carried = bound.binding.expert_parallel
    if carried and choice.apply_routed_scaling_factor_on_output:
        return  # GLM-4.5's forward in 0.5.23 goes by that flag in each step
    scale = output_scale(experts, gate.weight.device, all_to_all=carried)
    routing = replace(routing, scaling_factor=routing.scaling_factor * scale)
    choose = take_over(bound, gate, choice.top_k, routing, correction=choice.correction_bias)
    if choose is None:
        return
    choice.custom_routing_function = choose
    choice.use_grouped_topk = choice.apply_routed_scaling_factor_on_output = False
    if scale != 1.0:
        experts.should_fuse_routed_scaling_factor_in_topk = True


def _routing_of(choice: Any) -> Routing | None:
    """Returns how SGLang's `TopK` chooses: by a softmax over all experts, or by a sigmoid with a bias for the choice
    alone, which in groups it always is. None: in another way."""
    shared = getattr(choice, "shared_experts", choice).num_fused_shared_experts  # the former since 0.5.23
    if choice.custom_routing_function is not None or shared > 0:
        return None
    scaled, biased = choice.apply_routed_scaling_factor_on_output, choice.correction_bias is not None
    if biased and (choice.use_grouped_topk or choice.scoring_func == "sigmoid"):
        groups = (choice.num_expert_group, choice.topk_group) if choice.use_grouped_topk else (1, 1)
        factor = choice.routed_scaling_factor if scaled else 1.0
        return biased_sigmoid(choice.renormalize, groups, factor)
    other = choice.use_grouped_topk or biased or scaled or choice.scoring_func != "softmax"
    return None if other else Routing("softmax_topk", choice.renormalize)


def ask_for_ids(model: nn.Module) -> None:
    """Has routers say ids and weights to eprt's layers, where SGLang's own experts would route by themselves."""
    modules: list[Any] = list(model.modules())
    ours = {module.layer_id for module in modules if bound_to(module) is not None}
    if not ours:
        return
    from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat

    for module in modules:
        if isinstance(module, TopK) and (module.layer_id is None or module.layer_id in ours):
            module.topk_config.output_format = TopKOutputFormat.STANDARD

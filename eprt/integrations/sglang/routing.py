"""Has experts chosen where and as eprt needs it: in a model of SGLang's whose layers eprt runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from eprt.integrations.engine.bound import bound_to
from eprt.integrations.engine.routing import take_over, unrouted

# Blocks that give the logits of a gate of this name to their `topk` as they are, and both what the experts get.
_GATES = {"Qwen3MoeSparseMoeBlock": "gate", "GptOssSparseMoeBlock": "router", "MixtralMoE": "gate", "OlmoeMoE": "gate"}


def take_over_gates(model: nn.Module) -> None:
    """Lets eprt choose experts where eprt runs them, the gate is plain, and the choice is a softmax without groups."""
    for block in model.modules():
        if (name := _GATES.get(type(block).__name__)) is not None:
            _take_over(block, getattr(block, name))


def _take_over(block: Any, gate: Any) -> None:
    if (bound := unrouted(block.experts)) is None:
        return
    choice = block.topk.topk_config
    shared = getattr(choice, "shared_experts", choice).num_fused_shared_experts  # the former since 0.5.23
    scaled = choice.apply_routed_scaling_factor_on_output or shared > 0
    biased = choice.correction_bias is not None or choice.custom_routing_function is not None
    if choice.use_grouped_topk or choice.scoring_func != "softmax" or scaled or biased:
        return
    choice.custom_routing_function = take_over(bound, gate, choice.top_k, renormalize=choice.renormalize)


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

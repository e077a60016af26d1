"""Router logits -> TopK in plain torch, on any device: the formulas of the models' own code (`eprt.routing` names it),
rounding included."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eprt.config import GROUP_BEST, Routing
from eprt.errors import ConfigError
from eprt.tokens import TopK

# DeepSeek's guard against a zero denominator when the chosen weights are normalised.
_EPSILON = 1e-20
# ERNIE 4.5's `moe_norm_min`: the least sum that its weights are divided by.
NORM_MIN = 1e-12


def route_torch(
    values: torch.Tensor,
    routing: Routing,
    top_k: int,
    correction_bias: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    token_table: torch.Tensor | None = None,
) -> TopK:
    """Computes `route` of checked arguments, in plain torch."""
    if routing.method == "softmax_topk":
        ids, weights = _softmax_topk(values, routing, top_k)
    elif routing.method in ("topk_softmax", "topk_sigmoid"):
        chosen, ids = torch.topk(values, top_k, dim=-1)
        softmax = routing.method == "topk_softmax"
        weights = torch.softmax(chosen, dim=-1) if softmax else torch.sigmoid(chosen.float()).to(values.dtype)
    elif routing.method in ("grouped_sigmoid", "grouped_softmax", "sqrt_softplus"):
        ids, weights = _biased_topk(values, routing, top_k, correction_bias)
    elif routing.method == "sparsemixer":
        ids, weights = _sparsemixer(values, routing)
    elif routing.method == "hash" and token_ids is not None and token_table is not None:
        ids = token_table[token_ids].long()
        weights = _normalized(F.softplus(values).sqrt().gather(1, ids), routing)
    else:
        raise ConfigError(f"routing method {routing.method!r} is unknown; see eprt.config.RoutingMethod")
    return TopK(ids.to(torch.int32), (weights * routing.scaling_factor).float())


def _softmax_topk(logits: torch.Tensor, routing: Routing, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    if routing.renormalize:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return ids, chosen.to(logits.dtype)


def _biased_topk(
    logits: torch.Tensor, routing: Routing, top_k: int, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses by scores and bias, within the best groups if there are groups. The scores alone become weights."""
    if routing.method == "sqrt_softplus":
        scores = F.softplus(logits).sqrt()
    elif routing.method == "grouped_sigmoid":
        scores = logits.float().sigmoid()
    else:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    for_choice = scores if correction_bias is None else scores + correction_bias
    if routing.num_groups > 1 and routing.method in GROUP_BEST:
        for_choice = _keep_best_groups(for_choice, routing)
    ids = torch.topk(for_choice, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if routing.method != "grouped_softmax":
        return ids, _normalized(weights, routing)
    return ids, weights / weights.sum(dim=-1, keepdim=True).clamp(min=NORM_MIN) if routing.renormalize else weights


def _sparsemixer(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses as https://arxiv.org/abs/2409.12136 does in inference: the best expert, then the best of the others, each
    weighed by a softmax of its own over the logits that come near it. In the logits' dtype, as the model computes."""
    best, first = logits.max(dim=-1, keepdim=True)
    first_weight = torch.softmax(_near(logits, logits, best, routing.jitter), dim=-1).gather(1, first)
    others = logits.scatter(1, first, float("-inf"))
    best, second = others.max(dim=-1, keepdim=True)
    second_weight = torch.softmax(_near(others, logits, best, routing.jitter), dim=-1).gather(1, second)
    return torch.cat((first, second), dim=-1), torch.cat((first_weight, second_weight), dim=-1)


def _near(values: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, jitter: float) -> torch.Tensor:
    """Returns `values`, -inf where the logit lies further from the best than the threshold."""
    far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
    return values.masked_fill(far, float("-inf"))


def _keep_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the scores, -inf outside the `topk_groups` best groups."""
    num_tokens, num_experts = scores.shape
    size, count = num_experts // routing.num_groups, GROUP_BEST[routing.method]
    grouped = scores.view(num_tokens, routing.num_groups, size)
    group_scores = grouped.topk(count, dim=-1).values.sum(dim=-1)
    best = torch.topk(group_scores, routing.topk_groups, dim=-1, sorted=False).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(dropped[:, :, None], float("-inf")).view(num_tokens, num_experts)


def _normalized(weights: torch.Tensor, routing: Routing) -> torch.Tensor:
    return weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON) if routing.renormalize else weights

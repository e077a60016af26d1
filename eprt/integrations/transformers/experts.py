"""Experts modules of transformers: where a model has them, what they compute, and their weights in canonical order.

Such a module is called with (hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) and holds stacked
matrices; whatever lies around it, the router included, is the model's own. How the matrices are laid out is said by
attributes that `transformers.integrations.moe.use_experts_implementation` sets.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from eprt.config import Activation, MoEConfig
from eprt.errors import UsageError
from eprt.experts.reference import activation_forward
from eprt.models.formats import split_alternating

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "top_k")

_ENCODER = re.compile(r"(?:[a-z_]+\.)*(?:vision|visual|audio)\w*\.")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the experts modules of a model's text part by their dotted paths, in model order.

    Those of image and audio encoders aren't among them: a forward without an image calls none of them.
    """
    return {path: m for path, m in model.named_modules() if _is_experts(m) and not _ENCODER.match(path)}


def _is_experts(module: nn.Module) -> bool:
    names = module._parameters
    if "down_proj" not in names or not ("gate_up_proj" in names or "up_proj" in names):
        return False
    return len(inspect.signature(type(module).forward).parameters) == 4  # self, hidden_states, top_k_index, weights


def parameter_names(experts: Any) -> list[str]:
    """Returns the names of first matrix and second one, then of their biases where there are any."""
    first = "gate_up_proj" if has_gate(experts) else "up_proj"
    return [first, "down_proj"] + ([f"{first}_bias", "down_proj_bias"] if has_bias(experts) else [])


def has_gate(experts: Any) -> bool:
    return bool(getattr(experts, "has_gate", "gate_up_proj" in experts._parameters))


def has_bias(experts: Any) -> bool:
    return bool(getattr(experts, "has_bias", False))


def canonical(experts: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns gate_up [L, 2I, H] and down [L, H, I], then their biases where there are any.

    Args:
        tensors: those of `parameter_names`, as the module lays them out.
    """
    found = list(tensors)
    if getattr(experts, "is_transposed", False):
        found[:2] = [matrix.transpose(1, 2) for matrix in found[:2]]
    if not getattr(experts, "is_concatenated", True):
        found[0::2] = [split_alternating(rows, dim=1) for rows in found[0::2]]
    return [tensor.contiguous() for tensor in found]


def config_of(experts: Any, down: torch.Tensor, num_experts: int, top_k: int, activation: Activation) -> MoEConfig:
    """Returns the maths of a layer of `num_experts`, of which some have the canonical `down` [L, H, I]."""
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=down.shape[1],
        intermediate_size=down.shape[2],
        activation=activation,
        bias=has_bias(experts),
        weight_format="f32" if down.dtype == torch.float32 else "bf16",
    )


def top_k_of(experts: Any, parent: nn.Module | None = None) -> int:
    """Returns how many experts a token visits, by the config's fields, else by the block's. Raises UsageError."""
    config = getattr(experts, "config", None) or getattr(parent, "config", None)
    around = [] if parent is None else list(parent.modules())
    for holder, names in [(config, _TOP_K), *((module, ("top_k",)) for module in around)]:
        for name in names:
            if type(value := getattr(holder, name, None)) is int:
                return value
    raise UsageError(
        f"{type(experts).__name__} doesn't say how many experts a token visits: call the model on all ranks once"
    )


def activation_of(experts: Any) -> Activation | None:
    """Finds the activation that equals the module's own function on sample values; None: no executor computes it."""
    if getattr(experts, "has_post_expert_norm", False):
        return None
    limit, alpha = (_first_float(experts, key, f"swiglu_{key}") for key in ("limit", "alpha"))
    # The model may be being made: on meta, in its own dtype.
    line = torch.linspace(-20.0, 20.0, 162, dtype=torch.float32, device="cpu")[None]
    grid = torch.cat((line, line.flip(1), 0.1 * line))
    candidates = [Activation("relu2")]
    if has_gate(experts):
        clamped = Activation(alpha=alpha or 1.0, beta=1.0, limit=limit)
        candidates = [Activation(), Activation(limit=limit), clamped, Activation("geglu")]
    with torch.device("cpu"), torch.no_grad():
        expected = _activated(experts, grid)
        for candidate in candidates:
            if torch.allclose(activation_forward(candidate, grid), expected, rtol=1e-4, atol=1e-5):
                return candidate
    return None


def _activated(experts: Any, grid: torch.Tensor) -> torch.Tensor:
    if not has_gate(experts):
        return experts.act_fn(grid)
    if not hasattr(experts, "_apply_gate"):
        gate, up = grid.chunk(2, dim=1)
        return experts.act_fn(gate) * up
    alternating = not getattr(experts, "is_concatenated", True)
    return experts._apply_gate(torch.stack(grid.chunk(2, dim=1), dim=2).flatten(1) if alternating else grid)


def _first_float(module: Any, *names: str) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)), None)


def leave_out(model: nn.Module, directory: Path) -> list[str]:
    """Takes the weights from the experts modules of a model on meta, which is about to be loaded; returns their paths.

    Each has `eprt_left_out` then: the `directory` where `spread` finds the weights, and the parameters, on meta.
    """
    found = find_experts(model)
    for path, module in found.items():
        shapes = {name: module._parameters[name] for name in parameter_names(module)}
        module.__dict__["eprt_left_out"] = directory, shapes
        module._parameters.update(dict.fromkeys(shapes))
        for touched in (module, model.get_submodule(path.rpartition(".")[0])):  # a block may initialise its experts
            touched.__dict__["_is_hf_initialized"] = True
        module.__dict__["forward"] = refuse_to_run
    return list(found)


def refuse_to_run(*_: Any, **__: Any) -> NoReturn:
    """Raises UsageError."""
    raise UsageError("the model was loaded without its experts: call parallelize(model, world) before the first batch")

"""vLLM's expert parameters, as loaded, in eprt's canonical order. Knows names and layouts, imports no vLLM.

Names and shapes are those of `create_weights` in vLLM 0.26 and 0.32 (`fused_moe/unquantized_fused_moe_method.py`,
`quantization/fp8.py`, `mxfp4.py`, `modelopt.py`): `w13_*` stacks w1 (gate) over w3 (up), `w2_*` is down. Only gpt-oss
(`swigluoai`) keeps the rows of its checkpoint there, which alternate gate, up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from eprt.config import Activation, WeightFormat
from eprt.errors import CheckpointError
from eprt.models.formats import split_alternating
from eprt.weights import FP8_BLOCK, Dense, ExpertWeights, Fp8Block, Fp8Tensor, Matrix, Mxfp4, Nvfp4

INTERLEAVED = "swigluoai"

Parameters = Mapping[str, torch.Tensor]


class FallsBackToVllm(Exception):
    """Raised for a layer that eprt doesn't run; the text is the reason for the log."""


@dataclass(frozen=True)
class ParameterLayout:
    """Describes how one of vLLM's quantisation methods keeps its experts.

    Attributes:
        weight_format: (method, dtype of unquantised parameters) -> number format. Raises FallsBackToVllm.
        matrices: parameters -> (gate_up, down), rows still in vLLM's order.
        unset: parameters that a checkpoint may lack without vLLM noticing: NaN before loading, checked after.
    """

    weight_format: Callable[[Any, torch.dtype], WeightFormat]
    matrices: Callable[[Parameters], tuple[Matrix, Matrix]]
    unset: tuple[str, ...] = ()


def layout_of(method: object) -> ParameterLayout:
    """Finds the layout by the exact name of the method's class. Raises FallsBackToVllm."""
    name = type(method).__name__
    if name not in LAYOUTS:
        raise FallsBackToVllm(f"experts kept by {name}: eprt reads {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def activation_of(layer: Any) -> Activation:
    """Returns the activation of a RoutedExperts (`fused_moe/activation.py`). Raises FallsBackToVllm."""
    name: str = layer.activation.value
    alpha, beta, limit = (getattr(layer, f"swiglu_{key}", None) for key in ("alpha", "beta", "limit"))
    if name == "silu":
        return Activation(limit=limit)
    if name == INTERLEAVED:  # its kernel has these numbers built in; the model may repeat them
        return Activation(alpha=alpha or 1.702, beta=1.0 if beta is None else beta, limit=limit or 7.0)
    if name == "swigluoai_uninterleave" and limit is not None:
        return Activation(alpha=1.0 if alpha is None else alpha, beta=beta or 0.0, limit=limit)
    if name == "relu2_no_mul":
        return Activation("relu2")
    raise FallsBackToVllm(f"activation {name}")


def expert_weights(layout: ParameterLayout, parameters: Parameters, *, interleaved: bool) -> ExpertWeights:
    """Returns views of the parameters where their order is eprt's, copies of w13 where its rows alternate.

    Raises:
        CheckpointError: a scale that the checkpoint should have had.
    """
    for name in layout.unset:
        _require_loaded(name, parameters)
    up, down = layout.matrices(parameters)
    bias = parameters.get("w13_bias")
    if interleaved:
        up, bias = up.map(partial(split_alternating, dim=1)), None if bias is None else split_alternating(bias, dim=1)
    return ExpertWeights(up, down, bias, parameters.get("w2_bias"))


def mark_unset(layout: ParameterLayout, parameters: Parameters) -> None:
    """Fills parameters with NaN before loading: values that stay NaN were in no file."""
    for name in layout.unset:
        if name in parameters:
            parameters[name].data.fill_(float("nan"))


def _require_loaded(name: str, parameters: Parameters) -> None:
    values = parameters.get(name)
    if values is None or not bool((missing := values.isnan()).any()):
        return
    if name.endswith("input_scale") and bool(missing.all()):
        return  # a weight-only checkpoint: `_input_scale` reads it as none
    raise CheckpointError(
        f"{name}: {int(missing.sum())} of {values.numel()} values were in no file; is the checkpoint complete?"
    )


def _plain(_: Any, dtype: torch.dtype) -> WeightFormat:
    names: dict[torch.dtype, WeightFormat] = {torch.bfloat16: "bf16", torch.float32: "f32"}
    if dtype not in names:
        raise FallsBackToVllm(f"experts in {dtype}: eprt computes with bfloat16 or float32")
    return names[dtype]


def _dense(p: Parameters) -> tuple[Matrix, Matrix]:
    return Dense(p["w13_weight"]), Dense(p["w2_weight"])


def _fp8(method: Any, _: torch.dtype) -> WeightFormat:
    block = method.weight_block_size
    if block is None:
        return "fp8_tensor"
    if list(block) != [FP8_BLOCK, FP8_BLOCK] or getattr(method, "weight_scale_refine", None) is not None:
        raise FallsBackToVllm(f"FP8 scales of blocks {block}: eprt reads {FP8_BLOCK} x {FP8_BLOCK}")
    return "fp8_block"


def _fp8_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    if "w13_weight_scale_inv" in p:
        up = Fp8Block(p["w13_weight"], p["w13_weight_scale_inv"])
        return up, Fp8Block(p["w2_weight"], p["w2_weight_scale_inv"])
    scale = p["w13_weight_scale"]  # [L, parts]; vLLM keeps one input scale an expert for both halves
    up = Fp8Tensor(p["w13_weight"], scale, _input_scale(p, "w13_input_scale", scale.shape[1]))
    return up, Fp8Tensor(p["w2_weight"], p["w2_weight_scale"][:, None], _input_scale(p, "w2_input_scale", 1))


def _mxfp4_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    return Mxfp4(p["w13_weight"], p["w13_weight_scale"]), Mxfp4(p["w2_weight"], p["w2_weight_scale"])


def _nvfp4(method: Any, _: torch.dtype) -> WeightFormat:
    if (group := method.quant_config.group_size) != 16:
        raise FallsBackToVllm(f"FP4 with a scale for {group} elements: eprt reads 16")
    return "nvfp4"


def _nvfp4_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    scale = p["w13_weight_scale_2"]
    up = Nvfp4(p["w13_weight"], p["w13_weight_scale"], scale, _input_scale(p, "w13_input_scale", scale.shape[1]))
    down_scale = p["w2_weight_scale_2"][:, None]
    return up, Nvfp4(p["w2_weight"], p["w2_weight_scale"], down_scale, _input_scale(p, "w2_input_scale", 1))


def _input_scale(p: Parameters, name: str, parts: int) -> torch.Tensor | None:
    """Returns [L, parts], or None where the checkpoint has none."""
    found = p.get(name)
    if found is None or bool(found.isnan().all()):
        return None
    return found[:, None].expand(-1, parts).contiguous() if found.dim() == 1 else found


def _constant(name: WeightFormat) -> Callable[[Any, torch.dtype], WeightFormat]:
    return lambda method, dtype: name


_INPUT_SCALES = ("w13_input_scale", "w2_input_scale")

LAYOUTS: dict[str, ParameterLayout] = {
    "UnquantizedFusedMoEMethod": ParameterLayout(_plain, _dense),
    "Fp8MoEMethod": ParameterLayout(_fp8, _fp8_matrices),
    "GptOssMxfp4MoEMethod": ParameterLayout(_constant("mxfp4"), _mxfp4_matrices),
    "Mxfp4MoEMethod": ParameterLayout(_constant("mxfp4"), _mxfp4_matrices),
    "ModelOptNvFp4FusedMoE": ParameterLayout(
        _nvfp4, _nvfp4_matrices, ("w13_weight_scale_2", "w2_weight_scale_2", *_INPUT_SCALES)
    ),
}

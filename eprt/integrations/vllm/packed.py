"""What vLLM's methods for compressed-tensors, GPTQ and AWQ checkpoints keep, before it lays it out for its kernels.

Names and shapes are those of `create_weights` in vLLM 0.26 and 0.32 (`quantization/compressed_tensors/`,
`auto_gptq.py`, `auto_awq.py`). 0.26 keeps compressed-tensors' INT4 with the inputs first, 0.32 with the outputs first.
"""

from __future__ import annotations

from typing import Any

import torch

from eprt.config import WeightFormat
from eprt.errors import CheckpointError
from eprt.integrations.engine.parameters import (
    INPUT_SCALES,
    FallsBackToEngine,
    ParameterLayout,
    Parameters,
    fp8,
    input_scale,
)
from eprt.quant.packing import AWQ_ORDER, codes_along_columns, codes_along_rows, rows_of_words
from eprt.weights import INT4_GROUPS, Fp8Block, Fp8Channel, Fp8Tensor, Int4, Matrix, Nvfp4

_SCALES = ("w13_weight_scale", "w2_weight_scale")
_GLOBAL_SCALES = ("w13_weight_global_scale", "w2_weight_global_scale")
_INPUT_GLOBAL_SCALES = ("w13_input_global_scale", "w2_input_global_scale")


def _require_int4(method: Any, bits: int, group: int | None) -> WeightFormat:
    if bits != 4:
        raise FallsBackToEngine(f"INT{bits} experts: eprt reads INT4")
    group = -1 if group is None else group
    if group not in (-1, *INT4_GROUPS):
        raise FallsBackToEngine(f"INT4 with a scale for {group} inputs: eprt reads {INT4_GROUPS} or the whole row")
    part = getattr(getattr(method, "moe", None), "intermediate_size_per_partition", 0)
    if group > 0 and part % group:
        raise FallsBackToEngine(f"{part} of the experts' rows are left to a rank, which cuts a scale of {group} (int4)")
    return "int4"


# ---- compressed-tensors ---------------------------------------------------------------------------------------------


def _wna16(method: Any, _: torch.dtype) -> WeightFormat:
    weights = method.weight_quant
    if str(getattr(weights, "actorder", None)).endswith("group"):
        raise FallsBackToEngine("INT4 with columns in activation order (actorder group)")
    return _require_int4(method, weights.num_bits, weights.group_size)


def _wna16_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    up, down = p["w13_weight_packed"], p["w2_weight_packed"]
    inputs_first = down.shape[2] == 8 * up.shape[1]  # [L, I/8, H] beside [L, H/8, 2I]

    def matrix(name: str) -> Int4:
        words, scales, zeros = (p.get(f"{name}_weight_{end}") for end in ("packed", "scale", "zero_point"))
        if words is None or scales is None:
            raise CheckpointError(f"{name}_weight_packed or its scale is missing")
        if inputs_first:
            words, scales, zeros = words.mT, scales.mT.contiguous(), None if zeros is None else zeros.mT
        return Int4(codes_along_columns(words), scales, None if zeros is None else rows_of_words(zeros))

    return matrix("w13"), matrix("w2")


def _w8a8_fp8(method: Any, _: torch.dtype) -> WeightFormat:
    strategy = method.weight_quant.strategy
    if getattr(strategy, "value", strategy) == "channel":
        return "fp8_channel"
    return fp8(getattr(method, "weight_block_size", None))


def _w8a8_fp8_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    data, scale = (p["w13_weight"], p["w2_weight"]), (p["w13_weight_scale"], p["w2_weight_scale"])
    if scale[0].dim() == 2:
        halves = scale[0].shape[1]
        up = Fp8Tensor(data[0], scale[0], input_scale(p, "w13_input_scale", halves))
        return up, Fp8Tensor(data[1], scale[1][:, None], input_scale(p, "w2_input_scale", 1))
    if scale[0].shape[1:] == (data[0].shape[1], 1):
        return Fp8Channel(data[0], scale[0][..., 0].contiguous()), Fp8Channel(data[1], scale[1][..., 0].contiguous())
    return Fp8Block(data[0], scale[0]), Fp8Block(data[1], scale[1])


def _nvfp4(*_: Any) -> WeightFormat:
    return "nvfp4"


def _nvfp4_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    """Second scales and input scales are stored as what numbers were multiplied by."""
    factors = {name: 1 / p[name] for name in (*_GLOBAL_SCALES, *_INPUT_GLOBAL_SCALES) if name in p}
    up_scale, down_scale = (factors[name] for name in _GLOBAL_SCALES)
    up_input = input_scale(factors, "w13_input_global_scale", up_scale.shape[1])
    up = Nvfp4(p["w13_weight_packed"], p["w13_weight_scale"], up_scale, up_input)
    down_input = input_scale(factors, "w2_input_global_scale", 1)
    return up, Nvfp4(p["w2_weight_packed"], p["w2_weight_scale"], down_scale[:, None], down_input)


# ---- GPTQ and AWQ ---------------------------------------------------------------------------------------------------


def _gptq(method: Any, _: torch.dtype) -> WeightFormat:
    config = method.quant_config
    if not config.is_sym:
        raise FallsBackToEngine("GPTQ with zero points of its own: eprt reads symmetric ones from vLLM")
    if config.desc_act:
        raise FallsBackToEngine("GPTQ with columns in activation order (desc_act)")
    return _require_int4(method, config.quant_type.size_bits, config.group_size)


def _gptq_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    up, down = (
        Int4(codes_along_columns(p[f"{name}_qweight"].mT), p[f"{name}_scales"].mT.contiguous())
        for name in ("w13", "w2")
    )
    return up, down


def _awq(method: Any, _: torch.dtype) -> WeightFormat:
    config = method.quant_config
    if not config.zero_point:
        raise FallsBackToEngine("AWQ without zero points")
    return _require_int4(method, config.weight_bits, config.group_size)


def _awq_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    def matrix(name: str) -> Int4:
        words, scales, zeros = (p[f"{name}_{end}"].mT for end in ("qweight", "scales", "qzeros"))
        return Int4(codes_along_rows(words, AWQ_ORDER), scales.contiguous(), rows_of_words(zeros, AWQ_ORDER))

    return matrix("w13"), matrix("w2")


_WNA16 = ParameterLayout(_wna16, _wna16_matrices, _SCALES)
LAYOUTS: dict[str, ParameterLayout] = {
    "CompressedTensorsWNA16MoEMethod": _WNA16,
    "CompressedTensorsWNA16MarlinMoEMethod": _WNA16,
    "CompressedTensorsW8A8Fp8MoEMethod": ParameterLayout(_w8a8_fp8, _w8a8_fp8_matrices, (*_SCALES, *INPUT_SCALES)),
    "CompressedTensorsW4A4Nvfp4MoEMethod": ParameterLayout(
        _nvfp4, _nvfp4_matrices, (*_GLOBAL_SCALES, *_INPUT_GLOBAL_SCALES)
    ),
    "AutoGPTQMoEMethod": ParameterLayout(_gptq, _gptq_matrices, ("w13_scales", "w2_scales"), spare_biases=True),
    "AutoAWQMoEMethod": ParameterLayout(_awq, _awq_matrices, ("w13_scales", "w2_scales"), spare_biases=True),
}
# Constructors that look for a kernel: modules below `quantization`, and the names that they call.
SELECTORS = tuple(
    (f"quantization.{path}", f"select_{name}_moe_backend")
    for path, name in (
        ("compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16", "wna16"),
        ("compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8", "fp8"),
        ("compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4", "nvfp4"),
        ("auto_gptq", "wna16"),
        ("auto_awq", "wna16"),
    )
)

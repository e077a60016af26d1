"""Reads what engines keep of compressed-tensors, GPTQ and AWQ checkpoints, before they lay it out for their kernels.

Names and shapes are those of `create_weights` in vLLM 0.26 and 0.32 (`quantization/compressed_tensors/`,
`auto_gptq.py`, `auto_awq.py`) and in SGLang 0.5.17 (`quantization/compressed_tensors/schemes/`, `gptq/schemes/`,
`awq/schemes/`). SGLang and vLLM 0.26 keep compressed-tensors' INT4 with the inputs first, vLLM 0.32 with the outputs
first; SGLang keeps GPTQ's scales in float16 whatever the tokens are.
"""

from __future__ import annotations

from typing import Any

import torch

from eprt.config import WeightFormat
from eprt.errors import CheckpointError
from eprt.integrations.engine import parameters
from eprt.integrations.engine.parameters import INPUT_SCALES, FallsBackToEngine, ParameterLayout, Parameters
from eprt.quant.elements import (
    AWQ_ORDER,
    COLUMNS_AS_THEY_ARE,
    codes_along_columns,
    codes_along_rows,
    exact_scales,
    rows_of_words,
)
from eprt.weights import INT4_GROUPS, Fp8Block, Fp8Channel, Int4, Matrix


def int4(bits: int, group: int | None, part: int) -> WeightFormat:
    """Returns the number format of integers with a scale for `group` inputs, or one a row (None, -1).

    Args:
        part: intermediate size that is left to a rank.

    Raises:
        FallsBackToEngine: other widths or groups than eprt reads, or a group that the ranks' parts cut.
    """
    if bits != 4:
        raise FallsBackToEngine(f"INT{bits} experts: eprt reads INT4")
    group = -1 if group is None else group
    if group not in (-1, *INT4_GROUPS):
        raise FallsBackToEngine(f"INT4 with a scale for {group} inputs: eprt reads {INT4_GROUPS} or the whole row")
    if group > 0 and part % group:
        raise FallsBackToEngine(f"{part} of the experts' rows are left to a rank, which cuts a scale of {group} (int4)")
    return "int4"


# ---- compressed-tensors ---------------------------------------------------------------------------------------------


def wna16(keeper: Any, part: int, _: torch.dtype) -> WeightFormat:
    weights = getattr(keeper, "weight_quant", keeper)  # SGLang's scheme has the settings itself
    if (order := getattr(weights, "actorder", None)) not in COLUMNS_AS_THEY_ARE:
        raise FallsBackToEngine(f"INT4 with columns in activation order (actorder {order})")
    return int4(weights.num_bits, weights.group_size, part)


def wna16_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    up, down = p["w13_weight_packed"], p["w2_weight_packed"]
    inputs_first = down.shape[2] == 8 * up.shape[1]  # [L, I/8, H] beside [L, H/8, 2I]

    def matrix(name: str) -> Int4:
        words, scales, zeros = (p.get(f"{name}_weight_{end}") for end in ("packed", "scale", "zero_point"))
        if words is None or scales is None:
            raise CheckpointError(f"{name}_weight_packed or its scale is missing")
        if inputs_first:
            words, scales, zeros = words.mT, scales.mT.contiguous(), None if zeros is None else zeros.mT
        return Int4(codes_along_columns(words), exact_scales(scales), None if zeros is None else rows_of_words(zeros))

    return matrix("w13"), matrix("w2")


def w8a8_fp8(keeper: Any, *_: Any) -> WeightFormat:
    strategy = keeper.weight_quant.strategy
    if getattr(strategy, "value", strategy) == "channel":
        return "fp8_channel"
    return parameters.fp8(getattr(keeper, "weight_block_size", None))


def w8a8_fp8_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    data, scales = (p["w13_weight"], p["w2_weight"]), (p["w13_weight_scale"], p["w2_weight_scale"])
    if scales[0].dim() == 2:
        return parameters.fp8_matrices(p)
    if scales[0].shape[1:] != (data[0].shape[1], 1):
        return Fp8Block(data[0], scales[0]), Fp8Block(data[1], scales[1])
    return Fp8Channel(data[0], scales[0][..., 0].contiguous()), Fp8Channel(data[1], scales[1][..., 0].contiguous())


_MODELOPT = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}


def nvfp4(*_: Any) -> WeightFormat:
    return "nvfp4"


def nvfp4_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    """Second scales and input scales are stored as what numbers were multiplied by."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in p.items():
        matrix, _, kind = name.partition("_")
        found[f"{matrix}_{_MODELOPT.get(kind, kind)}"] = 1 / tensor if "global_scale" in kind else tensor
    return parameters.nvfp4_matrices(found)


# ---- GPTQ and AWQ ---------------------------------------------------------------------------------------------------


def gptq(keeper: Any, part: int, _: torch.dtype) -> WeightFormat:
    config = keeper.quant_config
    if not config.is_sym:
        raise FallsBackToEngine("GPTQ with zero points of its own: eprt reads symmetric ones from an engine")
    if config.desc_act:
        raise FallsBackToEngine("GPTQ with columns in activation order (desc_act)")
    return int4(config.quant_type.size_bits, config.group_size, part)


def gptq_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    up, down = (
        Int4(codes_along_columns(p[f"{name}_qweight"].mT), exact_scales(p[f"{name}_scales"].mT.contiguous()))
        for name in ("w13", "w2")
    )
    return up, down


def awq(keeper: Any, part: int, _: torch.dtype) -> WeightFormat:
    config = keeper.quant_config
    if not config.zero_point:
        raise FallsBackToEngine("AWQ without zero points")
    return int4(config.weight_bits, config.group_size, part)


def awq_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    def matrix(name: str) -> Int4:
        words, scales, zeros = (p[f"{name}_{end}"].mT for end in ("qweight", "scales", "qzeros"))
        codes, zeros = codes_along_rows(words, AWQ_ORDER), rows_of_words(zeros, AWQ_ORDER)
        return Int4(codes, exact_scales(scales.contiguous()), zeros)

    return matrix("w13"), matrix("w2")


# Parameters that a checkpoint may lack without an engine noticing.
_SCALES = ("w13_weight_scale", "w2_weight_scale")
_NVFP4_SCALES = tuple(f"{name}_{kind}_global_scale" for kind in ("weight", "input") for name in ("w13", "w2"))
_WORD_SCALES = ("w13_scales", "w2_scales")
WNA16 = ParameterLayout(wna16, wna16_matrices, _SCALES)
W8A8_FP8 = ParameterLayout(w8a8_fp8, w8a8_fp8_matrices, (*_SCALES, *INPUT_SCALES))
NVFP4 = ParameterLayout(nvfp4, nvfp4_matrices, _NVFP4_SCALES)
GPTQ = ParameterLayout(gptq, gptq_matrices, _WORD_SCALES, spare_biases=True)
AWQ = ParameterLayout(awq, awq_matrices, _WORD_SCALES, spare_biases=True)

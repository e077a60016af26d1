"""Expert parameters as engines load them, in eprt's canonical order. Knows layouts, imports no engine.

vLLM and SGLang keep them alike: `w13_*` stacks w1 (gate) over w3 (up), `w2_*` is down; gpt-oss keeps the rows of its
checkpoint, which alternate gate, up. Names of methods and of single parameters are in the engines' own folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from eprt.config import WeightFormat
from eprt.errors import CheckpointError
from eprt.models.formats import split_alternating
from eprt.quant import encode
from eprt.weights import FP8_BLOCK, Dense, ExpertWeights, Fp8Block, Fp8Tensor, Matrix, Mxfp4, Nvfp4

Parameters = Mapping[str, torch.Tensor]
INPUT_SCALES = ("w13_input_scale", "w2_input_scale")


class FallsBackToEngine(Exception):
    """Raised for a layer that eprt doesn't run; the text is the reason for the log."""


@dataclass(frozen=True)
class ParameterLayout:
    """Describes how one of an engine's quantisation methods keeps its experts.

    Attributes:
        weight_format: (method, or the scheme that it asks; intermediate size that is left to a rank; dtype of
            unquantised parameters) -> number format. Raises FallsBackToEngine.
        matrices: parameters -> (gate_up, down), rows still in the engine's order.
        unset: parameters that a checkpoint may lack without the engine noticing: NaN before loading, checked after.
        spare_biases: biases are declared for every model; those that stay zero are none.
        online: the number format that plain parameters are brought to when they were loaded.
    """

    weight_format: Callable[[Any, int, torch.dtype], WeightFormat]
    matrices: Callable[[Parameters], tuple[Matrix, Matrix]]
    unset: tuple[str, ...] = ()
    spare_biases: bool = False
    online: WeightFormat | None = None


def layout_in(layouts: Mapping[str, ParameterLayout], method: object) -> ParameterLayout:
    """Finds the layout by the exact name of the method's class. Raises FallsBackToEngine."""
    name = type(method).__name__
    if name not in layouts:
        raise FallsBackToEngine(f"experts kept by {name}: eprt reads {', '.join(layouts)}")
    return layouts[name]


def expert_weights(
    layout: ParameterLayout, parameters: Parameters, *, interleaved: bool, again: bool = False
) -> ExpertWeights:
    """Returns views of the parameters where their order is eprt's, copies of w13 where its rows alternate.

    Args:
        again: they were freed since they were loaded at first.

    Raises:
        CheckpointError: a scale that the checkpoint should have had, or what `_require_numbers` refuses.
    """
    for name in layout.unset:
        _require_loaded(name, parameters)
    up, down = layout.matrices(parameters)
    given = (parameters.get(f"{name}_bias") for name in ("w13", "w2"))
    bias, down_bias = (None if b is None or (layout.spare_biases and not b.any()) else b for b in given)
    for name, matrix, own_bias in (("w13", up, bias), ("w2", down, down_bias)) if again else ():
        _require_numbers(name, matrix.tensors() | ({} if own_bias is None else {"bias": own_bias}))
    if interleaved:
        up, bias = up.map(partial(split_alternating, dim=1)), None if bias is None else split_alternating(bias, dim=1)
    if layout.online is not None and isinstance(up, Dense) and isinstance(down, Dense):
        parts = up.data.shape[1] // down.data.shape[2]
        up, down = _encoded(layout.online, up.data, parts), _encoded(layout.online, down.data, 1)
    return ExpertWeights(up, down, bias, down_bias)


def _encoded(format: WeightFormat, dense: torch.Tensor, parts: int) -> Matrix:
    """Encodes [L, rows, cols] an expert at a time: on the way float32 copies of it are made."""
    encoded = (encode(format, one, parts) for one in dense.split(1))
    first = next(encoded)
    whole = first.map(lambda tensor: tensor.new_empty(len(dense), *tensor.shape[1:]))
    for number, one in enumerate(chain([first], encoded)):
        for name, tensor in one.tensors().items():
            whole.tensors()[name][number] = tensor[0]
    return whole


def mark_unset(layout: ParameterLayout, parameters: Parameters) -> None:
    """Fills parameters with NaN before loading: values that stay NaN were in no file."""
    for name in layout.unset:
        if name in parameters:
            parameters[name].data.fill_(float("nan"))


def _require_numbers(matrix: str, tensors: Parameters) -> None:
    """Checks a matrix's new numbers for NaN: what an update left out of parameters that were freed, or sent as a change
    of what they held (trainers that send changes have NaN where nothing changed). Raises CheckpointError."""
    for name, values in tensors.items():
        checked = values.is_floating_point() and values.itemsize > 1 and values.numel() > 0
        if checked and bool(values.amax().isnan()):  # makes no mask as large as the weights
            raise CheckpointError(
                f"{name} of {matrix}: some of its new values are NaN; eprt frees an engine's parameters, so an update "
                "that leaves values out, or sends changes alone, has nothing to add them to: send whole experts"
            )


def _require_loaded(name: str, parameters: Parameters) -> None:
    values = parameters.get(name)
    if values is None or name.endswith(("input_scale", "input_global_scale")):  # `input_scale` reads what is missing
        return
    if not bool((missing := values.isnan()).any()):
        return
    raise CheckpointError(
        f"{name}: {int(missing.sum())} of {values.numel()} values were in no file; is the checkpoint complete?"
    )


def plain(_: Any, __: int, dtype: torch.dtype) -> WeightFormat:
    """Returns the number format of unquantised experts."""
    names: dict[torch.dtype, WeightFormat] = {torch.bfloat16: "bf16", torch.float32: "f32"}
    if dtype not in names:
        raise FallsBackToEngine(f"experts in {dtype}: eprt computes with bfloat16 or float32")
    return names[dtype]


def online(format: WeightFormat) -> ParameterLayout:
    """Returns the layout of a method that loads plain experts and quantises them (`--quantization fp8`)."""

    def weight_format(*_: Any) -> WeightFormat:
        return format

    return ParameterLayout(weight_format, dense_matrices, online=format)


def dense_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    return Dense(p["w13_weight"]), Dense(p["w2_weight"])


def fp8(block: Any, refined: Any = None) -> WeightFormat:
    """Returns the number format of FP8 experts whose scales are for `block` (rows, columns), or one a tensor (None)."""
    if block is None:
        return "fp8_tensor"
    if list(block) != [FP8_BLOCK, FP8_BLOCK] or refined is not None:
        raise FallsBackToEngine(f"FP8 scales of blocks {block}: eprt reads {FP8_BLOCK} x {FP8_BLOCK}")
    return "fp8_block"


def modelopt_fp8(method: Any, *_: Any) -> WeightFormat:
    """Returns the number format of a ModelOpt method's FP8 experts. Raises FallsBackToEngine."""
    config = method.quant_config
    if (algorithm := getattr(config, "quant_method", "FP8")) != "FP8":  # SGLang's has one alone
        raise FallsBackToEngine(f"ModelOpt's {algorithm}: eprt reads FP8 with one scale a tensor")
    if not config.is_checkpoint_fp8_serialized:
        raise FallsBackToEngine("experts that the engine quantises to FP8 itself")
    return "fp8_tensor"


def fp8_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    if "w13_weight_scale_inv" in p:
        up = Fp8Block(p["w13_weight"], p["w13_weight_scale_inv"])
        return up, Fp8Block(p["w2_weight"], p["w2_weight_scale_inv"])
    scale = p["w13_weight_scale"]  # [L, parts]; engines keep one input scale an expert for both halves
    up = Fp8Tensor(p["w13_weight"], scale, input_scale(p, "w13_input_scale", scale.shape[1]))
    return up, Fp8Tensor(p["w2_weight"], p["w2_weight_scale"][:, None], input_scale(p, "w2_input_scale", 1))


def mxfp4(*_: Any) -> WeightFormat:
    return "mxfp4"


def mxfp4_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    return Mxfp4(p["w13_weight"], p["w13_weight_scale"]), Mxfp4(p["w2_weight"], p["w2_weight_scale"])


def nvfp4(method: Any, *_: Any) -> WeightFormat:
    """Returns the number format of a ModelOpt method's FP4 experts."""
    if (group := method.quant_config.group_size) != 16:
        raise FallsBackToEngine(f"FP4 with a scale for {group} elements: eprt reads 16")
    return "nvfp4"


def nvfp4_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    scale = p["w13_weight_scale_2"]
    up = Nvfp4(p["w13_weight"], p["w13_weight_scale"], scale, input_scale(p, "w13_input_scale", scale.shape[1]))
    down_scale = p["w2_weight_scale_2"][:, None]
    return up, Nvfp4(p["w2_weight"], p["w2_weight_scale"], down_scale, input_scale(p, "w2_input_scale", 1))


def input_scale(p: Parameters, name: str, parts: int) -> torch.Tensor | None:
    """Returns [L, parts], or None where the checkpoint has none: of an expert that calibration never met, for one."""
    found = p.get(name)
    if found is None or bool(found.isnan().any()):
        return None
    return found[:, None].expand(-1, parts).contiguous() if found.dim() == 1 else found


# What every engine's methods for these formats keep.
DENSE = ParameterLayout(plain, dense_matrices)
MODELOPT_FP8 = ParameterLayout(modelopt_fp8, fp8_matrices, ("w13_weight_scale", "w2_weight_scale", *INPUT_SCALES))
MXFP4 = ParameterLayout(mxfp4, mxfp4_matrices)
NVFP4 = ParameterLayout(nvfp4, nvfp4_matrices, ("w13_weight_scale_2", "w2_weight_scale_2", *INPUT_SCALES))

"""Tiny models whose experts are packed as published checkpoints pack them; what the packed numbers are is known without
eprt's decoders.

Published examples: nvidia/Qwen3-30B-A3B-NVFP4, nvidia/DeepSeek-R1-0528-NVFP4 (`weight`, `weight_scale`,
`weight_scale_2`, `input_scale`), deepseek-ai/DeepSeek-V4-Flash (`weight`, `scale`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eprt.models import load_layer
from eprt.models.checkpoint import CONFIG, SINGLE
from support.cases import packed_int4
from support.cases.model_recipes import RECIPES, Recipe, make_model
from support.cases.number_formats import e2m1_numbers, e8m0_numbers, mxfp4_numbers
from support.cases.packed_int4 import Made
from support.jobs.checkpoint_jobs import Written

# ---- one matrix -----------------------------------------------------------------------------------------------


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def e4m3(rows: int, cols: int, *more: int) -> torch.Tensor:
    """Finite numbers of any size and both signs but zero."""
    codes = random_bytes(rows, cols, *more, high=126) + 1
    return (codes + 128 * random_bytes(rows, cols, *more, high=2)).view(torch.float8_e4m3fn)


def _nvfp4(rows: int, cols: int) -> Made:
    codes, scale = random_bytes(rows, cols // 2), torch.rand(rows, cols // 16).add(0.5).to(torch.float8_e4m3fn)
    second, input_scale = (torch.rand(()) + 0.5) * cols**-0.5 / 3, torch.rand(()) / 100 + 0.01
    stored = {"weight": codes, "weight_scale": scale, "weight_scale_2": second, "input_scale": input_scale}
    return stored, e2m1_numbers(codes) * scale.float().repeat_interleave(16, dim=1) * second


def _fp8(rows: int, cols: int) -> tuple[torch.Tensor, float]:
    """Codes of numbers that a scale of about the second result brings to the size of weights."""
    return torch.randn(rows, cols).mul(40).to(torch.float8_e4m3fn), cols**-0.5 / 40


def _fp8_tensor(rows: int, cols: int) -> Made:
    data, size = _fp8(rows, cols)
    scale = (torch.rand(()) + 0.5) * size
    return {"weight": data, "weight_scale": scale, "input_scale": torch.rand(()) / 10 + 0.1}, data.float() * scale


def _fp8_block(rows: int, cols: int) -> Made:
    data, size = _fp8(rows, cols)
    scale = (torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5) * size
    return {"weight": data, "weight_scale_inv": scale}, data.float() * _over_blocks(scale, rows, cols)


def _float_block(rows: int, cols: int) -> Made:
    stored, numbers = _fp8_block(rows, cols)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, numbers


def _fp8_pb_wo(rows: int, cols: int) -> Made:
    """ModelOpt keeps the dimensions of 1 that its quantizer has for what a block covers."""
    stored, numbers = _fp8_block(rows, cols)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"][:, None, :, None]}, numbers


def _fp8_pc_pt(rows: int, cols: int) -> Made:
    stored, numbers = packed_int4.float_channel(rows, cols)
    return stored | {"weight_scale": stored["weight_scale"][:, 0].float()}, numbers


def _nvfp4_packed(rows: int, cols: int) -> Made:
    """compressed-tensors divides by the second scale where ModelOpt multiplies. Powers of two: both are exact."""
    stored, numbers = _nvfp4(rows, cols)
    divisor = torch.randint(4, 7, (1,)).exp2()
    numbers = numbers / stored["weight_scale_2"] / divisor
    scales = {"weight_global_scale": divisor, "input_global_scale": 1 / stored["input_scale"][None]}
    return {"weight_packed": stored["weight"], "weight_scale": stored["weight_scale"], **scales}, numbers


def _fp8_block_e8m0(rows: int, cols: int) -> Made:
    """DeepSeek-V4's shared expert."""
    data, scale = _fp8(rows, cols)[0], random_bytes(-(-rows // 128), -(-cols // 128), low=118, high=120)
    numbers = data.float() * _over_blocks(e8m0_numbers(scale), rows, cols)
    return {"weight": data, "scale": scale.view(torch.float8_e8m0fnu)}, numbers


def _over_blocks(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


def _mxfp4(rows: int, cols: int) -> Made:
    codes, scale = random_bytes(rows, cols // 2), random_bytes(rows, cols // 32, low=120, high=123)
    return {"weight": codes, "scale": scale}, mxfp4_numbers(codes, scale)


def _mxfp4_packed(rows: int, cols: int) -> Made:
    stored, numbers = _mxfp4(rows, cols)
    return {"weight_packed": stored["weight"], "weight_scale": stored["scale"]}, numbers


def _mxfp8(rows: int, cols: int) -> Made:
    data, scale = _fp8(rows, cols)[0], random_bytes(rows, cols // 32, low=117, high=120)
    return {"weight": data, "weight_scale": scale}, data.float() * e8m0_numbers(scale).repeat_interleave(32, dim=1)


PACK: dict[str, Callable[[int, int], Made]] = {
    "nvfp4": _nvfp4,
    "fp8_tensor": _fp8_tensor,
    "fp8_block": _fp8_block,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "fp8_block_e8m0": _fp8_block_e8m0,
    "nvfp4_packed": _nvfp4_packed,
    "mxfp4_packed": _mxfp4_packed,
    "float_block": _float_block,
    "fp8_pb_wo": _fp8_pb_wo,
    "fp8_pc_pt": _fp8_pc_pt,
    **packed_int4.PACK,
}
QUANT = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    "fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "fp8_pb_wo": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
    "fp8_pc_pt": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
    **packed_int4.QUANT,
}

PREFIX = "model.layers.1.mlp.experts"  # of qwen3_moe's and deepseek_v3's
EACH = [f"{PREFIX}.{expert}.{name}_proj" for expert in range(8) for name in ("gate", "up", "down")]


def mixed(algorithms: dict[str, str]) -> dict[str, object]:
    """ModelOpt's settings of a model whose modules have an algorithm each, by their names."""
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


# ---- checkpoints ----------------------------------------------------------------------------------------------

EXPERT = re.compile(r".*\.(?P<shared>shared_)?experts?(?:\.\d+)?\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")


def edit(source: Path, target: Path, tensors=None, config=None, drop=()) -> Path:
    """A copy of a one-file checkpoint with tensors (a function of all of them, or more of them) and config changed."""
    target.mkdir(parents=True, exist_ok=True)
    held = load_file(source / SINGLE)
    held = tensors(held) if callable(tensors) else held | (tensors or {})
    held = {name: value.contiguous() for name, value in held.items() if name not in drop}
    save_file(held, target / SINGLE, metadata={"format": "pt"})
    settings = json.loads((source / CONFIG).read_text()) | (config or {})
    (target / CONFIG).write_text(json.dumps({k: v for k, v in settings.items() if k not in drop}))
    return target


def pack(
    source: Path, target: Path, format: str, config=None, shared: str | None = None, plain: Path | None = None
) -> Path:
    """The checkpoint with every routed and shared expert matrix replaced by random numbers of `format`.

    Args:
        shared: another format for the shared expert.
        plain: where the checkpoint goes with the same numbers written out, all in float32.
    """
    torch.manual_seed(3)
    packed, numbers = {}, {}
    for name, tensor in sorted(load_file(source / SINGLE).items()):
        if found := EXPERT.match(name):
            made, numbers[name] = PACK[shared if shared and found["shared"] else format](*tensor.shape)
            packed |= {name.removesuffix("weight") + suffix: value for suffix, value in made.items()}
        else:
            packed[name], numbers[name] = tensor, tensor.float() if tensor.is_floating_point() else tensor
    if plain is not None:
        edit(source, plain, lambda _: numbers, {"dtype": "float32"})
    return edit(source, target, lambda _: packed, {"quantization_config": QUANT[format], **(config or {})})


# ModelOpt publishes these. Name of a case -> recipe.
FAMILIES = {
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "deepseek_v3": "deepseek_v3",
    "nemotron_h": "nemotron_h",
}


def resized(recipe: Recipe, sizes: dict[str, int]) -> Recipe:
    """With those of the sizes that this family has."""
    return replace(recipe, fields=recipe.fields | {name: sizes[name] for name in recipe.fields.keys() & sizes.keys()})


def write(folder: Path, family: str, algorithm: str, sizes: dict[str, int] | None = None) -> Written:
    """A model of a family in a ModelOpt format. `Written.known` is read from the same model written out in float32."""
    recipe = resized(RECIPES[FAMILIES[family]], sizes or {})
    make_model(recipe, torch.bfloat16).save_pretrained(folder / "bf16")
    pack(folder / "bf16", folder, algorithm, plain=folder / "plain")
    routed = re.compile(rf".*\.layers\.{recipe.layer}\..*\.experts\.\d+\.(gate|up)_proj\.input_scale")
    scales = [float(scale) for name, scale in load_file(folder / SINGLE).items() if routed.match(name)]
    return Written(recipe.layer, load_layer(folder / "plain", recipe.layer), max(scales, default=1.0))

"""Random numbers of each packed format, under the names that published checkpoints give them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from support.cases.model_cases import edit


def random_bytes(*shape, high=256):
    return torch.randint(0, high, shape, dtype=torch.uint8)


def e4m3(*shape):
    """Finite positive e4m3 numbers: codes 1 to 126."""
    return (random_bytes(*shape, high=126) + 1).view(torch.float8_e4m3fn)


def scalar():
    return torch.rand(()) + 0.5


def e8m0(*shape):
    return random_bytes(*shape, high=255)


PACK = {
    "nvfp4": lambda rows, cols: {
        "weight": random_bytes(rows, cols // 2),
        "weight_scale": e4m3(rows, cols // 16),
        "weight_scale_2": scalar(),
        "input_scale": scalar(),
    },
    "fp8_tensor": lambda rows, cols: {"weight": e4m3(rows, cols), "weight_scale": scalar(), "input_scale": scalar()},
    "fp8_block": lambda rows, cols: {
        "weight": e4m3(rows, cols),
        "weight_scale_inv": torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5,
    },
    "mxfp4": lambda rows, cols: {"weight": random_bytes(rows, cols // 2), "scale": e8m0(rows, cols // 32)},
    "mxfp8": lambda rows, cols: {"weight": e4m3(rows, cols), "weight_scale": e8m0(rows, cols // 32)},
}
QUANT = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    "fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
}
EXPERT = re.compile(r"(.*\.(?:shared_)?experts?(?:\.\d+)?)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")


def pack(source: Path, target: Path, format: str, config: dict | None = None) -> Path:
    """The checkpoint with every routed and shared expert matrix replaced by random numbers of `format`."""
    torch.manual_seed(3)

    def replace(held):
        packed = {}
        for name, tensor in held.items():
            if EXPERT.match(name):
                for suffix, value in PACK[format](*tensor.shape).items():
                    packed[name.removesuffix("weight") + suffix] = value
            else:
                packed[name] = tensor
        return packed

    return edit(source, target, replace, {"quantization_config": QUANT[format], **(config or {})})

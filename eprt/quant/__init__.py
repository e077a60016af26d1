"""Number formats: encode and decode, in pure torch, on any device. Kernel layouts are the executors' business.

`decode` and `encode` work on the canonical matrices of `eprt.weights`; `encode_payload` and `decode_payload` on tokens
in flight; the modules below work on raw tensors.
"""

from __future__ import annotations

import torch

from eprt.config import WeightFormat
from eprt.errors import ConfigError
from eprt.quant.fp8 import decode_mxfp8, encode_fp8_block, encode_fp8_tensor, encode_mxfp8, spread_blocks
from eprt.quant.mxfp4 import decode_mxfp4, encode_mxfp4
from eprt.quant.nvfp4 import decode_nvfp4, encode_nvfp4, nvfp4_global_scale
from eprt.quant.payload import decode_payload, encode_payload
from eprt.weights import MX_BLOCK, NVFP4_BLOCK, Dense, Fp8Block, Fp8Tensor, Matrix, Mxfp4, Mxfp8, Nvfp4

__all__ = ["decode", "decode_payload", "encode", "encode_payload"]

# Columns that share a scale and can't be left over, by format.
_WHOLE_BLOCKS: dict[WeightFormat, int] = {"mxfp4": MX_BLOCK, "mxfp8": MX_BLOCK, "nvfp4": NVFP4_BLOCK}


def decode(matrix: Matrix, parts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Plain numbers [L, rows, cols] of a canonical matrix, computed in float32 and rounded once, to `dtype`.

    Args:
        matrix: weights as `eprt.weights` describes them.
        parts: 2 for [gate; up], which have scales of their own, else 1.

    Raises:
        ConfigError: the matrix type is unknown.
    """
    match matrix:
        case Dense():
            values = matrix.data
        case Mxfp4():
            values = decode_mxfp4(matrix.codes, matrix.scales)
        case Mxfp8():
            values = decode_mxfp8(matrix.data, matrix.scales)
        case Nvfp4():
            scales = _split(matrix.scales, parts)
            values = decode_nvfp4(_split(matrix.codes, parts), scales, matrix.global_scale[:, :, None, None])
            values = values.flatten(1, 2)
        case Fp8Tensor():
            values = (_split(matrix.data, parts).float() * matrix.scale[:, :, None, None]).flatten(1, 2)
        case Fp8Block():
            data = _split(matrix.data, parts)
            values = (data.float() * spread_blocks(_split(matrix.scale, parts), *data.shape[-2:])).flatten(1, 2)
        case _:
            raise ConfigError(f"{type(matrix).__name__} isn't a matrix type of eprt.weights")
    return values.to(dtype)


def encode(format: WeightFormat, dense: torch.Tensor, parts: int) -> Matrix:
    """A canonical matrix in `format` from plain numbers [L, rows, cols]; gate and up each get scales of their own.

    Raises:
        ConfigError: rows don't split into `parts`, cols aren't whole scale blocks, or the format is unknown.
    """
    _, rows, cols = dense.shape
    if rows % parts:
        raise ConfigError(f"{rows} rows can't be split into {parts} equal parts [gate; up]")
    if cols % _WHOLE_BLOCKS.get(format, 1):
        raise ConfigError(f"{format} needs columns in multiples of {_WHOLE_BLOCKS[format]}, the matrix has {cols}")
    split = _split(dense, parts).float()
    match format:
        case "f32":
            return Dense(dense.to(torch.float32))
        case "bf16":
            return Dense(dense.to(torch.bfloat16))
        case "mxfp4":
            return Mxfp4(*encode_mxfp4(dense))
        case "mxfp8":
            return Mxfp8(*encode_mxfp8(dense))
        case "nvfp4":
            global_scale = nvfp4_global_scale(split.abs().amax((-2, -1)))
            codes, scales = encode_nvfp4(split, global_scale[:, :, None, None])
            return Nvfp4(codes.flatten(1, 2), scales.flatten(1, 2), global_scale)
        case "fp8_tensor":
            data, scale = encode_fp8_tensor(split)
            return Fp8Tensor(data.flatten(1, 2), scale)
        case "fp8_block":
            data, scale = encode_fp8_block(split)
            return Fp8Block(data.flatten(1, 2), scale.flatten(1, 2))
        case _:
            raise ConfigError(f"weight format {format!r} is unknown")


def _split(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """[L, parts * n, ...] -> [L, parts, n, ...]. A view."""
    return tensor.unflatten(1, (parts, tensor.shape[1] // parts))

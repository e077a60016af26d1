"""Number formats: encode and decode, in pure torch, on any device. Kernel layouts are the executors' business.

`decode` and `encode` work on the canonical matrices of `eprt.weights`; `encode_payload` and `decode_payload` on tokens
in flight; `blocks` on raw tensors. A new weight format is one entry in each of the two tables here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eprt.config import PayloadFormat, WeightFormat
from eprt.errors import ConfigError, InputError
from eprt.quant import blocks
from eprt.tokens import Payload
from eprt.weights import (
    INT4_GROUPS,
    NVFP4_BLOCK,
    Dense,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Int4,
    Matrix,
    Mxfp4,
    Mxfp8,
    Nvfp4,
)

__all__ = ["decode", "decode_payload", "encode", "encode_payload"]


def _encode_nvfp4(split: torch.Tensor) -> tuple[torch.Tensor, ...]:
    global_scale = blocks.nvfp4_global_scale(split.abs().amax((-2, -1)))
    return *blocks.encode_nvfp4(split, global_scale[:, :, None, None]), global_scale


def _encode_int4(split: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cols = split.shape[-1]
    return blocks.encode_int4(split, cols if cols % INT4_GROUPS[0] else INT4_GROUPS[0])


def _decode_nvfp4(matrix: Nvfp4, parts: int) -> torch.Tensor:
    codes, scales = _split(matrix.codes, parts), _split(matrix.scales, parts)
    return blocks.decode_nvfp4(codes, scales, matrix.global_scale[:, :, None, None]).flatten(1, 2)


def _decode_fp8_tensor(matrix: Fp8Tensor, parts: int) -> torch.Tensor:
    return (_split(matrix.data, parts).float() * matrix.scale[:, :, None, None]).flatten(1, 2)


def _decode_fp8_block(matrix: Fp8Block, parts: int) -> torch.Tensor:
    data = _split(matrix.data, parts)
    return (data.float() * blocks.spread_blocks(_split(matrix.scale, parts), *data.shape[-2:])).flatten(1, 2)


# The matrix type, and float32 [L, parts, rows of a part, cols] -> its tensors [L, parts, ...].
_ENCODERS: dict[WeightFormat, tuple[type[Any], Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "f32": (Dense, lambda split: (split,)),
    "bf16": (Dense, lambda split: (split.to(torch.bfloat16),)),
    "mxfp4": (Mxfp4, blocks.encode_mxfp4),
    "mxfp8": (Mxfp8, blocks.encode_mxfp8),
    "nvfp4": (Nvfp4, _encode_nvfp4),
    "fp8_tensor": (Fp8Tensor, blocks.encode_fp8_tensor),
    "fp8_block": (Fp8Block, blocks.encode_fp8_block),
    "fp8_channel": (Fp8Channel, blocks.encode_fp8_channel),
    "int4": (Int4, _encode_int4),
}
# (matrix, parts) -> its numbers [L, rows, cols]: float32, but for Dense.
_DECODERS: dict[type[Matrix], Callable[[Any, int], torch.Tensor]] = {
    Dense: lambda matrix, _: matrix.data,
    Mxfp4: lambda matrix, _: blocks.decode_mxfp4(matrix.codes, matrix.scales),
    Mxfp8: lambda matrix, _: blocks.decode_mxfp8(matrix.data, matrix.scales),
    Nvfp4: _decode_nvfp4,
    Fp8Tensor: _decode_fp8_tensor,
    Fp8Block: _decode_fp8_block,
    Fp8Channel: lambda matrix, _: matrix.data.float() * matrix.scale[:, :, None],
    Int4: lambda matrix, _: blocks.decode_int4(matrix.codes, matrix.scales, matrix.zeros),
}


def decode(matrix: Matrix, parts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the plain numbers [L, rows, cols] of a canonical matrix, computed in float32 and rounded once to `dtype`.

    `parts` is 2 for [gate; up], which have scales of their own, else 1. Raises ConfigError for an unknown matrix type.
    """
    decoder = _DECODERS.get(type(matrix))
    if decoder is None:
        raise ConfigError(f"{type(matrix).__name__} isn't a matrix type of eprt.weights")
    return decoder(matrix, parts).to(dtype)


def encode(format: WeightFormat, dense: torch.Tensor, parts: int) -> Matrix:
    """Makes a canonical matrix in `format` of plain numbers [L, rows, cols]; gate and up get scales of their own.

    Raises:
        ConfigError: rows don't split into `parts`, cols aren't whole scale blocks, or the format is unknown.
    """
    _, rows, cols = dense.shape
    if format not in _ENCODERS:
        raise ConfigError(f"weight format {format!r} is unknown")
    kind, encoder = _ENCODERS[format]
    if rows % parts:
        raise ConfigError(f"{rows} rows can't be split into {parts} equal parts [gate; up]")
    if cols % kind.whole_columns:
        raise ConfigError(f"{format} needs columns in multiples of {kind.whole_columns}, the matrix has {cols}")
    encoded = encoder(_split(dense, parts).float())
    return kind(*(tensor.flatten(1, 2) if tensor.dim() > 2 else tensor for tensor in encoded))  # [L, parts] stays


def _split(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """Splits [L, parts * n, ...] into [L, parts, n, ...]. A view."""
    return tensor.unflatten(1, (parts, tensor.shape[1] // parts))


def encode_payload(hidden: torch.Tensor, format: PayloadFormat, global_scale: torch.Tensor | None = None) -> Payload:
    """Packs hidden states in a payload's number format, on their own device, without a host sync.

    Args:
        hidden: [T, H] bf16 or float32, T >= 0.
        format: `f32` and `bf16` cast; `fp8_block` has a scale per 128 values of a token (the last group may be short);
            `nvfp4` needs H to be a multiple of 16.
        global_scale: `nvfp4`'s second-level scale, float32 [1], the same on every rank. None means 1: the largest
            magnitude is then 6 * 448 = 2688, and values saturate there.

    Raises:
        InputError: H doesn't fit the format, or the format is unknown.
    """
    if format in ("f32", "bf16"):
        return Payload.plain(hidden.to(torch.float32 if format == "f32" else torch.bfloat16))
    if format not in ("fp8_block", "nvfp4"):
        raise InputError(f"payload format {format!r}: expected f32, bf16, fp8_block or nvfp4")
    encode_groups, encode_blocks = blocks.encode_fp8_groups, blocks.encode_nvfp4
    if hidden.is_cuda and hidden.dim() == 2:  # in one pass over the tokens
        from eprt.quant.payload_kernels import encode_fp8_rows as encode_groups
        from eprt.quant.payload_kernels import encode_nvfp4_rows as encode_blocks
    if format == "fp8_block":
        data, scale = encode_groups(hidden)
        return Payload(data, format, scale)
    if hidden.shape[-1] % NVFP4_BLOCK:
        raise InputError(
            f"hidden size {hidden.shape[-1]} isn't a multiple of {NVFP4_BLOCK}: an nvfp4 payload can't hold it"
        )
    if global_scale is None:
        global_scale = torch.ones(1, dtype=torch.float32, device=hidden.device)
    codes, scale = encode_blocks(hidden, global_scale)
    return Payload(codes, format, scale, global_scale)


def decode_payload(payload: Payload) -> torch.Tensor:
    """Returns plain numbers [..., H]: packed formats in bf16, plain ones as they are. No host sync.

    Raises:
        InputError: `nvfp4` without its global scale, or a scale that doesn't fit (see `Payload.check`).
    """
    payload.check()
    if payload.scale is None:
        return payload.data
    if payload.format == "fp8_block":
        values = payload.data.float() * blocks.spread_groups(payload.scale, payload.hidden_size)
    else:
        if payload.global_scale is None:
            raise InputError("nvfp4 payload carries no global_scale: pass the float32 [1] it was encoded with")
        values = blocks.decode_nvfp4(payload.data, payload.scale, payload.global_scale)
    return values.to(torch.bfloat16)

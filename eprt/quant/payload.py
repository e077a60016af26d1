"""Tokens as they travel: pack hidden states into a `Payload`, and read one back."""

from __future__ import annotations

import torch

from eprt.config import PayloadFormat
from eprt.errors import InputError
from eprt.quant.fp8 import encode_fp8_groups, spread_groups
from eprt.quant.nvfp4 import decode_nvfp4, encode_nvfp4
from eprt.tokens import Payload
from eprt.weights import NVFP4_BLOCK


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
    match format:
        case "f32" | "bf16":
            return Payload.plain(hidden.to(torch.float32 if format == "f32" else torch.bfloat16))
        case "fp8_block":
            return _encode_fp8_block(hidden)
        case "nvfp4":
            return _encode_nvfp4(hidden, global_scale)
        case _:
            raise InputError(f"payload format {format!r}: expected f32, bf16, fp8_block or nvfp4")


def _one_pass(hidden: torch.Tensor) -> bool:
    """Returns whether the kernels that pack in one pass over the tokens can be used."""
    return hidden.is_cuda and hidden.dim() == 2


def _encode_fp8_block(hidden: torch.Tensor) -> Payload:
    if _one_pass(hidden):
        from eprt.quant.payload_kernels import encode_fp8_rows as encode
    else:
        encode = encode_fp8_groups
    data, scale = encode(hidden)
    return Payload(data, "fp8_block", scale)


def _encode_nvfp4(hidden: torch.Tensor, global_scale: torch.Tensor | None) -> Payload:
    H = hidden.shape[-1]
    if H % NVFP4_BLOCK:
        raise InputError(f"hidden size {H} isn't a multiple of {NVFP4_BLOCK}: an nvfp4 payload can't hold it")
    if global_scale is None:
        global_scale = torch.ones(1, dtype=torch.float32, device=hidden.device)
    if _one_pass(hidden):
        from eprt.quant.payload_kernels import encode_nvfp4_rows as encode
    else:
        encode = encode_nvfp4
    codes, scale = encode(hidden, global_scale)
    return Payload(codes, "nvfp4", scale, global_scale)


def decode_payload(payload: Payload) -> torch.Tensor:
    """Returns plain numbers [..., H]: packed formats in bf16, plain ones as they are. No host sync.

    Raises:
        InputError: `nvfp4` without its global scale, or a scale that doesn't fit (see `Payload.check`).
    """
    payload.check()
    if payload.scale is None:
        return payload.data
    if payload.format == "fp8_block":
        values = payload.data.float() * spread_groups(payload.scale, payload.hidden_size)
    else:
        if payload.global_scale is None:
            raise InputError("nvfp4 payload carries no global_scale: pass the float32 [1] it was encoded with")
        values = decode_nvfp4(payload.data, payload.scale, payload.global_scale)
    return values.to(torch.bfloat16)

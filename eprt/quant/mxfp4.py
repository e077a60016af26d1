"""MXFP4 (OCP MX v1.0): E2M1 elements, one E8M0 scale for 32 of them along the last dimension."""

from __future__ import annotations

import torch

from eprt.quant.elements import (
    E2M1_EMAX,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    pack_nibbles,
    shared_scale,
    unpack_nibbles,
)
from eprt.weights import MX_BLOCK


def encode_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., C] as (codes u8 [..., C/2], scales u8 E8M0 [..., C/32]). C must be a multiple of 32."""
    blocks = values.float().unflatten(-1, (values.shape[-1] // MX_BLOCK, MX_BLOCK))
    scales = shared_scale(blocks.abs().amax(-1), E2M1_EMAX)
    codes = encode_e2m1(blocks / decode_e8m0(scales)[..., None])
    return pack_nibbles(codes.flatten(-2)), scales


def decode_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decodes (codes u8 [..., C/2], scales u8 [..., C/32]) exactly to float32 [..., C]; a block of scale 255 is NaN."""
    values = decode_e2m1(unpack_nibbles(codes)).unflatten(-1, (scales.shape[-1], MX_BLOCK))
    return (values * decode_e8m0(scales)[..., None]).flatten(-2)

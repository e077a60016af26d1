"""NVFP4: E2M1 elements, an E4M3 scale for 16 of them along the last dimension, a float32 scale above those.

value = e2m1(code) * e4m3(scale) * global_scale.
"""

from __future__ import annotations

import torch

from eprt.quant.elements import (
    E2M1_MAX,
    E4M3_MAX,
    TINY,
    decode_e2m1,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from eprt.weights import NVFP4_BLOCK


def nvfp4_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Returns the second-level scale that makes `amax` the largest value: amax / (6 * 448), never 0."""
    return (amax.float() / (E2M1_MAX * E4M3_MAX)).clamp(min=TINY)


def encode_nvfp4(values: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., C] as (codes u8 [..., C/2], scales e4m3 [..., C/16]). C must be a multiple of 16.

    `global_scale` is float32 and broadcasts against [..., C/16]. Saturates beyond 6 * 448 * global_scale.
    """
    blocks = values.float().unflatten(-1, (values.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK))
    scales = encode_e4m3(blocks.abs().amax(-1) / global_scale / E2M1_MAX)
    step = (scales.float() * global_scale)[..., None]
    # A block whose scale underflowed to 0 decodes to 0 whatever its codes: store zeros, not 0 / 0.
    codes = encode_e2m1(torch.where(step == 0, 0.0, blocks / step))
    return pack_nibbles(codes.flatten(-2)), scales


def decode_nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Undoes `encode_nvfp4`: float32 [..., C]. `global_scale` broadcasts against [..., C/16]."""
    values = decode_e2m1(unpack_nibbles(codes)).unflatten(-1, (scales.shape[-1], NVFP4_BLOCK))
    return (values * (scales.float() * global_scale)[..., None]).flatten(-2)

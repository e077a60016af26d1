"""The number formats of `eprt.weights` on raw tensors; and FP8 with a float32 scale per 128 values of a token.

MXFP8, MXFP4, NVFP4 and INT4 take whole blocks along the last dimension.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from eprt.quant.elements import (
    E2M1_EMAX,
    E2M1_MAX,
    E4M3_EMAX,
    E4M3_MAX,
    TINY,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    shared_scale,
    unpack_nibbles,
)
from eprt.rounding import ceil_div
from eprt.weights import FP8_BLOCK, INT4_ZERO, MX_BLOCK, NVFP4_BLOCK


def fp8_scale(amax: torch.Tensor) -> torch.Tensor:
    """Returns the float32 scale that maps `amax` to 448, E4M3's largest value; never 0.

    The divisor is a tensor because torch multiplies a CUDA tensor by a number's reciprocal instead of dividing: the
    CPU's scale would differ in the last bit.
    """
    return (amax.float() / torch.full_like(amax, E4M3_MAX, dtype=torch.float32)).clamp(min=TINY)


def encode_fp8_tensor(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., rows, cols] float as (e4m3 of the same shape, scale f32 [...]): one scale per matrix."""
    values = values.float()
    scale = fp8_scale(values.abs().amax((-2, -1)))
    return encode_e4m3(values / scale[..., None, None]), scale


def encode_fp8_channel(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., rows, cols] float as (e4m3 of the same shape, scale f32 [..., rows]): one scale per row."""
    values = values.float()
    scale = fp8_scale(values.abs().amax(-1))
    return encode_e4m3(values / scale[..., None]), scale


def encode_fp8_block(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., rows, cols] as (e4m3 of the same shape, scale f32 [..., ceil(rows/128), ceil(cols/128)])."""
    values = values.float()
    rows, cols = values.shape[-2:]
    whole = pad(values.abs(), (0, -cols % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    grid = whole.shape[-2] // FP8_BLOCK, whole.shape[-1] // FP8_BLOCK
    scale = fp8_scale(whole.unflatten(-1, (grid[1], FP8_BLOCK)).unflatten(-3, (grid[0], FP8_BLOCK)).amax((-3, -1)))
    return encode_e4m3(values / spread_blocks(scale, rows, cols)), scale


def spread_blocks(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Repeats each block's scale on its elements: [..., ceil(rows/128), ceil(cols/128)] -> [..., rows, cols]."""
    tall = scale.repeat_interleave(FP8_BLOCK, dim=-2)[..., :rows, :]
    return tall.repeat_interleave(FP8_BLOCK, dim=-1)[..., :cols]


def encode_fp8_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., H] float as (e4m3 [..., H], scale f32 [..., ceil(H/128)]). The last group of 128 may be short."""
    values = values.float()
    H = values.shape[-1]
    groups = ceil_div(H, FP8_BLOCK)
    scale = fp8_scale(pad(values.abs(), (0, -H % FP8_BLOCK)).unflatten(-1, (groups, FP8_BLOCK)).amax(-1))
    return encode_e4m3(values / spread_groups(scale, H)), scale


def spread_groups(scale: torch.Tensor, H: int) -> torch.Tensor:
    """Repeats each group's scale on its values: [..., ceil(H/128)] -> [..., H]."""
    return scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., :H]


def encode_mxfp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., C] float as (e4m3 [..., C], scales u8 E8M0 [..., C/32])."""
    blocks = values.float().unflatten(-1, (values.shape[-1] // MX_BLOCK, MX_BLOCK))
    scales = shared_scale(blocks.abs().amax(-1), E4M3_EMAX)
    return encode_e4m3(blocks / decode_e8m0(scales)[..., None]).flatten(-2), scales


def decode_mxfp8(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decodes (e4m3 [..., C], scales u8 [..., C/32]) to float32 [..., C]."""
    blocks = data.float().unflatten(-1, (scales.shape[-1], MX_BLOCK))
    return (blocks * decode_e8m0(scales)[..., None]).flatten(-2)


def encode_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., C] as (codes u8 [..., C/2], scales u8 E8M0 [..., C/32])."""
    blocks = values.float().unflatten(-1, (values.shape[-1] // MX_BLOCK, MX_BLOCK))
    scales = shared_scale(blocks.abs().amax(-1), E2M1_EMAX)
    codes = encode_e2m1(blocks / decode_e8m0(scales)[..., None])
    return pack_nibbles(codes.flatten(-2)), scales


def decode_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decodes (codes u8 [..., C/2], scales u8 [..., C/32]) exactly to float32 [..., C]; a block of scale 255 is NaN."""
    values = decode_e2m1(unpack_nibbles(codes)).unflatten(-1, (scales.shape[-1], MX_BLOCK))
    return (values * decode_e8m0(scales)[..., None]).flatten(-2)


def encode_int4(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [..., C] as (codes u8 [..., C/2], scales bf16 [..., C/group]), 0 at code 8. C is whole groups."""
    groups = values.float().unflatten(-1, (values.shape[-1] // group, group))
    scales = (groups.abs().amax(-1) / (15 - INT4_ZERO)).clamp(min=TINY).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-INT4_ZERO, 15 - INT4_ZERO) + INT4_ZERO
    return pack_nibbles(codes.to(torch.uint8).flatten(-2)), scales


def decode_int4(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """Decodes (codes u8 [..., C/2], scales [..., C/group], zero points u8 of the same shape or None) to float32."""
    values = unpack_nibbles(codes).float().unflatten(-1, (scales.shape[-1], -1))
    zero = float(INT4_ZERO) if zeros is None else zeros.float()[..., None]
    return ((values - zero) * scales.float()[..., None]).flatten(-2)


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

"""Packed payloads in one pass over the tokens on a GPU, bit for bit what `eprt.quant.blocks` makes of them.

That is plain torch: ten and more passes, which at 1024 tokens cost as much as sending them. Finite values only.
`fp8_groups` and `nvfp4_groups` are for kernels that pack on the way.
"""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from eprt.launching import CachedKernel
from eprt.quant.elements import E2M1_MAX, E4M3_MAX, TINY
from eprt.rounding import ceil_div
from eprt.tokens import aligned
from eprt.weights import FP8_BLOCK, NVFP4_BLOCK

COLUMNS_PER_CTA = 1024

_FP8_BLOCK = tl.constexpr(FP8_BLOCK)
_NVFP4_BLOCK = tl.constexpr(NVFP4_BLOCK)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E2M1_MAX = tl.constexpr(E2M1_MAX)
_TINY = tl.constexpr(TINY)


@triton.jit
def _divide(x, y):
    """Divides and rounds to nearest, as torch does; `/` alone is approximate."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def fp8_groups(value):
    """float32 [G, 128] -> (e4m3 [G, 128], scale float32 [G])."""
    factor = tl.maximum(_divide(tl.max(tl.abs(value), 1), _E4M3_MAX), _TINY)
    return tl.clamp(_divide(value, factor[:, None]), -_E4M3_MAX, _E4M3_MAX).to(tl.float8e4nv), factor


@triton.jit
def _fp8_kernel(x, data, scale, H: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * _FP8_BLOCK + tl.arange(0, _FP8_BLOCK)[None, :]
    value = tl.load(x + t * H + column, mask=column < H, other=0.0).to(tl.float32)
    code, factor = fp8_groups(value)
    tl.store(data + t * H + column, code, mask=column < H)
    tl.store(scale + t * GROUPS + group, factor, mask=group < GROUPS)


@triton.jit
def _e2m1(value):
    """Nearest code 0..15. Its size counts the midpoints below it; a tie goes to the even code."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def nvfp4_groups(value, above):
    """float32 [G, 16], second-level scale -> (codes u8 [G, 8], even columns low, scale e4m3 [G])."""
    groups: tl.constexpr = value.shape[0]
    amax = _divide(_divide(tl.max(tl.abs(value), 1), above), _E2M1_MAX)
    factor = tl.clamp(amax, 0.0, _E4M3_MAX).to(tl.float8e4nv)
    step = (factor.to(tl.float32) * above)[:, None]
    # A block whose scale underflowed to 0 decodes to 0 whatever its codes.
    code = _e2m1(tl.where(step == 0, 0.0, _divide(value, tl.where(step == 0, 1.0, step))))
    even, odd = tl.split(tl.reshape(code, (groups, _NVFP4_BLOCK // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8), factor


@triton.jit
def _nvfp4_kernel(x, global_scale, data, scale, H: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * _NVFP4_BLOCK + tl.arange(0, _NVFP4_BLOCK)[None, :]
    value = tl.load(x + t * H + column, mask=column < H, other=0.0).to(tl.float32)
    code, factor = nvfp4_groups(value, tl.load(global_scale))
    pair = tl.program_id(1) * BLOCK * 8 + tl.arange(0, BLOCK)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(data + t * (H // 2) + pair, code, mask=pair < H // 2)
    tl.store(scale + t * GROUPS + group, factor, mask=group < GROUPS)


def encode_fp8_rows(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] bf16 or float32 on CUDA -> (e4m3 [T, H], scale f32 [T, ceil(H/128)]), T >= 0."""
    T, H = hidden.shape
    data = torch.empty(T, H, dtype=torch.float8_e4m3fn, device=hidden.device)
    scale = torch.empty(T, ceil_div(H, FP8_BLOCK), dtype=torch.float32, device=hidden.device)
    _launch(_fp8_kernel, FP8_BLOCK, hidden, data, scale)
    return data, scale


def encode_nvfp4_rows(hidden: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] bf16 or float32 on CUDA, float32 [1] -> (codes u8 [T, H/2], scale e4m3 [T, H/16]), T >= 0, H by 16."""
    T, H = hidden.shape
    data = torch.empty(T, H // 2, dtype=torch.uint8, device=hidden.device)
    scale = torch.empty(T, H // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=hidden.device)
    _launch(_nvfp4_kernel, NVFP4_BLOCK, hidden, global_scale, data, scale)
    return data, scale


def _launch(kernel: Any, group: int, hidden: torch.Tensor, *others: torch.Tensor) -> None:
    """Launches a kernel over `hidden` [T, H], whose rows have a scale per `group` values; nothing for T = 0."""
    T, H = hidden.shape
    if T:
        dtypes = hidden.dtype, *(tensor.dtype for tensor in others)
        prepared, blocks = _prepared(kernel, group, hidden.device, dtypes, H)
        prepared((T, blocks, 1), aligned(hidden), *others)


@cache
def _prepared(
    kernel: Any, group: int, device: torch.device, dtypes: tuple[torch.dtype, ...], H: int
) -> tuple[CachedKernel, int]:
    """Returns the precompiled kernel, and how many programs share a row."""
    groups, block = ceil_div(H, group), COLUMNS_PER_CTA // group
    constants = {"H": H, "GROUPS": groups, "BLOCK": block}
    return CachedKernel(kernel, device, dtypes, constants), ceil_div(groups, block)

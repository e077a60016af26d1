"""FP8 payload in one pass over the tokens on a GPU; `encode_fp8_groups` of fp8.py, which this must equal, takes ten."""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eprt.quant.elements import E4M3_MAX, TINY
from eprt.weights import FP8_BLOCK

GROUPS_PER_CTA = 8

_GROUP = tl.constexpr(FP8_BLOCK)
_MAX = tl.constexpr(E4M3_MAX)
_TINY = tl.constexpr(TINY)


@triton.jit
def _encode_kernel(x, data, scale, H: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    value = tl.load(x + t * H + column, mask=column < H, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), 1)
    factor = tl.maximum(tl.div_rn(amax, tl.full((BLOCK,), _MAX, tl.float32)), _TINY)
    code = tl.clamp(tl.div_rn(value, factor[:, None]), -_MAX, _MAX).to(tl.float8e4nv)
    tl.store(data + t * H + column, code, mask=column < H)
    tl.store(scale + t * GROUPS + group, factor, mask=group < GROUPS)


def encode_fp8_rows(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] bf16 or float32 on CUDA -> (e4m3 [T, H], scale f32 [T, ceil(H/128)]), T >= 0. Finite values only."""
    T, H = hidden.shape
    groups = -(-H // FP8_BLOCK)
    data = torch.empty(T, H, dtype=torch.float8_e4m3fn, device=hidden.device)
    scale = torch.empty(T, groups, dtype=torch.float32, device=hidden.device)
    if T:
        with torch.cuda.device(hidden.device):
            _encode_kernel[(T, triton.cdiv(groups, GROUPS_PER_CTA))](
                hidden.contiguous(), data, scale, H=H, GROUPS=groups, BLOCK=GROUPS_PER_CTA
            )
    return data, scale

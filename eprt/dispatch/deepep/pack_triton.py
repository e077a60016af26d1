"""One kernel before DeepEP's dispatch: rows padded to an instantiated width, ids in the library's form."""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from eprt.launching import CachedKernel, like
from eprt.rounding import next_power_of_2
from eprt.tokens import aligned

BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _pack_kernel(
    x, ids, rows, wide_ids, E, H: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA a token. WIDTH 0: ids alone."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_POW2)
    e = tl.load(ids + t * K + k, mask=k < K, other=0)
    tl.store(wide_ids + t * K + k, tl.where(e < E, e, -1).to(tl.int64), mask=k < K)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + t * H + column, mask=column < H, other=0.0)
        tl.store(rows + t * WIDTH + column, value, mask=column < WIDTH)


def pack_tokens(
    x: torch.Tensor, ids: torch.Tensor, width: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """([T, H] bf16, int32 [T, K]) -> ([T, width] with zeros past H, or x itself; int64 [T, K] with E as -1)."""
    T, H = x.shape
    x, ids = aligned(x), ids.contiguous()
    rows = x if width == H else x.new_empty((T, width))
    wide_ids = torch.empty_like(ids, dtype=torch.int64)
    if T:
        kernel = _prepared_pack(x.device, x.dtype, like(num_experts), H, 0 if width == H else width, ids.shape[1])
        kernel((T, 1, 1), x, ids, rows, wide_ids, num_experts)
    return rows, wide_ids


@cache
def _prepared_pack(
    device: torch.device, dtype: torch.dtype, num_experts: int, H: int, width: int, K: int
) -> CachedKernel:
    """For a number like this of experts."""
    constants = {"H": H, "WIDTH": width, "K": K, "K_POW2": next_power_of_2(K), "BLOCK": BLOCK}
    return CachedKernel(_pack_kernel, device, (dtype, torch.int32, dtype, torch.int64, num_experts), constants)

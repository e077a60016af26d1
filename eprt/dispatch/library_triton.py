"""Our own kernels beside the libraries': one before DeepEP's dispatch (rows padded to an instantiated width,
ids in the library's form), one after FlashInfer's (ids of absent tokens and of other ranks' experts become E).

FlashInfer sends each token's whole top-k and clears only the rows that hold no token, with a kernel of its own; ours
replaces it, so that the rule of `FlatTokens` costs no extra launch.
"""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eprt.launching import CachedKernel, like
from eprt.rounding import ceil_div, next_power_of_2
from eprt.tokens import aligned

PACK_BLOCK = 2048
MASK_BLOCK = 512


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _pack_kernel(
    x, ids, rows, wide_ids, E, H: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs one token in each CTA. WIDTH 0: ids alone."""
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
    """Returns [T, H] bf16 as [T, width] with zeros past H (x itself if it is as wide), int32 ids [T, K] as int64 with E
    as -1."""
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
    constants = {"H": H, "WIDTH": width, "K": K, "K_POW2": next_power_of_2(K), "BLOCK": PACK_BLOCK}
    return CachedKernel(_pack_kernel, device, (dtype, torch.int32, dtype, torch.int64, num_experts), constants)


@triton.jit(do_not_specialize=["num_entries", "R"], do_not_specialize_on_alignment=["ids", "counts"])
def _mask_kernel(ids, counts, num_entries, R, first, end, E, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Masks ids [W * R, K]; counts [W]: tokens that each source sent here, in the first rows of its R."""
    if PDL:
        gdc_launch_dependents()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    row = entry // K
    source = row // R
    if PDL:
        gdc_wait()
    e = tl.load(ids + entry, mask=inside, other=0)
    count = tl.load(counts + source, mask=inside, other=0)
    keep = (row - source * R < count) & (e >= first) & (e < end)
    tl.store(ids + entry, tl.where(keep, e, E), mask=inside)


def mask_foreign_ids(
    ids: torch.Tensor, counts: torch.Tensor, first: int, end: int, num_experts: int, pdl: bool
) -> None:
    """Masks the ids in place, on the current stream.

    Args:
        ids: int32 [W, R, K] global expert ids as received.
        counts: int32 [W], rows of each source that hold a token.
        first, end: this rank's experts are [first, end).
        num_experts: E, the invalid id.
        pdl: let the launch overlap the end of the kernel before, as the library's own kernels do (programmatic
            dependent launch, compute capability 9 and later).
    """
    W, R, K = ids.shape
    experts = first, end, num_experts
    kernel = _prepared_mask(ids.device, *map(like, experts), K, pdl)
    kernel((ceil_div(W * R * K, MASK_BLOCK), 1, 1), ids, counts, W * R * K, R, *experts)


@cache
def _prepared_mask(device: torch.device, first: int, end: int, num_experts: int, K: int, pdl: bool) -> CachedKernel:
    constants = {"K": K, "BLOCK": MASK_BLOCK}
    arguments = torch.int32, torch.int32, 2, 2, first, end, num_experts
    return CachedKernel(_mask_kernel, device, arguments, constants, pdl=pdl)

"""One kernel after FlashInfer's dispatch: ids of absent tokens and of other ranks' experts become E.

The library sends each token's whole top-k and clears only the rows that hold no token, with a kernel of its own; this
one replaces it, so that the rule of `FlatTokens` costs no extra launch.
"""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eprt.launching import CachedKernel, like
from eprt.rounding import ceil_div

BLOCK = 512


@triton.jit(do_not_specialize=["num_entries", "R"], do_not_specialize_on_alignment=["ids", "counts"])
def _mask_kernel(ids, counts, num_entries, R, first, end, E, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """ids [W * R, K]; counts [W]: tokens that each source sent here, in the first rows of its R."""
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
    """In place, on the current stream.

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
    kernel((ceil_div(W * R * K, BLOCK), 1, 1), ids, counts, W * R * K, R, *experts)


@cache
def _prepared_mask(device: torch.device, first: int, end: int, num_experts: int, K: int, pdl: bool) -> CachedKernel:
    """For numbers like these."""
    constants = {"K": K, "BLOCK": BLOCK}
    arguments = torch.int32, torch.int32, 2, 2, first, end, num_experts
    return CachedKernel(_mask_kernel, device, arguments, constants, pdl=pdl)

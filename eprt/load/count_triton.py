"""The kernel of `eprt.load` on CUDA."""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from eprt.launching import CachedKernel
from eprt.rounding import ceil_div, next_power_of_2

BLOCK = 1024


# The number of ids changes from call to call: specialised, a new one would compile again after warm-up.
@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids_ptr", "counts_ptr"])
def _count_kernel(ids_ptr, counts_ptr, num_ids, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program counts BLOCK ids; bin E collects what is no expert."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + place, mask=place < num_ids, other=E)
    ids = tl.where((ids >= 0) & (ids < E), ids, E)
    found = tl.histogram(ids, BINS).to(tl.int64)
    expert = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + expert, found, mask=(expert < E) & (found > 0), sem="relaxed")


def count_ids(ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Add to counts[E] int64 how often each expert is in `ids`, any shape, int32."""
    ids, E = ids.contiguous(), counts.numel()
    if ids.numel() == 0:
        return
    _prepared_count(ids.device, E)((ceil_div(ids.numel(), BLOCK), 1, 1), ids, counts, ids.numel())


@cache
def _prepared_count(device: torch.device, E: int) -> CachedKernel:
    constants = {"E": E, "BINS": next_power_of_2(E + 1), "BLOCK": BLOCK}
    return CachedKernel(_count_kernel, device, (torch.int32, torch.int64, 2), constants)

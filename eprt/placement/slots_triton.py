"""The kernel of `eprt.placement` on CUDA: torch's own way there is 5 to 8 launches."""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from eprt.launching import CachedKernel, like
from eprt.rounding import ceil_div

BLOCK = 256  # few ids a program: each costs two loads, one after the other, so many programs wait for them together


# Sizes that change from call to call, or from rank to rank, must not be specialised: they would compile again.
@triton.jit(do_not_specialize=["num_ids", "first"], do_not_specialize_on_alignment=["ids_ptr"])
def _slots_kernel(
    ids_ptr, slots_ptr, replicas_ptr, out_ptr, num_ids, first, E, width,
    K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """slots [E + 1, width], replicas [E + 1]; row E is that of "no expert". SHARED: token t takes replica t + first."""
    if PDL:  # launched while the kernel before still ends, whose ids must not be touched before it has
        gdc_wait()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_ids
    expert = tl.load(ids_ptr + place, mask=inside, other=0)
    expert = tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
    cell = expert * width
    if SHARED:
        cell += (place // K + first) % tl.load(replicas_ptr + expert)
    tl.store(out_ptr + place, tl.load(slots_ptr + cell), mask=inside)


def slots_of(ids: torch.Tensor, slots: torch.Tensor, replicas: torch.Tensor, first: int) -> torch.Tensor:
    """[T, K] int32 ids of slots; see `eprt.placement.SlotTable.slots_of`.

    Args:
        ids: [T, K], int32 or int64.
        slots: [E + 1, width] int32: each expert's slots, first in its row; the last row's are "no slot".
        replicas: [E + 1] int32: how many of a row count.
        first: which replica token 0 takes.
    """
    ids = ids.contiguous()
    found = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    if ids.numel():
        E, width = slots.shape[0] - 1, slots.shape[1]
        kernel = _prepared_slots(ids.device, ids.dtype, ids.shape[1], E, width)
        kernel((ceil_div(ids.numel(), BLOCK), 1, 1), ids, slots, replicas, found, ids.numel(), first, E, width)
    return found


@cache
def _prepared_slots(device: torch.device, ids: torch.dtype, K: int, E: int, width: int) -> CachedKernel:
    arguments = ids, torch.int32, torch.int32, torch.int32, 2, 2, like(E), like(width)
    constants = {"K": K, "SHARED": width > 1, "BLOCK": BLOCK}
    return CachedKernel(_slots_kernel, device, arguments, constants, pdl=True)

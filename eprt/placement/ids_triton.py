"""The kernels of `eprt.placement` on CUDA: ids of experts become ids of slots in one launch (torch's own way there is 5
to 8), and are counted in another."""
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
from eprt.rounding import ceil_div, next_power_of_2

SLOTS_BLOCK = (
    256  # few ids a program: each costs two loads, one after the other, so many programs wait for them together
)
COUNT_BLOCK = 1024


# Sizes that change from call to call, or from rank to rank, must not be specialised: they would compile again.
@triton.jit(do_not_specialize=["num_ids", "first"], do_not_specialize_on_alignment=["ids_ptr"])
def _slots_kernel(
    ids_ptr, slots_ptr, replicas_ptr, out_ptr, num_ids, first, E, width,
    K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reads slots [E + 1, width], replicas [E + 1]; row E: "no expert". SHARED: token t takes replica t + first."""
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
    """Returns [T, K] int32 ids of slots; see `eprt.placement.SlotTable.slots_of`.

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
        kernel((ceil_div(ids.numel(), SLOTS_BLOCK), 1, 1), ids, slots, replicas, found, ids.numel(), first, E, width)
    return found


@cache
def _prepared_slots(device: torch.device, ids: torch.dtype, K: int, E: int, width: int) -> CachedKernel:
    arguments = ids, torch.int32, torch.int32, torch.int32, 2, 2, like(E), like(width)
    constants = {"K": K, "SHARED": width > 1, "BLOCK": SLOTS_BLOCK}
    return CachedKernel(_slots_kernel, device, arguments, constants, pdl=True)


# The number of ids changes from call to call: specialised, a new one would compile again after warm-up.
@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids_ptr", "counts_ptr"])
def _count_kernel(ids_ptr, counts_ptr, num_ids, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts BLOCK ids in each program; bin E collects what is no expert."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + place, mask=place < num_ids, other=E)
    ids = tl.where((ids >= 0) & (ids < E), ids, E)
    found = tl.histogram(ids, BINS).to(tl.int64)
    expert = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + expert, found, mask=(expert < E) & (found > 0), sem="relaxed")


def count_ids(ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds to counts[E] int64 how often each expert is in `ids`, any shape, int32."""
    ids, E = ids.contiguous(), counts.numel()
    if ids.numel() == 0:
        return
    _prepared_count(ids.device, E)((ceil_div(ids.numel(), COUNT_BLOCK), 1, 1), ids, counts, ids.numel())


@cache
def _prepared_count(device: torch.device, E: int) -> CachedKernel:
    constants = {"E": E, "BINS": next_power_of_2(E + 1), "BLOCK": COUNT_BLOCK}
    return CachedKernel(_count_kernel, device, (torch.int32, torch.int64, 2), constants)

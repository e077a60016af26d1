# ruff: noqa: ANN001, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Triton kernels of `eprt.experts.permute`. Imported only where CUDA tensors are.

Kernels with PDL use programmatic dependent launch: they touch no memory before `gdc_wait`, which returns when the
previous kernel is done.

Rows are sorted and copied in one of two ways. Up to SMALL_IDS top-k entries one launch does both: each row's program
counts for itself the entries that come before its own, reading all ids, which then lie in L2. Above, entries are sorted
first (`sort_by_expert_triton`) and the rows copied by a second launch; both in one would then read N * K ids N times.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from eprt.experts.sort_by_expert_triton import sort_by_expert
from eprt.launching import CachedKernel, like, starts_aligned
from eprt.rounding import ceil_div, next_power_of_2
from eprt.tokens import aligned

SMALL_IDS = 4096  # N * K up to which one launch that reads all ids in every program is cheaper
SUM_BLOCK = 2048  # columns per program of long rows: enough loads in flight where few entries are local
COPY_BLOCK = 1024  # columns a program moves at a time: 4 warps x 8 values of 16 bits
_WARP_COLUMNS = 256  # of a sum, 8 a thread: 16 took a microsecond more of gpt-oss-120b, up to 512 tokens on an H200


@triton.jit
def _copy_row(x_ptr, rows_ptr, row, place, ok, H, BLOCK_H: tl.constexpr):
    """Copies one input row to each of its places [K] where `ok`, reading it once."""
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row.to(tl.int64) * H + cols, mask=cols < H)
        target = rows_ptr + place.to(tl.int64)[:, None] * H + cols[None, :]
        value = tl.broadcast_to(x[None, :].to(rows_ptr.dtype.element_ty), target.shape)
        tl.store(target, value, mask=ok[:, None] & (cols < H)[None, :])


# Sizes that change from call to call must not be specialised: a new N would compile again after warm-up.
@triton.jit(do_not_specialize=["num_rows", "num_ids", "first", "L"], do_not_specialize_on_alignment=["ids_ptr"])
def _group_small(
    ids_ptr, x_ptr, rows_ptr, place_ptr, offsets_ptr, num_rows, num_ids, first, L, H,
    K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sorts and copies in one launch: program p handles row p, and writes the offset of expert p."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    entry = row * K + k
    ok = (k < K) & (row < num_rows)
    own = tl.load(ids_ptr + entry, mask=ok, other=first - 1) - first
    ok = ok & (own >= 0) & (own < L)
    before = tl.zeros([K_PAD, BLOCK_S], dtype=tl.int32)
    below = tl.zeros([BLOCK_S], dtype=tl.int32)
    for start in range(0, num_ids, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        other = tl.load(ids_ptr + s, mask=s < num_ids, other=first - 1) - first
        other = tl.where((other >= 0) & (other < L), other, L)
        earlier = (other[None, :] == own[:, None]) & (s[None, :] < entry[:, None])
        before += ((other[None, :] < own[:, None]) | earlier).to(tl.int32)
        below += (other < row).to(tl.int32)
    place = tl.sum(before, axis=1)
    tl.store(place_ptr + entry, tl.where(ok, place, -1), mask=(k < K) & (row < num_rows))
    if row <= L:
        tl.store(offsets_ptr + row, tl.sum(below, axis=0).to(tl.int64))
    if row < num_rows:
        _copy_row(x_ptr, rows_ptr, row, place, ok, H, BLOCK_H)


@triton.jit
def _copy_rows(x_ptr, rows_ptr, place_ptr, H, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    place = tl.load(place_ptr + row * K + k, mask=k < K, other=-1)
    _copy_row(x_ptr, rows_ptr, row, place, place >= 0, H, BLOCK_H)


@triton.jit(do_not_specialize_on_alignment=["weights_ptr"])
def _weighted_sum(
    rows_ptr, place_ptr, weights_ptr, out_ptr, H, K: tl.constexpr, BLOCK_H: tl.constexpr, EVERY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes the weighted sum of K rows. They are loaded without a branch in between, so that all loads are in flight
    together; nothing reads them again."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    last = -1
    for k in tl.static_range(K):
        place = tl.load(place_ptr + row * K + k)
        weight = tl.load(weights_ptr + row * K + k, mask=place >= 0, other=0.0)
        there = rows_ptr + place.to(tl.int64) * H + cols
        value = tl.load(there, mask=(cols < H) & (place >= 0), other=0.0, eviction_policy="evict_first")
        total += weight * value.to(tl.float32)
        last = tl.maximum(last, place)
    target = out_ptr + row.to(tl.int64) * H + cols
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(cols < H) & (EVERY_ROW or last >= 0))


def group_rows(
    hidden: torch.Tensor, ids: torch.Tensor, first: int, L: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows [N * K, H], offsets, place)."""
    N, K = ids.shape
    H, device = hidden.shape[1], hidden.device
    hidden = aligned(hidden)
    rows = torch.empty((N * K, H), dtype=dtype, device=device)
    if N * K <= SMALL_IDS:
        offsets = torch.empty(L + 1, dtype=torch.int64, device=device)
        place = torch.empty((N, K), dtype=torch.int32, device=device)
        kernel = _prepared_small(device, hidden.dtype, dtype, H, K)
        kernel((max(N, L + 1), 1, 1), ids.contiguous(), hidden, rows, place, offsets, N, N * K, first, L, H)
    else:
        offsets, place = sort_by_expert(ids, first, L)
        _prepared_copy(device, hidden.dtype, dtype, H, K)((N, 1, 1), hidden, rows, place, H)
    return rows, offsets, place


def weighted_unpermute(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, every_row: bool
) -> None:
    """See `eprt.experts.permute.weighted_unpermute`."""
    if not out.is_contiguous():
        whole = torch.empty_like(out, memory_format=torch.contiguous_format)
        if not every_row:
            whole.copy_(out)
        weighted_unpermute(rows, place, weights, whole, every_row)
        out.copy_(whole)
        return
    N, K = place.shape
    H = rows.shape[1]
    weights = weights.contiguous()
    if starts_aligned(out):
        kernel, blocks = _prepared_sum(out.device, rows.dtype, out.dtype, H, K, every_row)
        kernel((N, blocks, 1), rows, place, weights, out, H)
    else:
        block = _sum_block(H)
        _weighted_sum[N, ceil_div(H, block)](rows, place, weights, out, H, K, block, every_row, False)


def _sum_block(H: int) -> int:
    """Columns that a program sums."""
    return min(SUM_BLOCK if H > SUM_BLOCK else COPY_BLOCK, next_power_of_2(H))


def _column_block(H: int, K: int) -> int:
    """Columns at a time such that K copies of a block stay in registers."""
    return min(next_power_of_2(H), max(128, COPY_BLOCK * 4 // next_power_of_2(K)), COPY_BLOCK)


@cache
def _prepared_small(device: torch.device, source: torch.dtype, target: torch.dtype, H: int, K: int) -> CachedKernel:
    arguments = torch.int32, source, target, torch.int32, torch.int64, 2, 2, 2, 2, like(H)
    sizes = {"K": K, "K_PAD": next_power_of_2(K), "BLOCK_S": 512, "BLOCK_H": _column_block(H, K)}
    return CachedKernel(_group_small, device, arguments, sizes, pdl=True)


@cache
def _prepared_copy(device: torch.device, source: torch.dtype, target: torch.dtype, H: int, K: int) -> CachedKernel:
    constants = {"K": K, "K_PAD": next_power_of_2(K), "BLOCK_H": _column_block(H, K)}
    return CachedKernel(_copy_rows, device, (source, target, torch.int32, like(H)), constants)


@cache
def _prepared_sum(
    device: torch.device, source: torch.dtype, target: torch.dtype, H: int, K: int, every_row: bool
) -> tuple[CachedKernel, int]:
    """And how many programs share a row."""
    block = _sum_block(H)
    arguments = source, torch.int32, torch.float32, target, like(H)
    constants = {"K": K, "BLOCK_H": block, "EVERY_ROW": every_row}
    warps = max(1, block // _WARP_COLUMNS)
    return CachedKernel(_weighted_sum, device, arguments, constants, pdl=True, num_warps=warps), ceil_div(H, block)

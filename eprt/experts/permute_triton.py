# ruff: noqa: ANN001, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Triton kernels of `eprt.experts.permute`. Imported only where CUDA tensors are.

Two ways to sort, by size: up to SMALL_SLOTS slots one launch does everything, each row counting for itself which
slots come before its own (every program reads all ids, which then sit in L2); above, a histogram per block of slots,
then each block derives its base from all histograms, then the rows are copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eprt.rounding import ceil_div, next_power_of_2

SMALL_SLOTS = 4096  # N * K up to which one launch that reads all ids in every program is the cheaper way
SUM_BLOCK = 2048  # columns a program sums of long rows: enough on their way where few slots are local
COPY_BLOCK = 1024  # columns a program moves at a time: 4 warps x 8 values of 16 bits


@triton.jit
def _copy_row(x_ptr, rows_ptr, row, place, slot_ok, H, BLOCK_H: tl.constexpr):
    """Copy one input row to each of its places [K]; read once, written where `slot_ok`."""
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row.to(tl.int64) * H + cols, mask=cols < H)
        target = rows_ptr + place.to(tl.int64)[:, None] * H + cols[None, :]
        value = tl.broadcast_to(x[None, :].to(rows_ptr.dtype.element_ty), target.shape)
        tl.store(target, value, mask=slot_ok[:, None] & (cols < H)[None, :])


# Sizes that change from call to call must not be specialised: a new N would compile again after warm-up.
@triton.jit(do_not_specialize=["num_rows", "num_slots", "first", "L"], do_not_specialize_on_alignment=["ids_ptr"])
def _group_small(
    ids_ptr, x_ptr, rows_ptr, place_ptr, offsets_ptr, num_rows, num_slots, first, L, H,
    K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Program p places (and copies) row p, and counts the rows of the experts below p."""
    row = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    slot = row * K + k
    slot_ok = (k < K) & (row < num_rows)
    own = tl.load(ids_ptr + slot, mask=slot_ok, other=first - 1) - first
    slot_ok = slot_ok & (own >= 0) & (own < L)
    before = tl.zeros([K_PAD, BLOCK_S], dtype=tl.int32)
    below = tl.zeros([BLOCK_S], dtype=tl.int32)
    for start in range(0, num_slots, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        other = tl.load(ids_ptr + s, mask=s < num_slots, other=first - 1) - first
        other = tl.where((other >= 0) & (other < L), other, L)
        earlier = (other[None, :] == own[:, None]) & (s[None, :] < slot[:, None])
        before += ((other[None, :] < own[:, None]) | earlier).to(tl.int32)
        below += (other < row).to(tl.int32)
    place = tl.sum(before, axis=1)
    tl.store(place_ptr + slot, tl.where(slot_ok, place, -1), mask=(k < K) & (row < num_rows))
    if row <= L:
        tl.store(offsets_ptr + row, tl.sum(below, axis=0).to(tl.int64))
    if COPY and row < num_rows:
        _copy_row(x_ptr, rows_ptr, row, place, slot_ok, H, BLOCK_H)


@triton.jit(do_not_specialize=["num_slots", "first", "L"], do_not_specialize_on_alignment=["ids_ptr"])
def _histogram(ids_ptr, hist_ptr, num_slots, first, L, L_PAD: tl.constexpr, BLOCK_S: tl.constexpr):
    block = tl.program_id(0)
    s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    own = tl.load(ids_ptr + s, mask=s < num_slots, other=first - 1) - first
    expert = tl.arange(0, L_PAD)
    same = (own[:, None] == expert[None, :]) & (expert < L)[None, :]
    tl.store(hist_ptr + block * L_PAD + expert, tl.sum(same.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "first", "L"], do_not_specialize_on_alignment=["ids_ptr"])
def _place_from_histograms(
    ids_ptr, hist_ptr, place_ptr, offsets_ptr, num_slots, num_blocks, first, L,
    L_PAD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.arange(0, L_PAD)
    total = tl.zeros([L_PAD], dtype=tl.int32)
    earlier = tl.zeros([L_PAD], dtype=tl.int32)
    for start in range(0, num_blocks, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        part = tl.load(hist_ptr + b[:, None] * L_PAD + expert[None, :], mask=(b < num_blocks)[:, None], other=0)
        total += tl.sum(part, axis=0)
        earlier += tl.sum(tl.where((b < block)[:, None], part, 0), axis=0)
    first_row = tl.cumsum(total, axis=0) - total
    s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    own = tl.load(ids_ptr + s, mask=s < num_slots, other=first - 1) - first
    same = ((own[:, None] == expert[None, :]) & (expert < L)[None, :]).to(tl.int32)
    position = tl.cumsum(same, axis=0) - same + (first_row + earlier)[None, :]
    place = tl.sum(same * position, axis=1)
    tl.store(place_ptr + s, tl.where(tl.sum(same, axis=1) > 0, place, -1), mask=s < num_slots)
    if block == 0:
        tl.store(offsets_ptr + expert, first_row.to(tl.int64), mask=expert < L)
        tl.store(offsets_ptr + L, tl.sum(total, axis=0).to(tl.int64))


@triton.jit
def _copy_rows(x_ptr, rows_ptr, place_ptr, H, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    place = tl.load(place_ptr + row * K + k, mask=k < K, other=-1)
    _copy_row(x_ptr, rows_ptr, row, place, place >= 0, H, BLOCK_H)


@triton.jit(do_not_specialize_on_alignment=["weights_ptr"])
def _weighted_sum(
    rows_ptr, place_ptr, weights_ptr, out_ptr, H, K: tl.constexpr, BLOCK_H: tl.constexpr, EVERY_ROW: tl.constexpr,
):  # fmt: skip
    """The K rows are loaded without a branch between them, so that all are on their way at once."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    last = -1
    for k in tl.static_range(K):
        place = tl.load(place_ptr + row * K + k)
        weight = tl.load(weights_ptr + row * K + k, mask=place >= 0, other=0.0)
        value = tl.load(rows_ptr + place.to(tl.int64) * H + cols, mask=(cols < H) & (place >= 0), other=0.0)
        total += weight * value.to(tl.float32)
        last = tl.maximum(last, place)
    target = out_ptr + row.to(tl.int64) * H + cols
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(cols < H) & (EVERY_ROW or last >= 0))


@triton.jit
def _copy_columns(source_ptr, target_ptr, source_stride, target_stride, width, target_width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source_ptr + row * source_stride + cols, mask=cols < width, other=0.0)
    tl.store(target_ptr + row * target_stride + cols, x.to(target_ptr.dtype.element_ty), mask=cols < target_width)


def copy_columns(source: torch.Tensor, target: torch.Tensor) -> None:
    """See `eprt.experts.permute.copy_columns`; the last dimension of both is contiguous."""
    width, target_width = min(source.shape[1], target.shape[1]), target.shape[1]
    block = min(COPY_BLOCK, next_power_of_2(target_width))
    grid = (source.shape[0], ceil_div(target_width, block))
    _copy_columns[grid](source, target, source.stride(0), target.stride(0), width, target_width, block)


def place_slots(ids: torch.Tensor, first: int, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets [L + 1] int64, place [N, K] int32) of ids [N, K] int32."""
    offsets, place = _outputs(ids, L)
    if ids.numel() <= SMALL_SLOTS:
        _launch_small(ids, None, None, offsets, place, first, L)
    else:
        _place_large(ids, offsets, place, first, L)
    return offsets, place


def group_rows(
    hidden: torch.Tensor, ids: torch.Tensor, first: int, L: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows [N * K, H], offsets, place)."""
    N, K = ids.shape
    H = hidden.shape[1]
    hidden = hidden.contiguous()
    rows = torch.empty((N * K, H), dtype=dtype, device=hidden.device)
    offsets, place = _outputs(ids, L)
    if ids.numel() <= SMALL_SLOTS:
        _launch_small(ids, hidden, rows, offsets, place, first, L)
    else:
        _place_large(ids, offsets, place, first, L)
        _copy_rows[(N,)](hidden, rows, place, H, K, next_power_of_2(K), _column_block(H, K))
    return rows, offsets, place


def weighted_unpermute(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, every_row: bool
) -> None:
    """See `eprt.experts.permute.weighted_unpermute`; `out` is contiguous."""
    N, K = place.shape
    H = rows.shape[1]
    block = min(SUM_BLOCK if H > SUM_BLOCK else COPY_BLOCK, next_power_of_2(H))
    _weighted_sum[(N, ceil_div(H, block))](rows, place, weights, out, H, K, block, every_row)


def _outputs(ids: torch.Tensor, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.empty(L + 1, dtype=torch.int64, device=ids.device)
    return offsets, torch.empty_like(ids, memory_format=torch.contiguous_format)


def _column_block(H: int, K: int) -> int:
    """Columns at a time such that K copies of a block stay in registers."""
    return min(next_power_of_2(H), max(128, COPY_BLOCK * 4 // next_power_of_2(K)), COPY_BLOCK)


def _launch_small(
    ids: torch.Tensor,
    hidden: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor,
    place: torch.Tensor,
    first: int,
    L: int,
) -> None:
    N, K = ids.shape
    H = 0 if hidden is None else hidden.shape[1]
    _group_small[(max(N, L + 1),)](
        ids.contiguous(), hidden, rows, place, offsets, N, N * K, first, L, H,
        K=K, K_PAD=next_power_of_2(K), BLOCK_S=512, BLOCK_H=_column_block(H or 128, K),
        COPY=hidden is not None,
    )  # fmt: skip


def _place_large(ids: torch.Tensor, offsets: torch.Tensor, place: torch.Tensor, first: int, L: int) -> None:
    num_slots = ids.numel()
    l_pad = max(16, next_power_of_2(L))
    block_s = max(16, min(256, 16384 // l_pad))  # the one-hot matrix of a block stays in registers
    num_blocks = ceil_div(num_slots, block_s)
    hist = torch.empty((num_blocks, l_pad), dtype=torch.int32, device=ids.device)
    ids = ids.contiguous()
    _histogram[(num_blocks,)](ids, hist, num_slots, first, L, L_PAD=l_pad, BLOCK_S=block_s, num_warps=8)
    _place_from_histograms[(num_blocks,)](
        ids, hist, place, offsets, num_slots, num_blocks, first, L,
        L_PAD=l_pad, BLOCK_S=block_s, BLOCK_B=max(1, 2048 // l_pad), num_warps=8,
    )  # fmt: skip

"""Rows grouped by expert, and back: what a grouped GEMM needs around it.

`group_rows` copies every local (row, slot) of FlatTokens into rows sorted by expert; slots of other ranks and of no
expert are dropped. `weighted_unpermute` brings the K results of a row together. Buffers have N * K rows whatever the
routing and nothing is read by the host, so both can be captured in a CUDA graph. The order inside an expert is the
order of the slots, so results don't depend on timing.

On CUDA the work is done by Triton kernels (`permute_triton.py`), elsewhere by the plain torch below, which is also
what the kernels are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eprt.quant import decode_payload
from eprt.tokens import Payload


@dataclass(frozen=True)
class ExpertOrder:
    """Where each (row, slot) went.

    Attributes:
        offsets: [L + 1] int64; rows of local expert e are [offsets[e], offsets[e + 1]), offsets[L] in all.
        place: [N, K] int32, the sorted row of a slot, -1 where its expert isn't local.
    """

    offsets: torch.Tensor
    place: torch.Tensor


def group_by_expert(ids: torch.Tensor, first_expert: int, num_local: int) -> ExpertOrder:
    """The order alone. `ids` is [N, K] int32, global; anything outside the local range is dropped."""
    if ids.is_cuda:
        from eprt.experts import sort_by_expert_triton

        return ExpertOrder(*sort_by_expert_triton.sort_by_expert(ids, first_expert, num_local))
    return _group_by_expert_torch(ids, first_expert, num_local)


def group_rows(
    hidden: torch.Tensor, ids: torch.Tensor, first_expert: int, num_local: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ExpertOrder]:
    """Sorted rows [N * K, H] in `dtype` and their order; rows at and past offsets[L] are garbage.

    Args:
        hidden: [N, H] float tensor, contiguous.
        ids: [N, K] int32, global.
    """
    if ids.is_cuda:
        from eprt.experts import permute_triton

        rows, offsets, place = permute_triton.group_rows(hidden, ids, first_expert, num_local, dtype)
        return rows, ExpertOrder(offsets, place)
    order = _group_by_expert_torch(ids, first_expert, num_local)
    N, K = ids.shape
    # One spare row swallows the slots that aren't local, so that no size depends on the routing.
    rows = torch.empty((N * K + 1, hidden.shape[1]), dtype=dtype, device=hidden.device)
    target = torch.where(order.place >= 0, order.place, N * K).flatten().long()
    rows.index_copy_(0, target, hidden.to(dtype).repeat_interleave(K, dim=0))
    return rows[:-1], order


def weighted_unpermute(
    rows: torch.Tensor, order: ExpertOrder, weights: torch.Tensor, out: torch.Tensor, *, every_row: bool
) -> None:
    """`out[n] = sum over k of weights[n, k] * rows[place[n, k]]`, summed in float32 in the order of the slots.

    Args:
        rows: [N * K, H] results in sorted order.
        weights: [N, K] float32; ignored where the slot isn't local.
        out: [N, H], written.
        every_row: also write zeros into rows with nothing local; else those stay as they are.
    """
    if rows.is_cuda:
        from eprt.experts import permute_triton

        permute_triton.weighted_unpermute(rows, order.place, weights, out, every_row)
        return
    local = order.place >= 0
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for k in range(local.shape[1]):
        here = local[:, k, None]
        taken = torch.where(here, rows.index_select(0, order.place[:, k].clamp(min=0)), 0.0)
        total.addcmul_(taken, torch.where(here, weights[:, k, None], 0.0))
    written = total.to(out.dtype)
    out.copy_(written if every_row else torch.where(local.any(dim=1, keepdim=True), written, out))


def copy_columns(source: torch.Tensor, target: torch.Tensor) -> None:
    """[N, a] into [N, b]: what fits is copied and converted, the rest of `target` becomes zero. One pass."""
    if source.is_cuda:
        from eprt.experts import permute_triton

        permute_triton.copy_columns(source, target)
        return
    width = min(source.shape[1], target.shape[1])
    target[:, :width] = source[:, :width]
    target[:, width:] = 0


def plain_hidden(payload: Payload) -> torch.Tensor:
    """Hidden states in bf16 or float32. Unlike `decode_payload` it doesn't check plain ones: dispatchers did."""
    return payload.data if payload.scale is None else decode_payload(payload)


def _group_by_expert_torch(ids: torch.Tensor, first_expert: int, num_local: int) -> ExpertOrder:
    local = ids.flatten().long() - first_expert
    local = torch.where((local >= 0) & (local < num_local), local, num_local)
    order = local.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    counts = local.new_zeros(num_local + 1).scatter_add_(0, local, torch.ones_like(local))[:num_local]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = torch.where(local < num_local, place, -1).to(torch.int32)
    return ExpertOrder(offsets, place.view(ids.shape))

"""Permutes token rows by expert around a grouped GEMM, and back.

`group_rows` copies each token once per local top-k entry into rows sorted by expert; entries of non-local experts are
dropped. `weighted_unpermute` sums the K results of a token. Buffers have N * K rows whatever the routing and nothing is
read by the host, so both can be captured in a CUDA graph. The sort is stable, so results don't depend on timing.

On CUDA the work is done by Triton kernels (`permute_triton.py`), elsewhere by the plain torch below, which is also
what the kernels are tested against.
"""

from __future__ import annotations

import torch

from eprt.expert_major import ExpertOrder, sort_by_expert, weighted_sum
from eprt.quant import decode_payload
from eprt.tokens import Payload


def group_by_expert(ids: torch.Tensor, first_expert: int, num_local: int) -> ExpertOrder:
    """Returns the order of top-k ids [N, K] int32 (global); those outside the local range are dropped."""
    if ids.is_cuda:
        from eprt.experts import sort_by_expert_triton

        return ExpertOrder(*sort_by_expert_triton.sort_by_expert(ids, first_expert, num_local))
    return sort_by_expert(ids, first_expert, num_local)


def group_rows(
    hidden: torch.Tensor, ids: torch.Tensor, first_expert: int, num_local: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ExpertOrder]:
    """Returns sorted rows [N * K, H] in `dtype` and their order; rows at and past offsets[L] are garbage.

    Args:
        hidden: [N, H] float tensor, contiguous.
        ids: [N, K] int32, global.
    """
    if ids.is_cuda:
        from eprt.experts import permute_triton

        rows, offsets, place = permute_triton.group_rows(hidden, ids, first_expert, num_local, dtype)
        return rows, ExpertOrder(offsets, place)
    order = sort_by_expert(ids, first_expert, num_local)
    N, K = ids.shape
    # One spare row takes the entries that aren't local, so that no size depends on the routing.
    rows = torch.empty((N * K + 1, hidden.shape[1]), dtype=dtype, device=hidden.device)
    target = torch.where(order.place >= 0, order.place, N * K).flatten().long()
    rows.index_copy_(0, target, hidden.to(dtype).repeat_interleave(K, dim=0))
    return rows[:-1], order


def weighted_unpermute(
    rows: torch.Tensor, order: ExpertOrder, weights: torch.Tensor, out: torch.Tensor, *, every_row: bool
) -> None:
    """Writes `out[n] = sum over k of weights[n, k] * rows[place[n, k]]`, summed in float32 in the order of k.

    Args:
        rows: [N * K, H] results in sorted order.
        weights: [N, K] float32; ignored where the expert isn't local.
        out: [N, H], written.
        every_row: also write zeros into rows with nothing local; else those stay as they are.
    """
    if rows.is_cuda:
        from eprt.experts import permute_triton

        permute_triton.weighted_unpermute(rows, order.place, weights, out, every_row)
        return
    written = weighted_sum(rows, order.place, weights).to(out.dtype)
    out.copy_(written if every_row else torch.where((order.place >= 0).any(1, keepdim=True), written, out))


def plain_hidden(payload: Payload) -> torch.Tensor:
    """Returns hidden states in bf16 or float32; plain ones are not checked again, as dispatchers did that."""
    return payload.data if payload.scale is None else decode_payload(payload)

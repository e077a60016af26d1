"""Converts between the two token formats, and between strided and dense expert-major rows.

Expert-major tokens are the masked layout of DeepGEMM and DeepEP: [L, M, ...], of which each local expert's first
`counts` rows are valid. Copies touch valid rows only, which are few in decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eprt.placement import ExpertShard
from eprt.tokens import ExpertMajorTokens, FlatTokens, as_bytes


def copy_valid_rows(source: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> None:
    """Copies the rows below counts [L] int32 from [L, M, n] to [L, M, n] of the same dtype and any strides."""
    source, target = as_bytes(source), as_bytes(target)
    if source.is_cuda:
        from eprt import expert_major_triton

        expert_major_triton.copy_valid_rows(source, target, counts)
        return
    valid = torch.arange(source.shape[1], device=counts.device) < counts[:, None]
    target[valid] = source[valid]


def dense(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns `rows` [L, M, n] itself if contiguous, else a copy of its valid rows with garbage elsewhere."""
    if rows.is_contiguous():
        return rows
    copied = torch.empty_like(rows, memory_format=torch.contiguous_format)
    copy_valid_rows(rows, copied, counts)
    return copied


@dataclass(frozen=True)
class ExpertOrder:
    """The sorted row of each top-k entry.

    Attributes:
        offsets: [L + 1] int64; rows of local expert e are [offsets[e], offsets[e + 1]), offsets[L] in all.
        place: [N, K] int32, an entry's sorted row, -1 where its expert isn't local.
    """

    offsets: torch.Tensor
    place: torch.Tensor


def sort_by_expert(ids: torch.Tensor, first_expert: int, num_local: int) -> ExpertOrder:
    """Sorts top-k ids [N, K] (global) by local expert, stably, by torch alone. Static shapes, no host sync."""
    local = ids.flatten().long() - first_expert
    local = torch.where((local >= 0) & (local < num_local), local, num_local)
    order = local.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    counts = local.new_zeros(num_local + 1).scatter_add_(0, local, torch.ones_like(local))[:num_local]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = torch.where(local < num_local, place, -1).to(torch.int32)
    return ExpertOrder(offsets, place.view(ids.shape))


def expert_major_from_flat(
    flat: FlatTokens, shard: ExpertShard, rows_per_expert: int
) -> tuple[ExpertMajorTokens, torch.Tensor]:
    """Lays flat rows out by expert, in row order. Static shapes, no host sync.

    `rows_per_expert` (M) must be at least the largest count: N suffices if no row names an expert twice, N * K always.

    Returns:
        the tokens, and place [N, K] int64: each top-k entry's row of [L * M], -1 where the expert isn't local.
    """
    num_local = shard.num_local_experts
    order = sort_by_expert(flat.ids, shard.first_expert, num_local)
    local = (flat.ids.long() - shard.first_expert).clamp(0, num_local - 1)
    row = local * rows_per_expert + order.place - order.offsets[local]
    # One spare row takes the entries that aren't local, so the scatter needs no mask and no sync.
    target = torch.where(order.place >= 0, row, num_local * rows_per_expert).flatten()
    source = torch.arange(flat.num_rows, device=flat.ids.device).repeat_interleave(flat.ids.shape[1])

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        laid_out = tensor.new_empty((num_local * rows_per_expert + 1, *tensor.shape[1:]))
        as_bytes(laid_out).index_copy_(0, target, as_bytes(tensor).index_select(0, source))
        return laid_out[:-1].view(num_local, rows_per_expert, *tensor.shape[1:])

    tokens = ExpertMajorTokens(flat.hidden.mapped(spread), order.offsets.diff().to(torch.int32))
    return tokens, torch.where(order.place >= 0, row, -1)


def weighted_sum(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns [N, H] float32: `sum over k of weights[n, k] * rows[place[n, k]]`, in the order of k, by torch alone.

    Args:
        rows: [.., H], more dimensions in front are one.
        place: [N, K] int32 or int64, negative where the expert isn't local: such an entry adds 0.
        weights: [N, K] float32.
    """
    rows, (num_rows, top_k) = rows.flatten(0, -2), place.shape
    total = torch.zeros(num_rows, rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0:
        return total
    # Masked twice: an entry that isn't local may hold any weight, and row 0 may be garbage.
    local, source = place >= 0, place.clamp(min=0)
    weights = torch.where(local, weights, 0.0)
    for k in range(top_k):
        taken = torch.where(local[:, k, None], rows.index_select(0, source[:, k]), 0.0)
        total.addcmul_(taken, weights[:, k, None])
    return total


def flat_from_expert_major(tokens: ExpertMajorTokens, shard: ExpertShard) -> FlatTokens:
    """Views expert-major rows as L * M flat rows with one id and weight 1; rows past the counts get the invalid id. No
    host sync."""
    num_local, rows = tokens.hidden.data.shape[:2]
    row = torch.arange(rows, device=tokens.counts.device)
    expert = torch.arange(num_local, device=tokens.counts.device, dtype=torch.int32) + shard.first_expert
    ids = torch.where(row[None, :] < tokens.counts[:, None], expert[:, None], shard.num_experts).to(torch.int32)
    weights = torch.ones(num_local * rows, 1, dtype=torch.float32, device=ids.device)
    return FlatTokens(tokens.hidden.mapped(lambda x: x.flatten(0, 1)), ids.view(-1, 1), weights, shard.num_experts)

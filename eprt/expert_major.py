"""Between the two token formats, and between expert-major rows that lie apart and dense ones.

Copies of slabs touch valid rows alone, which are few in decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eprt.placement import ExpertShard
from eprt.tokens import ExpertMajorTokens, FlatTokens, as_bytes


def copy_valid_rows(source: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> None:
    """[L, M, n] to [L, M, n] of the same dtype, rows below counts [L] int32 alone, whatever the strides."""
    if source.dtype.itemsize == 1:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    if source.is_cuda:
        from eprt import expert_major_triton

        expert_major_triton.copy_valid_rows(source, target, counts)
        return
    valid = torch.arange(source.shape[1]) < counts[:, None]
    target[valid] = source[valid]


def dense(slabs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`slabs` [L, M, n] itself if it is contiguous, else a copy of its valid rows, garbage elsewhere."""
    if slabs.is_contiguous():
        return slabs
    copied = torch.empty_like(slabs, memory_format=torch.contiguous_format)
    copy_valid_rows(slabs, copied, counts)
    return copied


@dataclass(frozen=True)
class ExpertMajorIndex:
    """Where each (row, slot) of a FlatTokens went: `slab_row` [N, K] int64 into [L * M], -1 where not local."""

    slab_row: torch.Tensor
    weights: torch.Tensor


def expert_major_from_flat(
    flat: FlatTokens, shard: ExpertShard, rows_per_expert: int
) -> tuple[ExpertMajorTokens, ExpertMajorIndex]:
    """Lay flat rows out by expert, in row order. Static shapes, no host sync.

    `rows_per_expert` (M) must be at least the largest count: N suffices if no row names an expert twice, N * K always.
    """
    num_local = shard.num_local_experts
    local = flat.ids.long() - shard.first_expert
    mine = (local >= 0) & (local < num_local)
    slot_expert = torch.where(mine, local, num_local).flatten()
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=local.device)
    counts.index_add_(0, slot_expert, torch.ones_like(slot_expert))
    # A slot's place in its slab is its place among all slots sorted by expert, less where that expert starts.
    by_expert, order = slot_expert.sort(stable=True)
    place = torch.arange(slot_expert.numel(), device=local.device) - (counts.cumsum(0) - counts)[by_expert]
    position = torch.empty_like(slot_expert).index_copy_(0, order, place)
    slab_row = torch.where(slot_expert < num_local, slot_expert * rows_per_expert + position, -1)
    # One spare row swallows the slots that aren't local, so the scatter needs no mask and no sync.
    target = torch.where(slab_row >= 0, slab_row, num_local * rows_per_expert)
    source = torch.arange(flat.num_rows, device=flat.ids.device).repeat_interleave(flat.ids.shape[1])

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        slab = tensor.new_empty((num_local * rows_per_expert + 1, *tensor.shape[1:]))
        as_bytes(slab).index_copy_(0, target, as_bytes(tensor).index_select(0, source))
        return slab[:-1].view(num_local, rows_per_expert, *tensor.shape[1:])

    hidden = replace(
        flat.hidden,
        data=spread(flat.hidden.data),
        scale=None if flat.hidden.scale is None else spread(flat.hidden.scale),
    )
    index = ExpertMajorIndex(slab_row.view(flat.ids.shape), flat.weights)
    return ExpertMajorTokens(hidden, counts[:num_local].to(torch.int32)), index


def weighted_sum_to_flat(expert_output: torch.Tensor, index: ExpertMajorIndex) -> torch.Tensor:
    """[L, M, H] expert outputs -> [N, H] float32 rows: weighted, summed over K. Rows with nothing local are 0."""
    rows = expert_output.flatten(0, 1)
    num_rows, top_k = index.slab_row.shape
    total = torch.zeros(num_rows, rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0:
        return total
    local = index.slab_row >= 0
    source = index.slab_row.clamp(min=0)
    # Masked twice: a slot that isn't local may hold any weight, and row 0 of the slabs may be garbage.
    weights = torch.where(local, index.weights, 0.0)
    for k in range(top_k):
        taken = torch.where(local[:, k, None], rows.index_select(0, source[:, k]), 0.0)
        total.addcmul_(taken, weights[:, k, None])
    return total


def flat_from_expert_major(tokens: ExpertMajorTokens, shard: ExpertShard) -> FlatTokens:
    """View slabs as L*M flat rows of one slot and weight 1: rows past the counts get the invalid id. No host sync."""
    num_local, rows = tokens.hidden.data.shape[:2]
    row = torch.arange(rows, device=tokens.counts.device)
    expert = torch.arange(num_local, device=tokens.counts.device, dtype=torch.int32) + shard.first_expert
    ids = torch.where(row[None, :] < tokens.counts[:, None], expert[:, None], shard.num_experts).to(torch.int32)
    hidden = replace(
        tokens.hidden,
        data=tokens.hidden.data.flatten(0, 1),
        scale=None if tokens.hidden.scale is None else tokens.hidden.scale.flatten(0, 1),
    )
    weights = torch.ones(num_local * rows, 1, dtype=torch.float32, device=ids.device)
    return FlatTokens(hidden, ids.view(-1, 1), weights, shard.num_experts)

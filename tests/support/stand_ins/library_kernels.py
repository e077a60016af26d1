"""`eprt.dispatch.library_triton` in plain torch, for the stand-ins of FlashInfer and DeepEP."""

from __future__ import annotations

import torch


def mask_foreign_ids(ids, counts, first, end, num_experts, pdl):
    for source, count in enumerate(counts.tolist()):
        ids[source, count:] = num_experts
    ids[(ids < first) | (ids >= end)] = num_experts


def pack_tokens(x, ids, width, num_experts):
    rows = torch.zeros(x.shape[0], width, dtype=x.dtype)
    rows[:, : x.shape[1]] = x
    return rows, torch.where(ids < num_experts, ids, -1).long()

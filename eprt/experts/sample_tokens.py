"""Made-up tokens and routings, on which executors warm up and are timed."""

from __future__ import annotations

import torch

from eprt.config import MoEConfig
from eprt.tokens import FlatTokens, Payload


def even_tokens(config: MoEConfig, rows: int, choices: int, device: torch.device) -> FlatTokens:
    """Returns bf16 zeros [rows, H] whose `choices` top-k entries go round the experts; those beyond the model's top-k
    hold no expert."""
    ids = torch.arange(rows * choices, device=device, dtype=torch.int32).view(rows, choices) % config.num_experts
    ids[:, config.top_k :] = config.num_experts
    hidden = torch.zeros((rows, config.hidden_size), dtype=torch.bfloat16, device=device)
    return FlatTokens(Payload.plain(hidden), ids, torch.ones(ids.shape, device=device), config.num_experts)


def sample_ids(num_rows: int, top_k: int, num_experts: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Returns [num_rows, top_k] int32: distinct experts per row, sampled uniformly, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    return scores.topk(top_k, dim=1).indices.to(device, torch.int32)

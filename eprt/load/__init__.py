"""How often each expert was chosen: counted on the device, read when somebody asks."""

from __future__ import annotations

import torch


class ExpertLoad:
    """Counts of one layer on one rank. No host sync and static shapes: a captured graph counts at each replay.

    On CUDA one small kernel a call: 4 bytes read for each (token, slot), a histogram in each block of 1024 of them,
    then one atomic addition for each expert that the block met.

    Args:
        num_experts: E, logical experts.
        device: where the ids are.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, ids: torch.Tensor) -> None:
        """Count [T, K] int32 ids; what lies outside [0, E) isn't one of an expert."""
        if ids.is_cuda:
            from eprt.load import count_triton

            count_triton.count_ids(ids, self._counts)
            return
        E = self._counts.numel()
        known = torch.where((ids < 0) | (ids > E), E, ids).flatten()
        self._counts += torch.bincount(known, minlength=E + 1)[:E]

    def read(self) -> torch.Tensor:
        """[E] int64 on the device, a copy."""
        return self._counts.clone()

    def reset(self) -> None:
        """Begin at zero again; captured graphs go on counting into the same memory."""
        self._counts.zero_()

"""Expert-major rows that lie further apart than they are wide, and dense ones: copies touch valid rows alone, which are
few in decode."""

from __future__ import annotations

import torch


def copy_valid_rows(source: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> None:
    """[L, M, n] to [L, M, n] of the same dtype, rows below counts [L] int32 alone, whatever the strides."""
    if source.dtype.itemsize == 1:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    if source.is_cuda:
        from eprt import slabs_triton

        slabs_triton.copy_valid_rows(source, target, counts)
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

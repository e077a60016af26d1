"""Copies valid expert-major rows on CUDA, for `eprt.expert_major`."""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eprt.rounding import next_power_of_2

BLOCK = 2048
COPY_CTAS = 1024


@triton.jit(do_not_specialize_on_alignment=["counts"])
def _copy_kernel(
    source, target, counts, from_expert, from_row, from_column, to_expert, to_row, to_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: experts x any number of CTAs that share an expert's rows."""
    expert = tl.program_id(0).to(tl.int64)
    for row in range(tl.program_id(1), tl.load(counts + expert), tl.num_programs(1)):
        source_row = source + expert * from_expert + row * from_row
        target_row = target + expert * to_expert + row * to_row
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(source_row + column * from_column, mask=column < WIDTH)
            tl.store(target_row + column * to_column, value, mask=column < WIDTH)


def copy_valid_rows(source: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> None:
    """See `eprt.expert_major.copy_valid_rows`; Triton reads bytes where the dtype has eight bits."""
    L, M, width = source.shape
    source = source if source.data_ptr() % 16 == 0 else source.clone()  # else it would be compiled once more
    share = min(M, max(1, COPY_CTAS // L))
    block = min(BLOCK, next_power_of_2(width))
    _copy_kernel[L, share](source, target, counts, *source.stride(), *target.stride(), width, block)

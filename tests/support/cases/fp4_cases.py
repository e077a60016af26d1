"""What tests of 4-bit weights share: tiles, and what the tensor cores would get."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eprt.experts.grouped.fp4_triton import fp4_block
from eprt.experts.grouped.schedules import Schedule, Tile
from support.cases import number_formats
from support.stand_ins.kernel_device import DEVICE

SCHEDULES = {
    "small": Schedule(16, Tile(64, 64, 2, 4, 1, swap=True), Tile(64, 128, 3, 4, 2, swap=True, tma=True)),
    "whole": Schedule(16, Tile(128, 128, 2, 4, 1, swap=True), Tile(128, 128, 2, 4, 1, swap=True)),
    "tail": Schedule(16, Tile(64, 64, 2, 4, 1, swap=True), Tile(128, 64, 3, 4, 2, True, tma=True), tail=16),
    "large": Schedule(64, Tile(128, 128, 2, 8, 1, swap=True, halvings=1), Tile(128, 64, 2, 4, 1, swap=True), group=2),
}


@triton.jit
def _decode(w, w_scale, out, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NV: tl.constexpr):
    row = tl.arange(0, BLOCK_N)
    for start in range(0, K, BLOCK_K):
        values = fp4_block(w, w_scale, 0, start, K, BLOCK_N, BLOCK_K, NV)
        col = start + tl.arange(0, BLOCK_K)
        tl.store(out + row[:, None] * K + col[None, :], values)


def decoded(packed, rows, cols, *, nv):
    """bf16 [rows, cols] of what `pack_mxfp4` or `pack_nvfp4` returned, rows' factors not applied."""
    out = torch.full((rows, cols), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    _decode[(1,)](*packed, out, K=cols, BLOCK_N=rows, BLOCK_K=64, NV=nv)
    return out


def every_code(rows):
    """Codes [rows, 64]: all of them in each row, in an order of the row's own. And two in a byte, u8 [rows, 32]."""
    order = torch.stack([torch.arange(64).roll(row) for row in range(rows)]) % 16
    return order, number_formats.packed(order).to(DEVICE)

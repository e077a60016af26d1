"""MXFP4 through the grouped GEMM of our own, against the float32 witness and a table written by hand: on one GPU or
interpreted on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from support.stand_ins.kernel_device import DEVICE, INTERPRETED, cuda_only, runs_kernels, sized

from eprt.experts.grouped import mxfp4
from eprt.experts.grouped.mxfp4_triton import mxfp4_block

pytestmark = [pytest.mark.gpu, runs_kernels]

# OCP Microscaling Formats v1.0, table 6: E2M1, the sign in bit 3.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@triton.jit
def _decode(w, w_scale, out, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """What the tensor cores would get of [BLOCK_N, K], block after block."""
    row = tl.arange(0, BLOCK_N)
    for start in range(0, K, BLOCK_K):
        values = mxfp4_block(w, w_scale, 0, start, K, BLOCK_N, BLOCK_K)
        col = start + tl.arange(0, BLOCK_K)
        tl.store(out + row[:, None] * K + col[None, :], values)


def decode(codes, scales, block_k=64):
    """bf16 [rows, cols], rows' factors not applied."""
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    words, scale_words = mxfp4.pack(codes, scales)
    out = torch.full((rows, cols), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    _decode[(1,)](words, scale_words, out, K=cols, BLOCK_N=rows, BLOCK_K=block_k)
    return out


def test_every_code_with_every_scale():
    """All 16 x 255, bit by bit: a row has one scale, its columns all codes, in an order of the row's own."""
    order = torch.stack([torch.arange(64).roll(row) for row in range(256)]) % 16
    codes = (order[:, 0::2] | order[:, 1::2] << 4).to(torch.uint8)
    scales = torch.arange(256).clamp(max=254)[:, None].expand(256, 2).to(torch.uint8)
    found = torch.cat([decode(c.to(DEVICE), s.to(DEVICE)) for c, s in zip(codes.split(64), scales.split(64))]).double()
    factor = mxfp4.row_factor(scales.to(DEVICE)).double()
    wanted = torch.tensor(E2M1, dtype=torch.float64)[order] * 2.0 ** (scales[:, :1].double() - 127)
    assert torch.equal((found * factor[:, None]).cpu(), wanted)
    assert torch.equal((found == 0).cpu() & found.signbit().cpu(), order == 8)

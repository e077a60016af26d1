"""What tests of 4-bit weights share: tiles, and what the tensor cores would get."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eprt.experts.grouped.four_bit_triton import four_bit_block
from eprt.experts.grouped.mxfp4_e4m3_triton import e4m3_block
from eprt.experts.grouped.schedules import Schedule, Tile
from eprt.experts.reference import activation_forward, decode_matrix
from eprt.weights import ExpertWeights, Int4
from support.cases import number_formats
from support.stand_ins.kernel_device import DEVICE

SCHEDULES = {
    "small": Schedule(16, Tile(64, 64, 2, 4, 1, swap=True), Tile(64, 128, 3, 4, 2, swap=True, tma=True)),
    "whole": Schedule(16, Tile(128, 128, 2, 4, 1, swap=True), Tile(128, 128, 2, 4, 1, swap=True)),
    "tail": Schedule(16, Tile(64, 64, 2, 4, 1, swap=True), Tile(128, 64, 3, 4, 2, True, tma=True), tail=16),
    "large": Schedule(64, Tile(128, 128, 2, 8, 1, swap=True, halvings=1), Tile(128, 64, 2, 4, 1, swap=True), group=2),
}


@triton.jit
def _decode(w, w_scale, out, C: tl.constexpr):
    row = tl.arange(0, C.BLOCK_N)
    for start in range(0, C.K, C.BLOCK_K):
        values = (e4m3_block if C.PAIR == "w4a8" else four_bit_block)(w, w_scale, 0, start, C)
        col = start + tl.arange(0, C.BLOCK_K)
        tl.store(out + row[:, None] * C.K + col[None, :], values)


@dataclass(frozen=True)
class Decoding:
    """Of `GemmConstants`, what decodes."""

    PAIR: str
    UNIT_SCALES: int
    ZEROS: bool
    K: int
    BLOCK_N: int
    BLOCK_K: int = 64


def decoded(packed, rows, cols, pair, *, zeros=False):
    """bf16 [rows, cols] of what `pack_mxfp4`, `pack_nvfp4` or `pack_int4` returned, E4M3 of `pack_mxfp4_e4m3`'s, rows'
    factors not applied."""
    dtype = torch.float8_e4m3fn if pair == "w4a8" else torch.bfloat16
    out = torch.full((rows, cols), float("nan"), dtype=torch.float32, device=DEVICE).to(dtype)
    _decode[(1,)](*packed, out, C=Decoding(pair, packed[1].shape[1], zeros, cols, rows))
    return out


def int4_experts(config, group, *, zeros, dtype=torch.bfloat16):
    """Random codes with scales, some negative, and zero points that differ beyond mistaking; `group` 0: one scale for a
    row."""
    draw = torch.Generator().manual_seed(0)
    E, H, I, parts = config.num_experts, config.hidden_size, config.intermediate_size, config.activation.parts

    def matrix(rows, cols, size):
        groups = cols // group if group else 1
        scales = torch.rand(E, rows, groups, generator=draw) * 1.5 + 0.25
        scales[:, rows // 2 :] *= 3
        scales[:, ::3] *= -1
        scales[..., ::2] *= -1
        points = torch.randint(0, 16, (E, rows, groups), generator=draw, dtype=torch.uint8)
        codes = torch.randint(0, 256, (E, rows, cols // 2), generator=draw, dtype=torch.uint8)
        each = codes, (scales * size).to(dtype), points if zeros else None
        return Int4(*(part if part is None else part.to(DEVICE) for part in each))

    bias = [torch.randn(E, rows, generator=draw).to(DEVICE) for rows in (parts * I, H)] if config.bias else (None, None)
    return ExpertWeights(matrix(parts * I, H, 0.15 * H**-0.5), matrix(H, I, 0.15 * I**-0.5), *bias)


def with_e4m3_tokens(config, weights, tokens):
    """The witness's experts, with biases: float32 [rows, H] of tokens, and of what lies between the matrices, that are
    rounded to E4M3 with a scale for each row."""
    gate_up, down = decode_matrix(weights.gate_up, config.activation.parts), decode_matrix(weights.down, 1)
    x = _as_e4m3(tokens.hidden.data)
    out = torch.zeros_like(x)
    for e in range(config.num_experts):
        row, choice = (tokens.ids == e).nonzero(as_tuple=True)
        between = activation_forward(config.activation, x[row] @ gate_up[e].T + weights.gate_up_bias[e])
        y = _as_e4m3(between.to(torch.bfloat16)) @ down[e].T + weights.down_bias[e]
        out.index_add_(0, row, y * tokens.weights[row, choice][:, None])
    return out


def _as_e4m3(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def every_code(rows):
    """Codes [rows, 64]: all of them in each row, in an order of the row's own. And two in a byte, u8 [rows, 32]."""
    order = torch.stack([torch.arange(64).roll(row) for row in range(rows)]) % 16
    return order, number_formats.packed(order).to(DEVICE)

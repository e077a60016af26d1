"""MXFP4 matrices in the order in which threads feed them to the tensor cores, cheap to decode.

A unit is 64 x 64 weights: 128 threads hold it as the left operand of four wgmma (PTX ISA, "wgmma register fragment for
matrix A"), 32 values each. Thread (w, g, t) of warp w has rows 16 w + 8 h + g and columns 32 q + 16 j + 8 i + 2 t + l,
where h, q, j, i and l are 0 or 1. Its 16 bytes lie together, those of the next thread after them, so a load moves whole
lines and nothing has to change threads. A unit's columns follow each other, then its rows, then experts.

The 16 values of one q fill two words, A for h = 0 and B for h = 1. Two values, l = 0 and 1, become two bf16 in 32 bits:
a turn and a mask leave sign, exponent and mantissa at PAIR_BITS, which is the value times 2 ** -126, zero and 0.5 (a
subnormal) included. 16 bits have room for three such sets and a rest at odd places: word C, made of both rests, holds
the fourth of A and of B.

A multiplication by the scale puts it right. bf16 ends at 2 ** 127, so what is stored is the scale over its row's
largest, from 2 ** 127 down, and sums are multiplied by the row's `factor`: exact, as all are powers of two. Weights
2 ** 133 times smaller than their row's largest scale, less than any sum keeps, lose bits.
"""

from __future__ import annotations

from itertools import product

import torch

from eprt.rounding import ceil_div, round_up
from eprt.weights import MX_BLOCK

UNIT = 64  # rows and columns
UNIT_WORDS = UNIT * UNIT // 8
UNIT_SCALES = UNIT * UNIT // MX_BLOCK // 4  # words of four scales: of both h and both q of a thread
PAIR_BITS = 0x81C081C0
SCALE_BITS = 0x7F807F80
C_FROM_A = 0x60306030  # bits of word C from A, the others from B
# How far left a word is turned for (j, i) = 00, 01, 10, 11. The last of each is word C.
TURNS_A = (0, 12, 6, 10)
TURNS_B = (2, 14, 8, 4)
SCALE_TURN = 8  # for q = 1
LARGEST = 4  # units along either side of a block

_CODE_BITS = (6, 7, 8, 15)  # where a code's bits go, mantissa first


def row_factor(scales: torch.Tensor) -> torch.Tensor:
    """What sums of a row are multiplied by, float32 [.., rows], for scales u8 [.., rows, cols / 32]. NaN stays."""
    largest = scales.amax(-1)
    factor = torch.exp2(largest.to(torch.float64) - 128).to(torch.float32)
    return torch.where(largest == 255, torch.nan, factor)


def room(rows: int, cols: int) -> int:
    """Units of zeros after the last expert, as a block may reach past a matrix's rows and columns: elsewhere into the
    units that follow, whose products are left out."""
    high, wide = ceil_div(rows, UNIT), ceil_div(cols, UNIT)
    return (round_up(high, LARGEST) - high) * wide + LARGEST


def pack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's rows, in the order of the result's.

    Args:
        codes: u8 [rows, cols / 2], low nibble first.  scales: u8 E8M0 [rows, cols / 32].

    Returns:
        words int32 [units, UNIT_WORDS], and of scales int32 [units, UNIT_SCALES].
    """
    high, wide = ceil_div(codes.shape[0], UNIT), ceil_div(2 * codes.shape[1], UNIT)
    values = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    exponents = (scales.to(torch.int64) + 254 - scales.amax(1, keepdim=True)).clamp_(min=0)
    return _words(_padded(values, high * UNIT, wide * UNIT)), _scale_words(_padded(exponents, high * UNIT, wide * 2))


def _words(values: torch.Tensor) -> torch.Tensor:
    # rows: unit, w, h, g; columns: unit, q, j, i, t, l
    shape = values.shape[0] // UNIT, 4, 2, 8, values.shape[1] // UNIT, 2, 2, 2, 4, 2
    threads = values.view(shape).permute(0, 4, 1, 3, 8, 5, 2, 6, 7, 9).reshape(-1, UNIT_WORDS // 2, 16)
    table = torch.tensor(_bit_table(), device=values.device)
    pairs = torch.zeros(threads.shape[:2], dtype=torch.int64, device=values.device)
    for index in range(16):
        pairs |= table[index][threads[:, :, index].long()]
    return pairs.view(torch.int32)  # A, then B


def _scale_words(exponents: torch.Tensor) -> torch.Tensor:
    shape = exponents.shape[0] // UNIT, 4, 2, 8, exponents.shape[1] // 2, 2  # unit, w, h, g; unit, q
    of = exponents.view(shape).permute(0, 4, 1, 3, 5, 2).reshape(-1, UNIT_SCALES, 2, 2)
    halves = (of[..., 0] << 7) | (of[..., 1] << 23)
    second = halves[..., 1]
    turned = (second >> SCALE_TURN) | (second << (32 - SCALE_TURN))
    return (halves[..., 0] | turned & 0xFFFFFFFF).to(torch.int32)  # wraps: the same bits


def _bit_table() -> list[list[int]]:
    """For each value of a thread, (h, j, i, l) in this order, and each code: its bits in words A and B (the upper)."""
    table: list[list[int]] = []
    for h, step, lane in product(range(2), range(4), range(2)):
        turn = (TURNS_A, TURNS_B)[h][step]
        places = [(bit + 16 * lane - turn) % 32 for bit in _CODE_BITS]
        in_b = [not C_FROM_A >> place & 1 if step == 3 else h == 1 for place in places]
        bits = [1 << place + 32 * b for place, b in zip(places, in_b, strict=True)]
        words = [sum(bit for index, bit in enumerate(bits) if code >> index & 1) for code in range(16)]
        table.append([word - (1 << 64) if word >> 63 else word for word in words])
    return table


def _padded(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, cols - values.shape[1], 0, rows - values.shape[0]))

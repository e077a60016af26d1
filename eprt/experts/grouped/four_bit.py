"""MXFP4, NVFP4 and INT4 matrices in the order in which threads feed them to the tensor cores, cheap to decode.

A unit is 64 x 64 weights: 128 threads hold it as the left operand of four wgmma (PTX ISA, "wgmma register fragment for
matrix A"), 32 values each. Thread (w, g, t) of warp w has rows 16 w + 8 h + g and columns 32 q + 16 j + 8 i + 2 t + l,
where h, q, j, i and l are 0 or 1. Its 16 bytes lie together, those of the next thread after them, so a load moves whole
lines and nothing has to change threads. A unit's columns follow each other, then its rows, then experts.

The 16 values of one q fill two words, A for h = 0 and B for h = 1. Two values, l = 0 and 1, become two bf16 in 32 bits:
a turn and a mask leave sign, exponent and mantissa at PAIR_BITS, which is the value times 2 ** -126, zero and 0.5 (a
subnormal) included. 16 bits have room for three such sets and a rest at odd places: word C, made of both rests, holds
the fourth of A and of B.

A multiplication by the scale puts it right. bf16 ends at 2 ** 127, so what is stored of MXFP4 is the scale over its
row's largest, from 2 ** 127 down, and sums are multiplied by the row's `factor`: exact, as all are powers of two.
Weights 2 ** 133 times smaller than their row's largest scale, less than any sum keeps, lose bits.

NVFP4 has a scale for each j. E4M3 reaches over 18 powers of two: times 2 ** 119 the upper three bits of its exponent
are ones in bf16, and a byte holds the other five and the mantissa (`NV_SCALE_ONES`). A value has two bits and its scale
four, so a product has six of bf16's eight. Where a scale is zero codes are, where it is negative they turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import torch

from eprt.rounding import ceil_div, round_up
from eprt.weights import MX_BLOCK, NVFP4_BLOCK

UNIT = 64  # rows and columns
UNIT_WORDS = UNIT * UNIT // 8
ROW_PAIRS = UNIT // 2  # of INT4 one or two words of two scales, of both h, for each; a word of zero points beside each
PAIR_BITS = 0x81C081C0
MX_SCALE_BITS = 0x7F807F80
NV_SCALE_BITS, NV_SCALE_ONES = 0x0FF00FF0, 0x70007000
C_FROM_A = 0x60306030  # bits of word C from A, the others from B
# How far left a word is turned for (j, i) = 00, 01, 10, 11. The last of each is word C.
TURNS_A = (0, 12, 6, 10)
TURNS_B = (2, 14, 8, 4)
SCALE_TURN = 8  # for q = 1, of NVFP4 j = 1
LARGEST = 4  # units along either side of a block

NV_LARGEST = 30 << 3 | 6  # 448; what a NaN becomes, too, as others multiply it by zeros
NV_SCALE_EXPONENT = 119  # what NVFP4's scales are multiplied by, and
NV_FACTOR = 2.0 ** (126 - NV_SCALE_EXPONENT)  # what makes up for it

INT4_EXPONENT = 126  # of a row's largest scale, as it is stored
INT4_FACTOR = 2.0 ** (133 - INT4_EXPONENT)  # what makes up for it, and for codes times 2 ** -133

_CODE_BITS = (6, 7, 8, 15)  # where a code's bits go, mantissa first


def mxfp4_factor(scales: torch.Tensor) -> torch.Tensor:
    """Returns what sums of a row are multiplied by, float32 [.., rows], for scales u8 [.., rows, cols / 32]. NaN
    stays."""
    largest = scales.amax(-1)
    factor = torch.exp2(largest.to(torch.float64) - 128).to(torch.float32)
    return torch.where(largest == 255, torch.nan, factor)


def room(rows: int, cols: int) -> int:
    """Units of zeros after the last expert, as a block may reach past a matrix's rows and columns: elsewhere into the
    units that follow, whose products are left out."""
    high, wide = ceil_div(rows, UNIT), ceil_div(cols, UNIT)
    return (round_up(high, LARGEST) - high) * wide + LARGEST


def pack_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's rows, in the order of the result's.

    Args:
        codes: u8 [rows, cols / 2], low nibble first.  scales: u8 E8M0 [rows, cols / 32].

    Returns:
        words int32 [units, UNIT_WORDS], and of scales int32 [units, 32]: of both h and both q of a thread.
    """
    exponents = (scales.to(torch.int64) + 254 - scales.amax(1, keepdim=True)).clamp_(min=0)
    return words_of(codes, _fp4_bits), _scale_words(exponents << 7, MX_BLOCK)


def pack_nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for scales e4m3 [rows, cols / 16]; a NaN among them is the factor's part (`nvfp4_factor`).

    Returns:
        words int32 [units, UNIT_WORDS], and of scales int32 [units, 64]: of both h and both j, a word for each q.
    """
    plain = scales.to(torch.float32)
    blocks = codes.unflatten(1, (-1, NVFP4_BLOCK // 2))
    values = ((blocks ^ (plain < 0).to(torch.uint8)[:, :, None] * 0x88) * (plain != 0)[:, :, None]).flatten(1)
    # Exponent and three bits of mantissa, as float32 has them; 2 ** 8 becomes 30, so 2 ** -9, the least, 13.
    byte = (plain.abs().view(torch.int32).to(torch.int64) >> 20) - ((127 + 8 - 30) << 3)
    words = words_of(values, _fp4_bits)
    return words, _scale_words(byte.clamp_(0, NV_LARGEST) << 4, NVFP4_BLOCK)


def nvfp4_factor(scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Returns what sums of a row are multiplied by, float32 [parts, rows / parts], for scales e4m3 [rows, cols / 16]
    and global_scale [parts]. NaN stays."""
    spoilt = scales.to(torch.float32).isnan().any(-1).view(global_scale.shape[0], -1)
    return torch.where(spoilt, torch.nan, global_scale.to(torch.float32)[:, None] * NV_FACTOR)


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for scales bf16 or float32 [rows, groups], and zero points u8 [rows, groups], or None for 8.

    Returns:
        words int32 [units, UNIT_WORDS], and of scales int32 [units, ROW_PAIRS, or 2 or 4 times as many].
    """
    cols, groups = codes.shape[1] * 2, scales.shape[1]
    wide = 1 if groups == 1 or cols // groups % UNIT == 0 else 2  # groups that aren't whole units: a scale for each q
    count = ceil_div(cols, UNIT) if groups == 1 else cols // groups * wide // UNIT
    plain = (scales.to(torch.float32) / _row_scale(scales)[:, None]).nan_to_num(0.0, 0.0, 0.0) * 2.0**INT4_EXPONENT
    bits = plain.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
    each = [_of_both_rows(bits.repeat_interleave(count, 1), wide)]
    if zeros is not None:
        each.append(_of_both_rows(zeros.to(torch.int64).repeat_interleave(count, 1) * 0x11, wide))
    words = torch.stack(each, -1).flatten(1).to(torch.int32)
    return words_of(codes, _int4_bits), words


def int4_factor(scales: torch.Tensor) -> torch.Tensor:
    """Returns what sums of a row are multiplied by, float32 [rows], for scales [rows, groups]. NaN stays, infinity
    becomes it."""
    spoilt = ~scales.isfinite().all(-1)
    return torch.where(spoilt, torch.nan, _row_scale(scales) * INT4_FACTOR)


def _row_scale(scales: torch.Tensor) -> torch.Tensor:
    """Returns float32 [rows]: the power of two up to the largest scale; of one scale in a row, that scale."""
    plain = scales.to(torch.float32)
    if scales.shape[1] == 1:
        return torch.where(plain[:, 0] == 0, 1.0, plain[:, 0])
    _, exponent = torch.frexp(plain.abs().amax(1).nan_to_num(1.0, 1.0))
    return torch.ldexp(torch.ones_like(plain[:, 0]), exponent - 1)


def _of_both_rows(bits: torch.Tensor, wide: int) -> torch.Tensor:
    """Packs 16 bits each, int64 [rows, cols / 64 * wide], both h in a word: [units, ROW_PAIRS * wide]."""
    bits = padded(bits, wide)
    of = bits.view(bits.shape[0] // UNIT, 4, 2, 8, bits.shape[1] // wide, wide).permute(0, 4, 1, 3, 5, 2)
    of = of.reshape(-1, ROW_PAIRS * wide, 2)
    return of[..., 0] | of[..., 1] << 16


def words_of(codes: torch.Tensor, bits_of: Callable[[], list[list[int]]]) -> torch.Tensor:
    """Packs codes two in a byte, u8 [rows, cols / 2]: l = 0 and 1. `bits_of` returns [8][256]: for (h, j, i), and a
    byte, its bits in words A and B (the upper)."""
    codes = padded(codes, UNIT // 2)
    # rows: unit, w, h, g; columns: unit, q, j, i, t
    shape = codes.shape[0] // UNIT, 4, 2, 8, codes.shape[1] * 2 // UNIT, 2, 2, 2, 4
    steps = codes.view(shape).permute(2, 6, 7, 0, 4, 1, 3, 8, 5).reshape(len(TURNS_A) * 2, -1)
    bits = table_on(codes.device, bits_of).gather(1, steps.long())
    return bits.sum(0).view(torch.int32).view(-1, UNIT_WORDS)  # A, then B; no two steps have a bit in common


def _scale_words(bits: torch.Tensor, block: int) -> torch.Tensor:
    """Packs the bits of bf16 that are stored, int64 [rows, cols / block]: both h in a word, every other one
    turned."""
    first, second = _of_both_rows(bits, UNIT // block).unflatten(1, (-1, 2)).unbind(-1)
    turned = (second >> SCALE_TURN) | (second << (32 - SCALE_TURN))
    return (first | turned & 0xFFFFFFFF).to(torch.int32)  # wraps: the same bits


def _fp4_bits() -> list[list[int]]:
    table: list[list[int]] = []
    for h, step in product(range(2), range(4)):
        turn = (TURNS_A, TURNS_B)[h][step]
        places = [(bit + 16 * lane - turn) % 32 for lane in range(2) for bit in _CODE_BITS]
        in_b = [not C_FROM_A >> place & 1 if step == 3 else h == 1 for place in places]
        bits = [1 << place + 32 * b for place, b in zip(places, in_b, strict=True)]
        table.append([sum(bit for index, bit in enumerate(bits) if byte >> index & 1) for byte in range(256)])
    return table


def _int4_bits() -> list[list[int]]:
    return [
        [(byte & 15 | byte >> 4 << 16) << (4 * step + 32 * h) for byte in range(256)]
        for h, step in product(range(2), range(4))
    ]


@cache
def table_on(device: torch.device, make: Callable[[], list[list[int]]]) -> torch.Tensor:
    """Returns what `make` does as an int64 tensor; numbers may have 64 bits."""
    return torch.tensor([[word - (1 << 64) if word >> 63 else word for word in row] for row in make()], device=device)


def padded(values: torch.Tensor, wide: int) -> torch.Tensor:
    """With zeros to whole units, of which one is `wide` columns."""
    rows, cols = values.shape
    return torch.nn.functional.pad(values, (0, round_up(cols, wide) - cols, 0, round_up(rows, UNIT) - rows))

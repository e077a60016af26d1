"""The element and scale encodings that the block formats are made of: E2M1, E4M3, E8M0; and packed four-bit codes.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 (elements) and 5.4 (scales). Everything is
arithmetic on the tensors' own device: no tables to upload, no host sync, so it may run inside a CUDA graph.
"""

from __future__ import annotations

import torch

E2M1_MAX = 6.0
E2M1_EMAX = 2  # exponent of the largest power of two: 4
E4M3_MAX = 448.0
E4M3_EMAX = 8  # 256
E8M0_NAN = 255
TINY = torch.finfo(torch.float32).tiny  # smallest float32 scale that isn't subnormal
# Four-bit codes in int32 words, as GPTQ, AWQ and compressed-tensors pack them; words are little-endian.
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i, from the lowest, holds the output of this number
# compressed-tensors' `actorder`: columns are stored as they are, or sorted by activation, with each one's group beside.
COLUMNS_AS_THEY_ARE = (None, False, "static", "weight")
COLUMNS_SORTED = ("group", "dynamic", True)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Returns the nearest E2M1 code per byte (u8 0..15), ties to even, saturating at 6. Any shape; NaN becomes 0."""
    size = values.abs().clamp(max=E2M1_MAX)
    # Codes step by 0.5 up to 2, by 1 up to 4, by 2 up to 6; `round` goes to even, which is the even mantissa.
    code = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    sign = torch.signbit(values).to(torch.uint8) << 3
    return code.nan_to_num(0.0).to(torch.uint8) | sign


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Returns float32 values of u8 codes 0..15: sign, 2 exponent bits (bias 1, 0 is subnormal), 1 mantissa bit."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = torch.where(exponent > 0, (2 + mantissa) << (exponent - 1).clamp(max=2), mantissa)
    size = halves.float() * 0.5
    return torch.where(codes >= 8, -size, size)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Packs two codes per byte, the even column in the low nibble: u8 [..., C] -> u8 [..., C/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undoes `pack_nibbles`: u8 [..., C/2] -> u8 [..., C]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def codes_along_columns(words: torch.Tensor) -> torch.Tensor:
    """Brings int32 [..., rows, cols/8], column 8j first in the lowest nibble of word j, to u8 [..., rows, cols/2]."""
    return words.contiguous().view(torch.uint8)


def rows_of_words(words: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Unpacks int32 [..., rows/8, cols], eight rows a word, to u8 [..., rows, cols] of values 0 to 15."""
    rows: list[torch.Tensor] = [words] * 8
    for nibble, row in enumerate(order):
        rows[row] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return torch.stack(rows, dim=-2).flatten(-3, -2)


def codes_along_rows(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Brings int32 [..., rows/8, cols] to u8 [..., rows, cols/2], two neighbouring columns a byte."""
    return pack_nibbles(rows_of_words(words, order))


def exact_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns float16 scales as float32, which holds each exactly; others as they are."""
    return scales.float() if scales.dtype == torch.float16 else scales


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounds to float8_e4m3fn, ties to even, saturating at 448; NaN stays NaN."""
    # The cast alone saturates in some torch versions and overflows to NaN in others.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Returns float32 2 ** (byte - 127), exact; byte 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).float()


def shared_scale(amax: torch.Tensor, emax: int) -> torch.Tensor:
    """Returns the E8M0 byte of a block: floor(log2(amax)) - emax (MX v1.0, section 6.3).

    A block of zeros gets the smallest scale, a block that holds NaN or infinity gets NaN.
    """
    exponent = torch.frexp(amax).exponent - 1 - emax
    byte = torch.where(amax > 0, exponent + 127, 0).clamp(0, E8M0_NAN - 1)
    return torch.where(torch.isfinite(amax), byte, E8M0_NAN).to(torch.uint8)

"""Number formats against byte tables written out by hand, an independent decoder, and their own definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.errors import ConfigError
from eprt.quant import decode, encode
from eprt.quant.blocks import decode_mxfp4, decode_nvfp4, encode_mxfp4, encode_mxfp8, encode_nvfp4
from eprt.quant.elements import (
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    shared_scale,
    unpack_nibbles,
)
from eprt.weights import Dense, Fp8Block, Fp8Channel, Fp8Tensor, Int4, Mxfp4, Mxfp8, Nvfp4

NAN, INF = math.nan, math.inf

# OCP MX v1.0, table 5 (E2M1): codes 0b0000 to 0b1111.
E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]

# OCP FP8 (E4M3): zero, subnormals m * 2 ** -9, first normals, around one, the largest, NaN, and their negatives.
E4M3_TABLE = {
    0x00: 0.0, 0x01: 0.001953125, 0x02: 0.00390625, 0x03: 0.005859375, 0x07: 0.013671875, 0x08: 0.015625,
    0x09: 0.017578125, 0x37: 0.9375, 0x38: 1.0, 0x39: 1.125, 0x3F: 1.875, 0x40: 2.0, 0x70: 128.0, 0x77: 240.0,
    0x78: 256.0, 0x7D: 416.0, 0x7E: 448.0, 0x81: -0.001953125, 0x87: -0.013671875, 0xB8: -1.0, 0xFE: -448.0,
}  # fmt: skip


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal float32 patterns: tells -0 from 0, unlike torch.equal."""
    return torch.equal(actual.float().view(torch.int32), expected.float().view(torch.int32))


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def u8(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        # Exact midpoints go to the even code; a hair beyond goes to the nearer one.
        (0.25, 0), (0.2500001, 1), (0.75, 2), (0.7499999, 1), (1.25, 2), (1.2500001, 3), (1.75, 4), (1.7499999, 3),
        (2.5, 4), (2.5000002, 5), (3.5, 6), (3.4999998, 5), (5.0, 6), (5.0000005, 7),
        # Saturation.
        (6.1, 7), (7.0, 7), (1e30, 7), (INF, 7), (-INF, 15), (-1e30, 15),
        # Signs, and zero of either sign.
        (-0.25, 8), (-0.75, 10), (-5.0, 14), (-0.0, 8), (0.0, 0), (NAN, 0),
    ],
)  # fmt: skip
def test_e2m1_rounds_to_nearest_even_and_saturates(value: float, code: int):
    assert encode_e2m1(f32(value)).item() == code


def test_e8m0_decodes_all_256_bytes():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    expected = f32(*(math.ldexp(1.0, byte - 127) for byte in range(255)))
    assert same_bits(decode_e8m0(bytes_)[:255], expected)
    assert math.isnan(decode_e8m0(bytes_)[255].item())


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (1.0, 125), (4.0, 127), (7.9999995, 127), (8.0, 128), (0.4, 123), (3.0, 126), (0.0, 0),
        (1e-45, 0), (2.0**-126, 0), (2.0**-125, 0), (2.0**-124, 1), (3.4e38, 252), (INF, 255), (NAN, 255),
    ],
)  # fmt: skip
def test_shared_scale_is_floor_log2_less_emax(amax: float, byte: int):
    assert shared_scale(f32(amax), emax=2).item() == byte


def test_e4m3_bytes():
    bytes_, values = u8(*E4M3_TABLE), f32(*E4M3_TABLE.values())
    assert same_bits(bytes_.view(torch.float8_e4m3fn).float(), values)
    assert torch.equal(encode_e4m3(values).view(torch.uint8), bytes_)


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (1.0625, 0x38), (1.1875, 0x3A), (1.06251, 0x39), (2.0**-10, 0x00), (3 * 2.0**-10, 0x02),
        (2.0**-10 * 1.01, 0x01),
        (432.0, 0x7E), (448.1, 0x7E), (464.0, 0x7E), (479.0, 0x7E), (1e9, 0x7E), (INF, 0x7E), (-INF, 0xFE),
        (-500.0, 0xFE), (NAN, 0x7F),
    ],
)  # fmt: skip
def test_e4m3_rounds_to_nearest_even_and_saturates(value: float, byte: int):
    assert encode_e4m3(f32(value)).view(torch.uint8).item() == byte


def test_mxfp4_block_by_hand():
    # Two blocks: all 16 codes twice at scale 2 ** 3, then zeros but for -0.4 and 0.1 (scale 2 ** -4: -6.4, 1.6).
    first = f32(*E2M1_TABLE, *E2M1_TABLE) * 8
    second = torch.zeros(32)
    second[0], second[1] = -0.4, 0.1
    codes, scales = encode_mxfp4(torch.cat((first, second)))
    nibbles = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert scales.tolist() == [130, 123]
    assert codes.tolist() == nibbles * 2 + [0x3F] + [0x00] * 15
    decoded = decode_mxfp4(codes, scales)
    assert same_bits(decoded[:32], first)
    assert decoded[32:34].tolist() == [-0.375, 0.09375]


def test_mxfp4_nan_and_zero_blocks():
    values = torch.zeros(96)
    values[3], values[40] = NAN, INF
    codes, scales = encode_mxfp4(values)
    assert scales.tolist() == [255, 255, 0]
    decoded = decode_mxfp4(codes, scales)
    assert decoded[:64].isnan().all()
    assert (decoded[64:] == 0).all()


def test_nvfp4_block_by_hand():
    # global 0.5; block 0 peaks at 6 = 6 * 2 * 0.5 (E4M3 2.0 is 0x40), block 1 at 0.09375 (E4M3 0.03125 is 0x10).
    values = torch.cat((f32(*E2M1_TABLE), f32(*E2M1_TABLE) / 64))
    codes, scales = encode_nvfp4(values, f32(0.5))
    assert scales.view(torch.uint8).tolist() == [0x40, 0x10]
    assert codes.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2
    assert same_bits(decode_nvfp4(codes, scales, f32(0.5)), values)


def test_nvfp4_underflowing_block_is_zero_not_nan():
    values = torch.zeros(16)
    values[0] = 1e-4
    codes, scales = encode_nvfp4(values, f32(1.0))
    assert scales.view(torch.uint8).tolist() == [0]
    assert codes.tolist() == [0] * 8


def test_mxfp8_by_hand():
    values = torch.zeros(32)
    values[:4] = f32(448.0, -1.0, 2.0**-9, 500.0) * 4
    data, scales = encode_mxfp8(values)
    assert scales.tolist() == [129]  # 2000 lies in [1024, 2048): 2 ** (10 - 8); 500 saturates at 448
    assert data.view(torch.uint8)[:4].tolist() == [0x7E, 0xB8, 0x01, 0x7E]
    decoded = decode(Mxfp8(data.view(1, 1, 32), scales.view(1, 1, 1)), 1)
    assert decoded[0, 0, :4].tolist() == [1792.0, -4.0, 2**-7, 1792.0]


# Codes 0 to 15 in 8 bytes, the even column in the low nibble.
INT4_BYTES = u8(0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_by_hand(dtype: torch.dtype):
    # Row 0: groups of scale 1 and 0.5; row 1: 2 and 0.25, codes of each group ascending.
    scales = torch.tensor([[[1.0, 0.5], [2.0, 0.25]]], dtype=dtype)
    matrix = Int4(INT4_BYTES.repeat(4).expand(1, 2, 32), scales)
    assert (matrix.group, matrix.shape) == (32, (1, 2, 64))
    matrix.check("w", 1, 2, 64, 1)
    signed = torch.arange(-8.0, 8.0).repeat(2)
    assert same_bits(decode(matrix, 1)[0, 0], torch.cat((signed, signed / 2)))
    assert same_bits(decode(matrix, 1)[0, 1], torch.cat((signed * 2, signed / 4)))
    zeros = u8(0, 15, 3, 8).view(1, 2, 2)
    values = decode(Int4(matrix.codes, scales, zeros), 2)[0]
    assert values[0, [0, 15, 32, 47]].tolist() == [0.0, 15.0, -7.5, 0.0]
    assert values[1, [0, 15, 32, 47]].tolist() == [-6.0, 24.0, -2.0, 1.75]


def test_int4_encodes_by_hand():
    values = torch.cat((torch.arange(-7.0, 8.0) / 4, f32(0.1), torch.zeros(16)))  # 0.1 rounds to 0
    matrix = encode("int4", torch.stack((values, values * 2))[None], 2)
    assert matrix.codes[0, 0].tolist() == [0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x8F] + [0x88] * 8
    assert matrix.scales.dtype == torch.bfloat16
    assert matrix.scales.flatten().tolist() == [0.25, 0.5]


@pytest.mark.parametrize("cols", [96, 40, 128])
def test_int4_shares_a_scale_by_32_columns_or_by_the_row(cols: int):
    assert encode("int4", torch.ones(1, 2, cols), 2).group == (40 if cols == 40 else 32)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((1, 2, 4), torch.bfloat16, r"scales is \(1, 2, 4\).*expected \(1, 2, 1\)"),  # groups of 16
        ((1, 2, 3), torch.bfloat16, r"scales is \(1, 2, 3\)"),
        ((1, 3, 1), torch.bfloat16, r"scales is \(1, 3, 1\)"),
        ((1, 2, 2), torch.float16, r"torch.float16: expected \(1, 2, 2\) torch.bfloat16"),
    ],
)
def test_int4_groups_that_do_not_divide_are_refused(shape: tuple[int, ...], dtype: torch.dtype, said: str):
    with pytest.raises(ConfigError, match=said):
        Int4(torch.zeros(1, 2, 32, dtype=torch.uint8), torch.ones(shape, dtype=dtype)).check("w", 1, 2, 64, 2)
    zeros = torch.zeros(1, 2, 1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"zeros is \(1, 2, 1\)"):
        Int4(torch.zeros(1, 2, 32, dtype=torch.uint8), torch.ones(1, 2, 2), zeros).check("w", 1, 2, 64, 2)


def test_fp8_channel_by_hand():
    data = u8(0x38, 0x7E, 0xB8, 0x01).view(1, 2, 2).view(torch.float8_e4m3fn)
    matrix = Fp8Channel(data, f32(0.5, 4.0).view(1, 2))
    matrix.check("w", 1, 2, 2, 2)
    assert decode(matrix, 2)[0].tolist() == [[0.5, 224.0], [-4.0, 2**-7]]
    again = encode("fp8_channel", f32(448.0, -1.0, 8.0, 896.0).view(1, 2, 2), 2)
    assert again.data.view(torch.uint8).flatten().tolist() == [0x7E, 0xB8, 0x48, 0x7E]
    assert again.scale.tolist() == [[1.0, 2.0]]


def test_fp8_block_scale_belongs_to_its_block_and_part():
    # 2 parts of 130 rows: each part has a grid of its own, 2 x 2 blocks.
    data = torch.full((1, 260, 200), 2.0).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 9.0).view(1, 4, 2)
    values = decode(Fp8Block(data, scale), parts=2)[0]
    for row, col, block in [(0, 0, 1), (127, 127, 1), (0, 128, 2), (128, 0, 3), (129, 199, 4), (130, 0, 5), (257, 0, 5),
                            (258, 0, 7), (259, 199, 8)]:  # fmt: skip
        assert values[row, col] == 2.0 * block, (row, col)


def test_per_part_scales_belong_to_their_part():
    codes = torch.full((1, 4, 8), 0x22, dtype=torch.uint8)  # all ones
    scales = torch.ones(1, 4, 1).to(torch.float8_e4m3fn)
    assert decode(Nvfp4(codes, scales, f32(3.0, 5.0).view(1, 2)), 2)[0, :, 0].tolist() == [3.0, 3.0, 5.0, 5.0]
    data = torch.ones(1, 4, 8).to(torch.float8_e4m3fn)
    assert decode(Fp8Tensor(data, f32(3.0, 5.0).view(1, 2)), 2)[0, :, 0].tolist() == [3.0, 3.0, 5.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_equals_transformers_decoder_bit_for_bit(dtype: torch.dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(60, 190, (3, 24, 4), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    ours = decode(Mxfp4(blocks.flatten(2), scales), parts=1, dtype=dtype)
    assert ours.dtype == dtype
    assert same_bits(ours, theirs)


packed_block = st.binary(min_size=16, max_size=16).map(lambda data: u8(*data))
e4m3_finite = st.integers(0, 255).filter(lambda byte: byte & 0x7F != 0x7F)


@settings(deadline=None)
@given(packed_block, st.integers(0, 252), st.integers(0, 31), st.sampled_from([6, 7, 14, 15]))
def test_mxfp4_round_trip_of_canonical_codes(packed: torch.Tensor, scale: int, place: int, peak: int):
    # Canonical: the scale is the one that the largest element calls for, so one code must reach 4.
    codes = unpack_nibbles(packed)
    codes[place] = peak
    again, scales = encode_mxfp4(decode_mxfp4(pack_nibbles(codes), u8(scale)))
    assert scales.item() == scale
    assert torch.equal(again, pack_nibbles(codes))


@settings(deadline=None)
@given(packed_block, st.integers(1, 0x7E), st.sampled_from([7, 15]), st.floats(2**-10, 2**10, width=16))
def test_nvfp4_round_trip_of_canonical_codes(packed: torch.Tensor, scale: int, peak: int, global_scale: float):
    codes = unpack_nibbles(packed)[:16]
    codes[5] = peak
    scales = u8(scale).view(torch.float8_e4m3fn)
    again, found = encode_nvfp4(decode_nvfp4(pack_nibbles(codes), scales, f32(global_scale)), f32(global_scale))
    assert found.view(torch.uint8).item() == scale
    assert torch.equal(again, pack_nibbles(codes))


@settings(deadline=None)
@given(st.lists(e4m3_finite, min_size=32, max_size=32), st.integers(0, 246), st.sampled_from([0x78, 0x7E, 0xFB]))
def test_mxfp8_round_trip_of_canonical_codes(data: list[int], scale: int, peak: int):
    codes = u8(peak, *data[1:])
    matrix = Mxfp8(codes.view(torch.float8_e4m3fn).view(1, 1, 32), u8(scale).view(1, 1, 1))
    again = encode("mxfp8", decode(matrix, 1), 1)
    assert again.scales.item() == scale
    assert torch.equal(again.data.view(torch.uint8).flatten(), codes)


@settings(deadline=None)
@given(st.lists(e4m3_finite, min_size=16, max_size=16), st.floats(2**-10, 2**10, width=16))
@pytest.mark.parametrize(
    ("name", "kind"), [("fp8_tensor", Fp8Tensor), ("fp8_block", Fp8Block), ("fp8_channel", Fp8Channel)]
)
def test_fp8_round_trip_of_canonical_codes(name: str, kind: type, data: list[int], scale: float):
    codes = u8(0x7E, *data[1:])
    shape = (1, 1, 1) if name == "fp8_block" else (1, 1)
    matrix = kind(codes.view(torch.float8_e4m3fn).view(1, 1, 16), f32(scale).view(shape))
    again = encode(name, decode(matrix, 1), 1)
    assert again.scale.item() == scale
    assert torch.equal(again.data.view(torch.uint8).flatten(), codes)


# Largest |x - decode(encode(x))| as a share of the scale block's largest magnitude.
# mxfp4: amax in [4, 8) scales; half the widest step is 1, saturation above 6 loses up to 2: 2/8, 1/4.
# nvfp4: amax at 6 scales, of which E4M3 rounding takes or adds 1/16; half the widest step is 1/6 of that.
# mxfp8: amax in [256, 512) scales; saturation above 448 loses up to 64/512. fp8: half the widest step, 16/448.
# int4: amax / 7 scales, half a step is 1/14 of it; rounding the scale to bf16 moves it by up to 2 ** -8.
ERROR_BOUND = {
    "mxfp4": 1 / 4,
    "nvfp4": 17 / 96,
    "mxfp8": 1 / 8,
    "int4": (1 + 2**-8) / 14,
    **dict.fromkeys(("fp8_tensor", "fp8_block", "fp8_channel"), 16 / 448),
}


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(-8, 8), st.sampled_from(sorted(ERROR_BOUND)))
def test_error_of_encoding_is_bounded(seed: int, magnitude: float, name: str):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(2, 4, 64, generator=generator) * 10.0**magnitude
    dense[:, 2:] *= 50  # up is much larger than gate
    matrix = encode(name, dense, parts=2)
    matrix.check("w", 2, 4, 64, 2)
    block = {"mxfp4": 32, "mxfp8": 32, "int4": 32, "nvfp4": 16}.get(name, 64)
    error = (decode(matrix, 2) - dense).abs().unflatten(-1, (-1, block)).amax(-1)
    amax = dense.abs().unflatten(-1, (-1, block)).amax(-1)
    if name in ("fp8_tensor", "fp8_block"):  # one block for each part here
        amax = amax.unflatten(1, (2, 2)).amax(2, keepdim=True).expand(2, 2, 2, 1).flatten(1, 2)
    assert (error <= amax * ERROR_BOUND[name] * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_gate_and_up_have_scales_of_their_own(name: str):
    dense = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1))
    dense[:, 4:] *= 300
    matrix = encode(name, dense, parts=2)
    scale = matrix.global_scale if name == "nvfp4" else matrix.scale
    assert (scale[:, 1] > 50 * scale[:, 0]).all()


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_dense_formats(name: str):
    dense = torch.randn(2, 6, 5)
    matrix = encode(name, dense, parts=2)
    assert isinstance(matrix, Dense)
    assert matrix.data.dtype == (torch.float32 if name == "f32" else torch.bfloat16)
    assert torch.equal(decode(matrix, 2, matrix.data.dtype), matrix.data)


@pytest.mark.parametrize("name", ["f32", "bf16", *ERROR_BOUND])
def test_all_zero_weights_stay_zero(name: str):
    assert (decode(encode(name, torch.zeros(1, 4, 64), 2), 2) == 0).all()


@pytest.mark.parametrize(("name", "cols", "needed"), [("mxfp4", 40, 32), ("mxfp8", 40, 32), ("nvfp4", 24, 16)])
def test_columns_that_leave_a_part_block_are_refused(name: str, cols: int, needed: int):
    with pytest.raises(ConfigError, match=rf"multiples of {needed}, the matrix has {cols}"):
        encode(name, torch.zeros(1, 4, cols), 1)
    halves = torch.zeros(1, 4, cols // 2, dtype=torch.uint8)
    whole = encode(name, torch.zeros(1, 4, 2 * needed), 1)
    cut = type(whole)(**(whole.tensors() | ({"codes": halves} if name != "mxfp8" else {})))
    with pytest.raises(ConfigError, match=rf"{cols} columns.*multiple of {needed}"):
        cut.check("down", 1, 4, cols, 1)


def test_rows_that_do_not_split_are_refused():
    with pytest.raises(ConfigError, match="5 rows"):
        encode("bf16", torch.zeros(1, 5, 32), 2)

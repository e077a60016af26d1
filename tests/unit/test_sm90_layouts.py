"""Hopper weight layouts and the permute by hand; tests/upstream runs the executors on prepared weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases

from eprt.config import Activation
from eprt.errors import ConfigError
from eprt.experts.cutlass_mxfp4 import swiglu_parameters, tile_expert
from eprt.experts.grouped import four_bit
from eprt.experts.humming.gemm import GemmShape, expert_tensors, row_bucket
from eprt.experts.padding import pad_parts, stack_experts
from eprt.experts.permute import group_by_expert, group_rows, weighted_unpermute
from eprt.weights import Fp8Tensor


def marked(*shape, dtype=torch.float32):
    """Every element differs from 0 and, in 32 bits, from every other."""
    values = torch.arange(1, math.prod(shape) + 1).view(shape)
    if dtype == torch.uint8:
        return (values % 255 + 1).to(dtype)
    return (values % 200 + 1).to(dtype) if dtype.itemsize == 1 else values.to(dtype)


def test_padding_keeps_the_halves_apart():
    """By hand: one row of gate, one of up, padded to two each."""
    stack = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert pad_parts(stack, 2, 2, 3).tolist() == [[[1, 2, 0], [0, 0, 0], [3, 4, 0], [0, 0, 0]]]
    assert pad_parts(stack, 2, 2, 3, reverse=True).tolist() == [[[3, 4, 0], [0, 0, 0], [1, 2, 0], [0, 0, 0]]]
    assert pad_parts(stack[..., 0], 2, 2, reverse=True).tolist() == [[3, 0, 1, 0]]
    # Padding after concatenation is another tensor: the boundary in the middle moved into gate.
    assert pad_parts(stack, 1, 4, 3).tolist() == [[[1, 2, 0], [3, 4, 0], [0, 0, 0], [0, 0, 0]]]


def test_scales_spread_part_by_part():
    """200 rows of each part are two blocks, 300 columns three."""
    matrix = Fp8Tensor(torch.zeros(1, 400, 300, dtype=torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]]))
    scale = expert_tensors(matrix, None, GemmShape(2, 200, 300, "cols"), False)["weight_scale"]
    assert scale.tolist() == [[[2] * 3] * 2 + [[3] * 3] * 2]


def test_cutlass_down_bias_is_added_once():
    weights = cases.make_weights(cases.make_config("mxfp4", bias=True)).map(lambda tensor: tensor[:1])
    assert tile_expert(weights)["down_bias"].any()
    others = tile_expert(replace(weights, down_bias=None))["down_bias"]  # as on all MoE-TP ranks but the first
    assert others.shape == tile_expert(weights)["down_bias"].shape
    assert not others.any()
    with pytest.raises(ConfigError, match="Mxfp4"):
        tile_expert(cases.make_weights(cases.make_config("nvfp4")))


def test_swiglu_parameters_are_all_or_none():
    assert swiglu_parameters(Activation()) == {}
    assert swiglu_parameters(cases.GPT_OSS) == {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
    assert swiglu_parameters(cases.DEEPSEEK_V4) == {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": 10.0}
    alpha, beta, limit = swiglu_parameters(Activation(alpha=1.702)).values()
    assert (alpha, beta) == (1.702, 0.0)
    assert limit > 1e38


def test_humming_refuses_dense_weights():
    dense = cases.make_dense(cases.make_config())
    with pytest.raises(ConfigError, match="Dense"):
        expert_tensors(dense.gate_up, None, GemmShape(2, 64, 96, "cols"), False)


def test_stacking_prepares_one_expert_at_a_time():
    alive, seen = 0, []

    def prepare(index):
        seen.append((index, alive))
        return {"a": torch.full((1, 2), float(index)), "b": torch.full((1,), index)}

    stacks = stack_experts(3, prepare)
    assert stacks["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stacks["b"].tolist() == [0, 1, 2]
    assert [index for index, _ in seen] == [0, 1, 2]
    source = torch.zeros(1, 2)
    assert stack_experts(1, lambda _: {"a": source})["a"].data_ptr() != source.data_ptr()


def test_zeros_lie_after_a_stack_where_kernels_read_past_it():
    stack = stack_experts(2, lambda _: {"a": torch.ones(1, 3)}, {"a": 2, "b": 9})["a"]
    assert stack.is_contiguous()
    assert stack.as_strided((12,), (1,)).tolist() == [1] * 6 + [0] * 6


@pytest.mark.parametrize(("row", "col"), [(0, 0), (9, 1), (37, 26), (63, 63), (64, 130)])
def test_an_mxfp4_value_is_where_a_thread_of_wgmma_reads_it(row, col):
    """By hand from PTX ISA, "wgmma register fragments, matrix A": warp w has rows 16 w, thread 4 g + t of it rows g and
    g + 8 and columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16. Nothing else is touched."""
    codes = torch.zeros(128, 96, dtype=torch.uint8)
    codes[row, col // 2] = 0b1111 << 4 * (col % 2)
    words, scale_words = four_bit.pack_mxfp4(codes, torch.zeros(128, 6, dtype=torch.uint8))
    assert words.shape == (2 * 3, 512)
    unit, warp, g, t = row // 64 * 3 + col // 64, row % 64 // 16, row % 8, col % 8 // 2
    thread = words.view(6, 128, 4)[unit, 32 * warp + 4 * g + t].view(2, 2)[col % 64 // 32]
    bits = [sum(int(word) >> bit & 1 for bit in range(32)) for word in thread]
    assert sum(bits) == 4
    assert bits[row % 16 // 8] == 4 or col % 32 >= 24, "all in the row's word, or shared with the other's rest"
    assert int((words != 0).sum()) == sum(bit > 0 for bit in bits)
    # All scales are the largest of their row: 2 ** 127, 254 in the exponent of a bf16.
    assert (scale_words & 0x7F807F80 == 254 << 7 | 254 << 23).all()
    assert scale_words.shape == (2 * 3, 32)


@pytest.mark.parametrize(("row", "block"), [(0, 0), (9, 1), (77, 6), (127, 11)])
def test_nvfp4_scales_lie_with_their_threads(row, block):
    """By hand: 1.0 is 2 ** 119 in bf16, exponent 246, 448 is 1.75 * 2 ** 127; bits 4 to 11 are stored. Two blocks of 16
    columns share a word, the second 8 bits to the right; rows 8 apart share one, the second 16 bits to the left."""
    scales = torch.ones(128, 12)
    scales[row, block] = 448
    codes = torch.full((128, 96), 0x22, dtype=torch.uint8)
    scale_words = four_bit.pack_nvfp4(codes, scales.to(torch.float8_e4m3fn))[1]
    assert scale_words.shape == (2 * 3, 64)
    bits = [0x7B00 & 0xFF0, 0x7F60 & 0xFF0]
    plain = bits[0] | bits[0] << 16
    usual = plain | (plain >> 8 | plain << 24) & 0xFFFFFFFF
    where = row // 64 * 3 + block // 4, (row % 64 // 16 * 8 + row % 8) * 2 + block % 4 // 2
    changed = (bits[0] ^ bits[1]) << 16 * (row % 16 // 8)
    changed = changed if block % 2 == 0 else (changed >> 8 | changed << 24) & 0xFFFFFFFF
    wanted = torch.full((6, 64), usual)
    wanted[where] = usual ^ changed
    assert torch.equal(scale_words.long() & 0xFFFFFFFF, wanted)
    none = four_bit.pack_nvfp4(codes, torch.zeros(128, 12).to(torch.float8_e4m3fn))[0]
    assert not none.any(), "codes are zero where their scale is"
    negative = four_bit.pack_nvfp4(codes, (-scales).to(torch.float8_e4m3fn))
    assert torch.equal(negative[1], scale_words)
    assert torch.equal(negative[0], four_bit.pack_nvfp4(codes ^ 0x88, scales.to(torch.float8_e4m3fn))[0])


@pytest.mark.parametrize("cols", [0, 5, 41, 190])
def test_int4_codes_lie_with_their_threads(cols):
    """By hand: of one code, its word, and where in it: (j, i) in nibbles from the lowest, l in the upper half."""
    row = 77
    codes = torch.zeros(128, 96, dtype=torch.uint8)
    codes[row, cols // 2] = 0xF << 4 * (cols % 2)
    words = four_bit.pack_int4(codes, torch.ones(128, 6), None)[0].long() & 0xFFFFFFFF
    w, h, g = row % 64 // 16, row % 16 // 8, row % 8
    q, j, i, t, l = cols % 64 // 32, cols % 32 // 16, cols % 16 // 8, cols % 8 // 2, cols % 2
    wanted = torch.zeros(6, 512, dtype=torch.int64)
    wanted[row // 64 * 3 + cols // 64, (w * 32 + g * 4 + t) * 4 + 2 * q + h] = 0xF << 4 * (2 * j + i) + 16 * l
    assert torch.equal(words, wanted)


@pytest.mark.parametrize(("group", "words"), [(32, 64), (64, 32), (192, 32)])
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_scales_lie_with_their_threads(group, words, zeros):
    """By hand: a row's largest scale, 1.5, is 1.5 * 2 ** 126, and half of it half of that; a whole row's one scale is
    2 ** 126. Zero points are both nibbles of a byte, in the word after. Rows 8 apart share words."""
    codes, scales = torch.zeros(128, 96, dtype=torch.uint8), torch.full((128, 192 // group), 1.5)
    points = torch.full_like(scales, 5, dtype=torch.uint8)
    row, last = 77, 192 // group - 1
    scales[row, last], points[row, last] = 0.75 if last else 4.0, 9
    found = four_bit.pack_int4(codes, scales, points if zeros else None)[1].long() & 0xFFFFFFFF
    assert found.shape == (6, words * (1 + zeros))
    assert four_bit.int4_factor(scales)[76:78].tolist() == ([128.0, 128.0] if last else [192.0, 512.0])
    usual, changed = (0x7EC0, 0x7E40) if last else (0x7E80, 0x7E80)
    found = found.view(2, 3, 4, 8, -1, 1 + zeros)  # unit, unit, w, g, scale of the row, kind
    wanted = torch.tensor([usual | usual << 16, 0x00550055][: 1 + zeros]).expand(found.shape).clone()
    columns = slice(2, 3) if last else slice(None)
    each = slice(1, None) if group == 32 else slice(None)
    wanted[1, columns, 0, 5, each, 0] = usual | changed << 16
    wanted[1, columns, 0, 5, each, 1:] = 0x00990055
    assert torch.equal(found, wanted)


def test_factors_take_a_rows_largest_scale():
    scales = torch.tensor([[0, 0], [3, 128], [254, 9], [255, 1]], dtype=torch.uint8)
    factor = four_bit.mxfp4_factor(scales)
    assert factor[:3].tolist() == [2.0**-128, 1.0, 2.0**126]
    assert factor[3].isnan()


def test_row_buckets():
    assert [row_bucket(rows) for rows in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [row_bucket(rows, 4) for rows in (1, 2, 16, 17, 257)] == [1, 16, 16, 256, 4096]


@pytest.mark.parametrize(("first", "L"), [(0, 8), (2, 4), (6, 2)])
@pytest.mark.parametrize("N", [1, 7, 40])
def test_permute_groups_by_expert(N, first, L):
    """Against loops over the slots. E is 8, and the id of no expert."""
    generator = torch.Generator().manual_seed(N)
    ids = torch.rand(N, 9, generator=generator).argsort(1)[:, :3].to(torch.int32)
    hidden, weights = torch.randn(N, 6, generator=generator), torch.rand(N, 3, generator=generator)
    rows, order = group_rows(hidden, ids, first, L, torch.float32)
    slots = [(int(ids[n, k]) - first, n, k) for n in range(N) for k in range(3)]
    wanted = sorted(slot for slot in slots if 0 <= slot[0] < L)
    assert [int(v) for v in order.offsets.diff()] == [sum(slot[0] == e for slot in wanted) for e in range(L)]
    assert rows.shape == (N * 3, 6)
    for place, (_, n, k) in enumerate(wanted):
        assert int(order.place[n, k]) == place
        assert torch.equal(rows[place], hidden[n])
    assert int((order.place >= 0).sum()) == len(wanted)
    assert torch.equal(group_by_expert(ids, first, L).place, order.place)
    result = marked(N * 3, 6)
    for every_row in (True, False):
        out = torch.full((N, 6), 7.0)
        weighted_unpermute(result, order, weights, out, every_row=every_row)
        for n in range(N):
            mine = [(place, k) for place, (_, row, k) in enumerate(wanted) if row == n]
            expected = sum((weights[n, k] * result[place] for place, k in mine), torch.zeros(6))
            expected = expected if mine or every_row else torch.full((6,), 7.0)
            torch.testing.assert_close(out[n], expected)

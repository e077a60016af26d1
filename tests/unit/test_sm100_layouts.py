"""Blackwell layouts: every byte lies where the kernels' documents say."""

from __future__ import annotations

import pytest
import torch
from support.stand_ins.sm100_kernels import read_mma_scales, scale_offset, shuffled_place

from eprt.experts.blackwell import swizzle
from eprt.experts.blackwell.cutedsl import padded_size
from eprt.experts.blackwell.scales import Nvfp4Factors, share_global_scale
from eprt.experts.padding import pad_parts
from eprt.rounding import round_up
from eprt.weights import ExpertWeights, Nvfp4

ODD = [(1, 1), (24, 6), (40, 7), (127, 3), (128, 4), (1856, 10), (2880, 180)]


def numbered(L: int, rows: int, cols: int) -> torch.Tensor:
    """Neighbouring rows, columns and experts differ, in one byte."""
    e, r, c = torch.meshgrid(torch.arange(L), torch.arange(rows), torch.arange(cols), indexing="ij")
    return ((e * 101 + r * 7 + r // 32 * 3 + c * 29) % 251).to(torch.uint8)


@pytest.mark.parametrize(("rows", "cols"), [*ODD, (40, 6), (130, 9)])
def test_scale_bytes_lie_where_the_tensor_cores_look(rows, cols):
    scales = numbered(3, rows, cols)
    swizzled = swizzle.swizzle_scales(scales)
    assert swizzled.shape == (3, round_up(rows, 128), round_up(cols, 4))
    offsets = scale_offset(torch.arange(rows)[:, None], torch.arange(cols), cols)
    assert torch.equal(swizzled.flatten(1)[:, offsets], scales)


@pytest.mark.parametrize(("rows", "cols"), [(40, 6), (256, 8)])
def test_mma_view_is_a_view_and_addresses_the_same_scale(rows, cols):
    scales = (numbered(2, rows, cols) % 120).view(torch.float8_e4m3fn)
    swizzled = swizzle.swizzle_scales(scales)
    view = swizzle.mma_scale_view(swizzled)
    assert view.data_ptr() == swizzled.data_ptr()
    assert torch.equal(read_mma_scales(view, rows, cols), scales.float())


def test_unswizzled_scales_are_noticed():
    scales = (numbered(2, 256, 8) % 120).view(torch.float8_e4m3fn)
    assert not torch.equal(read_mma_scales(swizzle.mma_scale_view(scales), 256, 8), scales.float())


def test_padding_what_fits_copies_it_too():
    matrix = numbered(2, 128, 8)
    padded = pad_parts(matrix, 2, 64, 8)
    assert torch.equal(padded, matrix)
    assert padded.data_ptr() != matrix.data_ptr()


@pytest.mark.parametrize("half", [64, 128, 320])
def test_halves_in_turns_of_64_rows(half):
    matrix = numbered(2, 2 * half, 3)
    mixed = swizzle.interleave_halves(swizzle.swap_halves(matrix))
    for j in range(half):
        place = j // 64 * 128 + j % 64
        assert torch.equal(mixed[:, place], matrix[:, half + j]), "up"
        assert torch.equal(mixed[:, place + 64], matrix[:, j]), "gate"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("half", [64, 256, 960])
def test_trtllm_rows(half, gated):
    rows = 2 * half if gated else half
    matrix = numbered(2, rows, 3).view(torch.float8_e4m3fn)
    order = swizzle.trtllm_row_order(rows, gated)
    placed = swizzle.take_rows(matrix, order)
    for i in range(half):
        wanted = {2 * i: half + i, 2 * i + 1: i} if gated else {i: i}  # up first, then gate
        for alternated, canonical in wanted.items():
            place = int(shuffled_place(torch.tensor(alternated)))
            assert torch.equal(placed[:, place].view(torch.uint8), matrix[:, canonical].view(torch.uint8))


def nvfp4(L: int, rows: int, cols: int, parts: int, input_scale: torch.Tensor | None = None) -> Nvfp4:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.rand(L, rows, cols // 16, generator=generator).add(0.5).to(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (L, rows, cols // 2), dtype=torch.uint8, generator=generator)
    return Nvfp4(codes, scales, torch.rand(L, parts, generator=generator) + 0.5, input_scale)


def test_sizes_that_kernels_see():
    def weights(H: int, I: int, parts: int) -> ExpertWeights:
        return ExpertWeights(nvfp4(1, parts * I, H, parts), nvfp4(1, H, I, 1))

    assert padded_size(weights(96, 48, 2), 2) == (128, 64)
    assert padded_size(weights(2880, 1856, 2), 2) == (2944, 1856)
    assert padded_size(weights(2880, 1856, 1), 1) == (2944, 1920)


def test_factors_take_the_largest_input_scale_and_keep_both_halves():
    gate_up = nvfp4(3, 64, 32, 2, torch.tensor([[1.0, 1.0], [3.0, 2.0], [0.5, 4.0]]))
    down = nvfp4(3, 32, 32, 1, torch.tensor([[1.0], [2.0], [3.0]]))
    factors = Nvfp4Factors.from_matrices(gate_up, down, torch.device("cpu"))
    assert factors.input is not None
    assert factors.input.tolist() == [4.0]
    assert factors.intermediate is not None
    assert factors.intermediate.tolist() == [1.0, 2.0, 3.0]
    torch.testing.assert_close(factors.gate * factors.ratio, gate_up.global_scale[:, 1])
    weight_only = nvfp4(1, 64, 32, 2), nvfp4(1, 32, 32, 1)
    assert Nvfp4Factors.from_matrices(*weight_only, torch.device("cpu")).input is None


def test_sharing_a_global_scale():
    scales = torch.linspace(0.02, 448, 3 * 8 * 4).view(3, 8, 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 0.25], [0.3, 0.7], [2.0, 2.0]])
    folded, shared = share_global_scale(scales, scale)
    assert torch.equal(shared, torch.tensor([0.5, 0.7, 2.0]))
    before = scales.float().view(3, 2, 4, 4) * scale[:, :, None, None]
    after = folded.float().view(3, 2, 4, 4) * shared[:, None, None, None]
    assert torch.isfinite(after).all()
    assert torch.equal(after[[0, 2]], before[[0, 2]]), "powers of two and equal scales fold exactly"
    assert torch.equal(after[1, 1], before[1, 1]), "the larger scale stays"
    assert ((after - before).abs() <= before * 2**-4).all()

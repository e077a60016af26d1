"""Hopper weight layouts and the permute by hand; tests/upstream runs the executors on prepared weights, and
test_four_bit_kernels.py has every code and scale where a kernel reads it."""

from __future__ import annotations

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


def test_stacks_hold_what_was_prepared_of_each_expert():
    def prepare(index):
        return {"a": torch.full((1, 2), float(index)), "b": torch.full((1,), index)}

    stacks = stack_experts(3, prepare)
    assert stacks["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stacks["b"].tolist() == [0, 1, 2]
    source = torch.zeros(1, 2)
    assert stack_experts(1, lambda _: {"a": source})["a"].data_ptr() != source.data_ptr()


def test_zeros_lie_after_a_stack_where_kernels_read_past_it():
    stack = stack_experts(2, lambda _: {"a": torch.ones(1, 3)}, {"a": 2, "b": 9})["a"]
    assert stack.is_contiguous()
    assert stack.as_strided((12,), (1,)).tolist() == [1] * 6 + [0] * 6


def test_factors_take_a_rows_largest_scale():
    scales = torch.tensor([[0, 0], [3, 128], [254, 9], [255, 1]], dtype=torch.uint8)
    factor = four_bit.mxfp4_factor(scales)
    assert factor[:3].tolist() == [2.0**-128, 1.0, 2.0**126]
    assert factor[3].isnan()
    assert four_bit.int4_factor(torch.tensor([[1.5], [4.0]])).tolist() == [192.0, 512.0]  # of whole rows, the scale


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
    result = torch.arange(1.0, N * 18 + 1).view(N * 3, 6)
    for every_row in (True, False):
        out = torch.full((N, 6), 7.0)
        weighted_unpermute(result, order, weights, out, every_row=every_row)
        for n in range(N):
            mine = [(place, k) for place, (_, row, k) in enumerate(wanted) if row == n]
            expected = sum((weights[n, k] * result[place] for place, k in mine), torch.zeros(6))
            expected = expected if mine or every_row else torch.full((6,), 7.0)
            torch.testing.assert_close(out[n], expected)

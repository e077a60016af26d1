"""MXFP4 and NVFP4 through the grouped GEMM of our own, against the float32 witness and a table written by hand: on one
GPU or interpreted on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import number_formats
from support.cases.expert_cases import shard_of
from support.cases.four_bit_cases import SCHEDULES, decoded, every_code, int4_experts, with_e4m3_tokens
from support.cases.grouped_cases import (
    ACTIVATIONS,
    BOUND,
    FP8_BOUND,
    FP8_RUNTIME,
    all_experts,
    build,
    check_slabs,
    error_of_shares,
    error_on_flat,
    errors_against_the_right_one,
    layer,
    make_slabs,
    make_tokens,
    witness,
)
from support.cases.number_formats import E2M1
from support.stand_ins.kernel_device import DEVICE, cuda_only, runs_kernels, sized

from eprt.conformance.oracle import relative_error
from eprt.experts.grouped import TritonGroupedExecutor, four_bit
from eprt.experts.grouped.mxfp4_e4m3 import e4m3_factor, pack_mxfp4_e4m3
from eprt.experts.grouped.schedules import HOPPER
from eprt.tokens import Payload

pytestmark = [pytest.mark.gpu, runs_kernels]


# OCP 8-bit Floating Point Specification, table 1: E4M3 of bias 7, subnormals below 8, 0x7F is NaN.
E4M3 = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def test_every_mxfp4_code_with_every_scale():
    """All 16 x 255, bit by bit: a row has one scale, its columns all codes, in an order of the row's own."""
    order, codes = every_code(256)
    scales = torch.arange(256).clamp(max=254)[:, None].expand(256, 2).to(DEVICE, torch.uint8)
    packed = [four_bit.pack_mxfp4(codes[row : row + 64], scales[row : row + 64]) for row in range(0, 256, 64)]
    found = torch.cat([decoded(each, 64, 64, "w4a16") for each in packed]).double()
    factor, scales = four_bit.mxfp4_factor(scales).double(), scales.cpu()
    wanted = E2M1.double()[order] * 2.0 ** (scales[:, :1].double() - 127)
    assert torch.equal((found * factor[:, None]).cpu(), wanted)
    assert torch.equal((found == 0).cpu() & found.signbit().cpu(), order == 8)


# E4M3 of E2M1's eight magnitudes, 0.5 being 2 ** -6: exponent field 1 of bias 7, above three bits of mantissa.
E4M3_OF_E2M1 = [0x00, 0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24]


def every_group(offsets):
    """64 rows of 16 groups, which lie `offsets` octaves below scale 120, each row's groups in an order of its own."""
    below = torch.tensor(offsets)[(torch.arange(16)[None] + torch.arange(64)[:, None]) % len(offsets)]
    order = torch.arange(16 * 32).view(1, 16, 32) + torch.arange(64)[:, None, None] + below[:, :, None]
    order = (order % 16).flatten(1)
    return below, order, number_formats.packed(order).to(DEVICE), (120 - below).to(DEVICE, torch.uint8)


def test_every_mxfp4_code_as_e4m3_in_every_octave():
    """All 16 x 12, byte by byte."""
    below, order, codes, scales = every_group(range(12))
    found = decoded(pack_mxfp4_e4m3(codes, scales), 64, 512, "w4a8")
    octaves = (11 - below).repeat_interleave(32, 1)
    bytes = torch.tensor(E4M3_OF_E2M1)[order & 7] + 8 * octaves * (order & 7 != 0) + 128 * (order >= 8)
    assert torch.equal(found.view(torch.uint8).cpu().long(), bytes)
    value = torch.tensor([*E4M3, float("nan")], dtype=torch.float64)[bytes & 127] * (1 - 2 * (bytes >> 7))
    wanted = E2M1.double()[order] * 2.0 ** (scales.cpu().double() - 127).repeat_interleave(32, 1)
    assert torch.equal(value * e4m3_factor(codes, scales).cpu().double()[:, None], wanted)


def test_groups_further_below_are_rounded_to_the_lowest_octave():
    """Half a step of the lowest octave, ties to even; from 16 octaves on, where 6 is less, nothing is left."""
    below, order, codes, scales = every_group((0, 12, 13, 14, 15, 16, 30, 11))
    found = decoded(pack_mxfp4_e4m3(codes, scales), 64, 512, "w4a8").cpu().double()
    found *= e4m3_factor(codes, scales).cpu().double()[:, None]
    exact = E2M1.double()[order] * 2.0 ** (scales.cpu().double() - 127).repeat_interleave(32, 1)
    step = 2.0 ** (120 - 127 - 11 - 1)
    deep = (below > 11).repeat_interleave(32, 1)
    assert torch.equal(found, torch.where(deep & (exact.abs() < 2 * 2 * step), (exact / step).round() * step, exact))
    assert float((found - exact).abs().max()) == step / 2


def test_scales_that_scale_nothing_push_no_weights_down():
    codes = torch.full((64, 64), 0x91, dtype=torch.uint8, device=DEVICE)
    codes[:, 16:32] = 0x80  # both zeros
    scales = torch.tensor([100, 254, 98, 89], dtype=torch.uint8, device=DEVICE).repeat(64, 1)
    scales[5, 3] = 255  # NaN
    found = decoded(pack_mxfp4_e4m3(codes, scales), 64, 128, "w4a8").cpu().double()
    factor = e4m3_factor(codes, scales).cpu().double()
    assert factor.isnan().nonzero().tolist() == [[5]]
    row = (found * factor[:, None])[7]
    assert row[::32].tolist() == [2.0**-28, 0.0, 2.0**-30, 2.0**-39]
    assert row[1::32].tolist() == [-(2.0**-28), 0.0, -(2.0**-30), -(2.0**-39)]


def test_every_nvfp4_code_with_every_scale():
    """All 16 x 254, bit by bit: a row has every code under four scales of its own, neither rows nor blocks alike."""
    assert len(E4M3) == 127
    number = (torch.arange(64)[:, None] * 4 + torch.arange(4)[None]) % 254
    scale_codes = torch.where(number < 127, number, number + 1)  # the upper half negative; neither NaN
    order, codes = every_code(64)
    scales = scale_codes.to(torch.uint8).view(torch.float8_e4m3fn).to(DEVICE)
    found = decoded(four_bit.pack_nvfp4(codes, scales), 64, 64, "nv4a16")
    factor = four_bit.nvfp4_factor(scales, torch.ones(1, device=DEVICE)).view(64, 1).double()
    scale = torch.tensor([*E4M3, *(-value for value in E4M3)], dtype=torch.float64)[number]
    wanted = E2M1.double()[order] * scale.repeat_interleave(16, 1)
    assert torch.equal((found.double() * factor).cpu(), wanted)


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero points"])
def test_every_int4_code_with_scales_of_every_size(zeros):
    """A row has every code under two scales of its own, of either sign and from 2 ** -120 to 2 ** 120; rounded once."""
    order, codes = every_code(64)
    numbers = torch.arange(64)[:, None] + torch.tensor([[0, 29]])
    size = (1 + numbers % 128 / 128) * 2.0 ** (torch.arange(64)[:, None] * 240 // 63 - 120 - torch.tensor([[0, 9]]))
    scales = (size * (1 - 2 * (numbers % 2))).to(DEVICE, torch.bfloat16)
    points = (numbers % 16).to(DEVICE, torch.uint8) if zeros else None
    found = decoded(four_bit.pack_int4(codes, scales, points), 64, 64, "i4a16", zeros=zeros)
    factor = four_bit.int4_factor(scales).double()
    exact = order - (numbers % 16 if zeros else torch.full((64, 2), 8)).repeat_interleave(32, 1)
    wanted = exact.double() * scales.cpu().double().repeat_interleave(32, 1)
    found = (found.double() * factor[:, None]).cpu()
    assert ((found - wanted).abs() <= wanted.abs() * 2.0**-8).all()  # half of the last of eight bits
    assert (found != wanted).any()


@pytest.mark.parametrize(
    ("group", "zeros", "dtype", "name", "activation", "H", "I"),
    [
        (32, False, torch.bfloat16, "small", "gpt_oss", 160, 96),
        (32, True, torch.float32, "large", "silu", 160, 96),
        (64, False, torch.float32, "tail", "silu", 192, 64),
        (128, True, torch.bfloat16, "small", "silu", 256, 128),
        (128, False, torch.bfloat16, "whole", "relu2", 256, 128),
        (0, False, torch.float32, "small", "silu", 104, 72),
        (0, True, torch.bfloat16, "tail", "gpt_oss", 104, 72),
    ],
)
def test_int4_equals_the_witness(group, zeros, dtype, name, activation, H, I, schedule):
    schedule(SCHEDULES[name])
    config = layer("int4", H=H, I=I, E=3, K=2, activation=ACTIVATIONS[activation])
    weights = int4_experts(config, group, zeros=zeros, dtype=dtype)
    assert 0 < error_on_flat(config, weights, make_tokens(config, sized(300, 24))) < BOUND


@pytest.mark.parametrize(
    ("form", "name", "activation", "H", "I"),
    [
        ("mxfp4", "small", "gpt_oss", 160, 96),
        ("mxfp4", "small", "relu2", 96, 32),
        ("mxfp4", "large", "silu", 160, 96),
        ("mxfp4", "large", "gpt_oss", 96, 32),
        ("mxfp4", "tail", "gpt_oss", 160, 96),
        ("mxfp4", "tail", "silu", 96, 32),
        ("nvfp4", "small", "gpt_oss", 160, 96),
        ("nvfp4", "large", "silu", 112, 48),
        ("nvfp4", "tail", "silu", 96, 48),
        ("nvfp4", "small", "relu2", 48, 80),
    ],
)
def test_equals_the_witness(form, H, I, activation, name, schedule):
    """Sizes that are no whole units; 16 is the largest power of two in some of NVFP4's."""
    schedule(SCHEDULES[name])
    config = layer(form, H=H, I=I, E=3, K=2, activation=ACTIVATIONS[activation])
    assert 0 < error_on_flat(config, all_experts(config), make_tokens(config, sized(300, 24))) < BOUND


@pytest.mark.parametrize(("name", "activation"), [("small", "gpt_oss"), ("large", "silu"), ("tail", "gpt_oss")])
def test_what_fp8_tokens_cost_mxfp4(name, activation, schedule):
    """An error beyond that of bf16 and within what rounding to E4M3 explains: next to experts that are exact but for
    that, only what lies between the matrices differs, where rounding to bf16 first has it fall to the other side."""
    schedule(SCHEDULES[name])
    config = layer("mxfp4", H=160, I=96, E=3, K=2, activation=ACTIVATIONS[activation])
    weights, tokens = all_experts(config), make_tokens(config, sized(300, 24))
    executor = build(TritonGroupedExecutor, config, weights, runtime=FP8_RUNTIME)
    found = executor(tokens)
    assert BOUND < relative_error(found, witness(config, weights, tokens)) < FP8_BOUND
    assert relative_error(found, with_e4m3_tokens(config, weights, tokens)) < 2 * BOUND
    slabs, past = make_slabs(tokens, shard_of(config), tokens.num_rows + 3)
    assert BOUND < relative_error(executor(slabs)[~past], witness(config, weights, slabs)[~past]) < FP8_BOUND


def test_scales_far_apart(schedule):
    """Rows of the first matrix between 2 ** -60 and 2 ** 60, undone by the second: bf16 ends at 2 ** 127."""
    schedule(SCHEDULES["whole"])
    config = layer("mxfp4", H=96, I=64, activation=ACTIVATIONS["relu2"], bias=False)
    weights = all_experts(config)
    shift = torch.arange(64, device=DEVICE) * 40 // 63  # relu2 squares, so the second matrix takes twice as much back
    gate_up = replace(weights.gate_up, scales=weights.gate_up.scales + 20 - shift.to(torch.uint8)[None, :, None])
    wide = weights.down.scales.int() + torch.tensor([0, 60], device=DEVICE, dtype=torch.int32)
    weights = replace(weights, gate_up=gate_up, down=replace(weights.down, scales=wide.to(torch.uint8)))
    assert int(weights.down.scales.max()) > 150
    assert error_on_flat(config, weights, make_tokens(config, 20)) < BOUND


@pytest.mark.parametrize(
    ("form", "name", "nan"), [("mxfp4", "whole", 0xFF), ("nvfp4", "small", 0x7F), ("int4", "small", float("nan"))]
)
def test_a_scale_that_is_nan_spoils_its_row(form, name, nan, schedule):
    schedule(SCHEDULES[name])
    config = layer(form, H=96, I=64, bias=False)
    weights, tokens = all_experts(config), make_tokens(config, 20)
    scales = weights.down.scales
    (scales if form == "int4" else scales.view(torch.uint8))[:, 5, 1] = nan
    found = build(TritonGroupedExecutor, config, weights)(tokens)
    read = (tokens.ids < config.num_experts).any(1)
    assert found[read, 5].isnan().all()
    assert found[read].isnan().sum() == read.sum()


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_slabs(form, schedule):
    schedule(SCHEDULES["large"])
    check_slabs(layer(form, H=160, I=96, E=4, K=2), 30, spare=3, empty=1)


@pytest.mark.parametrize(("ep_size", "moe_tp_size"), [(2, 2)])
def test_shares_add_up_to_the_layer(ep_size, moe_tp_size, schedule):
    schedule(SCHEDULES["whole"])
    assert error_of_shares(layer("mxfp4", H=96, I=64, E=4, K=2), ep_size, moe_tp_size) < BOUND


@pytest.mark.parametrize(("form", "name"), [("mxfp4", "whole"), ("nvfp4", "small")])
def test_mistakes_would_be_seen(form, name, schedule):
    """Gate and up, NVFP4's second scales of both, scales one block or one row off, nibbles the other way round."""
    schedule(SCHEDULES[name])
    config = layer(form, H=96, I=64, E=2, K=1)
    weights, tokens = all_experts(config), make_tokens(config, 12)
    first, half = weights.gate_up, weights.gate_up.shape[1] // 2

    def rolled(by, dim):
        return first.scales.view(torch.uint8).roll(by, dim).view(first.scales.dtype)

    swapped = replace(weights, gate_up=replace(first, codes=first.codes.roll(half, 1), scales=rolled(half, 1)))
    wrong = [
        replace(first, scales=rolled(1, 2)),
        replace(first, scales=rolled(1, 1)),
        replace(first, codes=first.codes << 4 | first.codes >> 4),
    ]
    if form == "nvfp4":
        wrong.append(replace(first, global_scale=first.global_scale.flip(1)))
    else:
        swapped = replace(swapped, gate_up_bias=weights.gate_up_bias.roll(half, 1))
    others = [swapped, *(replace(weights, gate_up=mistake) for mistake in wrong)]
    right, *errors = errors_against_the_right_one(config, weights, tokens, others)
    assert right < BOUND
    assert len(errors) == len(others) == (5 if form == "nvfp4" else 4)
    assert all(each > 3 * BOUND for each in errors)


def test_int4_mistakes_would_be_seen(schedule):
    """Gate and up, scales and zero points one group or one row off, nibbles the other way round."""
    schedule(SCHEDULES["whole"])
    config = layer("int4", H=96, I=64, E=2, K=1, bias=False)
    weights, tokens = int4_experts(config, 32, zeros=True), make_tokens(config, 12)
    first, half = weights.gate_up, weights.gate_up.shape[1] // 2
    wrong = [
        first.map(lambda tensor: tensor.roll(half, 1)),
        replace(first, scales=first.scales.roll(1, 2)),
        replace(first, scales=first.scales.roll(1, 1)),
        replace(first, zeros=first.zeros.roll(1, 2)),
        replace(first, zeros=first.zeros.roll(1, 1)),
        replace(first, zeros=None),
        replace(first, codes=first.codes << 4 | first.codes >> 4),
    ]
    others = [replace(weights, gate_up=mistake) for mistake in wrong]
    right, *errors = errors_against_the_right_one(config, weights, tokens, others)
    assert right < BOUND
    assert all(each > 3 * BOUND for each in errors)


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_experts_can_be_moved(form, schedule):
    """`slot_tensors` are views of what calls read: two experts trade places."""
    schedule(SCHEDULES["whole"])
    config = layer(form, H=96, I=64, E=4, K=2)
    weights, tokens = all_experts(config), make_tokens(config, 20)
    executor = build(TritonGroupedExecutor, config, weights)
    for tensor in executor.slot_tensors().values():
        assert tensor.is_contiguous()
        assert tensor.shape[0] == config.num_experts
        tensor[:2] = tensor[:2].flip(0)
    swapped = torch.tensor([1, 0, *range(2, config.num_experts + 1)], device=DEVICE, dtype=torch.int32)
    moved = replace(tokens, ids=swapped[tokens.ids.long()])
    assert torch.equal(executor(moved), build(TritonGroupedExecutor, config, weights)(tokens))


def test_a_row_does_not_depend_on_its_batch(schedule):
    """Within a schedule: the same sums in the same order, whatever else is in the tile, however often it is asked."""
    schedule(SCHEDULES["whole"])
    config = layer("mxfp4", H=96, I=64, E=4, K=2)
    executor, tokens = build(TritonGroupedExecutor, config, all_experts(config)), make_tokens(config, 24)
    together = executor(tokens)
    some = [3, 5, 10, 11, 22]  # up to four take another kernel, whose sums have another order
    hidden = Payload.plain(tokens.hidden.data[some])
    alone = executor(replace(tokens, hidden=hidden, ids=tokens.ids[some], weights=tokens.weights[some]))
    assert torch.equal(alone, together[some])
    assert torch.equal(executor(tokens), together)


@cuda_only
@pytest.mark.parametrize(("limit", "schedule"), HOPPER["w4a16"])
def test_tensor_cores_read_registers_before_they_are_written_again(limit, schedule, monkeypatch):
    """The schedules of the table on a long sum: Triton 3.6 and ptxas before CUDA 13.3 write the next block's values
    over those that an asynchronous product still reads (triton-lang/triton#9433, #11781) unless it is waited for."""
    monkeypatch.setattr("eprt.experts.grouped.choose", lambda *_, **__: schedule)
    config = layer("mxfp4", H=4096, I=1024, E=8, K=2)
    weights, tokens = all_experts(config), make_tokens(config, int(min(9000, 100 * limit)))
    assert error_on_flat(config, weights, tokens) < BOUND
    executor = build(TritonGroupedExecutor, config, weights)
    first = executor(tokens)
    assert all(torch.equal(executor(tokens), first) for _ in range(50))


@cuda_only
@pytest.mark.parametrize(("H", "I"), [(736, 352), (768, 384)], ids=["no whole blocks", "whole blocks"])
def test_a_row_is_the_same_in_every_schedule(H, I, monkeypatch):
    """Every schedule of the table adds products along K in one order, 16 at a time: a batch of any size gives a token
    the same bits."""
    config = layer("mxfp4", H=H, I=I, E=8, K=2)
    executor, tokens = build(TritonGroupedExecutor, config, all_experts(config)), make_tokens(config, 300)
    found = []
    for _, each in HOPPER["w4a16"]:
        monkeypatch.setattr("eprt.experts.grouped.choose", lambda *_, each=each, **__: each)
        found.append(executor(tokens))
    assert all(torch.equal(each, found[0]) for each in found[1:])

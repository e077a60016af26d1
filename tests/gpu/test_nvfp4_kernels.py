"""NVFP4 through the grouped GEMM of our own, against the float32 witness and a table written by hand: on one GPU or
interpreted on the CPU. What it shares with MXFP4 is in test_mxfp4_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.fp4_cases import E2M1, SCHEDULES, decoded, every_code
from support.cases.grouped_cases import (
    ACTIVATIONS,
    BOUND,
    all_experts,
    build,
    error_on_flat,
    errors_against_the_right_one,
    layer,
    make_tokens,
)
from support.stand_ins.kernel_device import DEVICE, runs_kernels, sized

from eprt.experts.grouped import TritonGroupedExecutor, fp4

pytestmark = [pytest.mark.gpu, runs_kernels]

# OCP 8-bit Floating Point Specification, table 1: E4M3 of bias 7, subnormals below 8, 0x7F is NaN.
E4M3 = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def test_every_code_with_every_scale():
    """All 16 x 254, bit by bit: a row has every code under four scales of its own, neither rows nor blocks alike."""
    assert len(E4M3) == 127
    number = (torch.arange(64)[:, None] * 4 + torch.arange(4)[None]) % 254
    scale_codes = torch.where(number < 127, number, number + 1)  # the upper half negative; neither NaN
    order, codes = every_code(64)
    scales = scale_codes.to(torch.uint8).view(torch.float8_e4m3fn).to(DEVICE)
    found = decoded(fp4.pack_nvfp4(codes, scales), 64, 64, nv=True)
    factor = fp4.nvfp4_factor(scales, torch.ones(1, device=DEVICE)).view(64, 1).double()
    scale = torch.tensor([*E4M3, *(-value for value in E4M3)], dtype=torch.float64)[number]
    wanted = torch.tensor(E2M1, dtype=torch.float64)[order] * scale.repeat_interleave(16, 1)
    assert torch.equal((found.double() * factor).cpu(), wanted)


@pytest.mark.parametrize(
    ("name", "activation", "H", "I"),
    [("small", "gpt_oss", 160, 96), ("large", "silu", 112, 48), ("tail", "silu", 96, 48), ("small", "relu2", 48, 80)],
)
def test_equals_the_witness(H, I, activation, name, schedule):
    """Sizes that are no whole units, and of which 16 is the largest power of two."""
    schedule(SCHEDULES[name])
    config = layer("nvfp4", H=H, I=I, E=3, K=2, activation=ACTIVATIONS[activation])
    assert 0 < error_on_flat(config, all_experts(config), make_tokens(config, sized(300, 24))) < BOUND


def test_a_scale_that_is_nan_spoils_its_row(schedule):
    schedule(SCHEDULES["small"])
    config = layer("nvfp4", H=96, I=64, bias=False)
    weights, tokens = all_experts(config), make_tokens(config, 20)
    weights.down.scales.view(torch.uint8)[:, 5, 1] = 0x7F
    found = build(TritonGroupedExecutor, config, weights)(tokens)
    read = (tokens.ids < config.num_experts).any(1)
    assert found[read, 5].isnan().all()
    assert found[read].isnan().sum() == read.sum()


def test_mistakes_would_be_seen(schedule):
    """Gate and up, their second scales, scales one block or one row off, nibbles the other way round."""
    schedule(SCHEDULES["small"])
    config = layer("nvfp4", H=96, I=64, E=2, K=1)
    weights, tokens = all_experts(config), make_tokens(config, 12)
    first, half = weights.gate_up, weights.gate_up.shape[1] // 2
    codes, scales = first.codes, first.scales.view(torch.uint8)
    others = first.global_scale.flip(1)
    wrong = [
        replace(first, codes=codes.roll(half, 1), scales=scales.roll(half, 1).view(torch.float8_e4m3fn)),
        replace(first, global_scale=others),
        replace(first, scales=scales.roll(1, 2).view(torch.float8_e4m3fn)),
        replace(first, scales=scales.roll(1, 1).view(torch.float8_e4m3fn)),
        replace(first, codes=codes << 4 | codes >> 4),
    ]
    others = [replace(weights, gate_up=mistake) for mistake in wrong]
    right, *errors = errors_against_the_right_one(config, weights, tokens, others)
    assert right < BOUND
    assert len(errors) == 5
    assert all(each > 3 * BOUND for each in errors)

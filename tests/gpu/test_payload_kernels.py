"""The one-pass encoders equal the plain torch ones on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.stand_ins.kernel_device import DEVICE, generator, runs_kernels, sized

from eprt.quant.blocks import encode_fp8_groups, encode_nvfp4
from eprt.quant.elements import E2M1_MAX
from eprt.quant.payload_kernels import encode_fp8_rows, encode_nvfp4_rows

pytestmark = [pytest.mark.gpu, runs_kernels]
ROWS = sized(300, 9)


def wide_range(H, dtype, low, high):
    size = torch.logspace(low, high, ROWS, device=DEVICE)[:, None]
    x = (torch.randn(ROWS, H, device=DEVICE, generator=generator(H)) * size).to(dtype)
    x[5] = 0.0
    x[6, : H // 2] = -0.0
    return x


def assert_same_bits(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize("H", [128, 2880, 4096, 7168, 77])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_equals_torch(H, dtype):
    x = wide_range(H, dtype, -30, 3)
    found = encode_fp8_rows(x)
    assert_same_bits(found, encode_fp8_groups(x))
    assert_same_bits(found, encode_fp8_groups(x.cpu()))


@pytest.mark.parametrize("H", [16, 128, 2880, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("global_scale", [1.0, 0.37])
def test_nvfp4_equals_torch(H, dtype, global_scale):
    x = wide_range(H, dtype, -6, 4)
    x[7, :16] = torch.tensor(
        [E2M1_MAX, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6]
    )
    above = torch.tensor([global_scale], device=DEVICE)
    assert_same_bits(encode_nvfp4_rows(x, above), encode_nvfp4(x.cpu(), above.cpu()))


def test_no_rows():
    none = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    assert [tuple(part.shape) for part in encode_fp8_rows(none)] == [(0, 256), (0, 2)]
    assert [tuple(part.shape) for part in encode_nvfp4_rows(none, torch.ones(1, device=DEVICE))] == [(0, 128), (0, 16)]


@pytest.mark.parametrize("global_scale", [1.0, 0.37])
def test_nvfp4_scales_within_two_units_of_a_tie(global_scale):
    """Where a rounding less, or a reciprocal, would give the neighbour."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    tie = ((scales[1:] + scales[:-1]) / 2 * E2M1_MAX * global_scale).float()
    x = torch.zeros(5, len(tie), 16)
    x[:, :, 3] = (tie.view(torch.int32) + torch.arange(-2, 3, dtype=torch.int32)[:, None]).view(torch.float32)
    x, above = x.flatten(1), torch.tensor([global_scale])
    wanted = encode_nvfp4(x, above)
    assert wanted[1].view(torch.uint8).unique().numel() == 127
    assert_same_bits(encode_nvfp4_rows(x.to(DEVICE), above.to(DEVICE)), wanted)

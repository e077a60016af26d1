"""The one-pass FP8 encoder equals the plain torch one of either device, bit for bit."""

from __future__ import annotations

import pytest
import torch

from eprt.quant.fp8 import encode_fp8_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: this machine has none"),
]


@pytest.mark.parametrize("H", [128, 2880, 4096, 7168, 77])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_torch(H, dtype):
    from eprt.quant.triton_fp8 import encode_fp8_rows

    generator = torch.Generator("cuda").manual_seed(H)
    size = torch.logspace(-30, 3, 300, device="cuda")[:, None]
    x = (torch.randn(300, H, device="cuda", generator=generator) * size).to(dtype)
    x[5] = 0.0
    x[6, : H // 2] = 0.0
    data, scale = encode_fp8_rows(x)
    for device in ("cpu", "cuda"):
        wanted_data, wanted_scale = encode_fp8_groups(x.to(device))
        assert torch.equal(scale.to(device), wanted_scale)
        assert torch.equal(data.to(device).view(torch.uint8), wanted_data.view(torch.uint8))


def test_no_rows():
    from eprt.quant.triton_fp8 import encode_fp8_rows

    data, scale = encode_fp8_rows(torch.empty(0, 256, dtype=torch.bfloat16, device="cuda"))
    assert data.shape == (0, 256)
    assert scale.shape == (0, 2)

"""Tokens in the number formats in which they travel."""

from __future__ import annotations

import pytest
import torch

from eprt.errors import InputError
from eprt.quant import decode_payload, encode_payload
from eprt.tokens import Payload


@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("H", [128, 96, 160, 2880])
@pytest.mark.parametrize("name", ["f32", "bf16", "fp8_block", "nvfp4"])
def test_payload_shapes_and_error(name: str, H: int, T: int):
    hidden = torch.randn(T, H, generator=torch.Generator().manual_seed(H + T))
    payload = encode_payload(hidden, name)
    payload.check()
    assert payload.hidden_size == H
    decoded = decode_payload(payload)
    assert decoded.shape == (T, H)
    assert decoded.dtype == (torch.float32 if name == "f32" else torch.bfloat16)
    # Worst relative error of a rounding: bf16 2 ** -9; E4M3 2 ** -4; E2M1 in norm below 0.15 on normal data.
    limit = {"f32": 0.0, "bf16": 2**-8, "fp8_block": 2**-4, "nvfp4": 0.15}[name]
    assert (decoded.float() - hidden).norm() <= limit * hidden.norm()


def test_fp8_payload_groups_are_per_token_and_the_last_is_short():
    hidden = torch.zeros(2, 160)
    hidden[0, :128], hidden[0, 128:], hidden[1] = 448.0, 4.48, 44.8
    payload = encode_payload(hidden, "fp8_block")
    assert payload.scale is not None
    torch.testing.assert_close(payload.scale, torch.tensor([[1.0, 0.01], [0.1, 0.1]]))
    assert (payload.data.float() == 448).all()


def test_nvfp4_payload_without_a_global_scale_uses_one_on_every_rank():
    hidden = torch.tensor([[6.0 * 448 * 2, 1.0] + [0.0] * 14])
    payload = encode_payload(hidden, "nvfp4")
    assert payload.global_scale is not None
    assert payload.global_scale.tolist() == [1.0]
    assert decode_payload(payload)[0, 0] == 2688.0  # saturated
    fitting = encode_payload(hidden, "nvfp4", torch.tensor([2.0]))
    assert decode_payload(fitting)[0, 0] == 5376.0


def test_payload_refusals():
    with pytest.raises(InputError, match="isn't a multiple of 16"):
        encode_payload(torch.zeros(1, 24), "nvfp4")
    with pytest.raises(InputError, match="expected f32, bf16, fp8_block or nvfp4"):
        encode_payload(torch.zeros(1, 24), "int8")
    packed = encode_payload(torch.zeros(1, 32), "nvfp4")
    with pytest.raises(InputError, match="global_scale"):
        decode_payload(Payload(packed.data, "nvfp4", packed.scale))

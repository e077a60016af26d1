"""Checks the scales of quantised tensors: above 0, and no weight that they scale overflows float32."""

from __future__ import annotations

import math
from functools import partial

import torch

from eprt.errors import CheckpointError
from eprt.quant.elements import E2M1_MAX, E4M3_MAX

_E8M0 = torch.float8_e8m0fnu
_E8M0_NAN = 255
_F32_MAX = torch.finfo(torch.float32).max


def positive_scale(scale: torch.Tensor, where: str, largest: float = 1.0) -> torch.Tensor:
    """Returns scales as they are, E8M0 ones as f32. Raises CheckpointError unless all are above 0, and finite also
    times `largest`, the largest number that they scale."""
    values = scale.float()
    bad = values[~(torch.isfinite(values * largest) & (values > 0))]
    if bad.numel():
        count = f"{bad.numel()} of {values.numel()}"
        most = f"{_F32_MAX / largest:.6g}, beyond which weights overflow float32"
        raise CheckpointError(f"{where}: {count} scales such as {bad[0].item()}: expected above 0, at most {most}")
    return values if scale.dtype == _E8M0 else scale


def activation_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Returns scales by which tokens are divided. Raises CheckpointError as `positive_scale`, and where 1 / scale is
    infinite."""
    if not torch.isfinite(1 / scale).all():
        raise CheckpointError(f"{where}: scale {scale.min().item()}: expected above 0 by so much that 1 / it is finite")
    return positive_scale(scale, where, E4M3_MAX)


def e8m0_scale(scale: torch.Tensor, where: str, largest: float = 1.0) -> torch.Tensor:
    """Returns scales as E8M0 bytes (value 2 ** (byte - 127)), from bytes, float8_e8m0fnu or f32 powers of two.

    Raises CheckpointError for byte 255 (NaN), for f32 values that aren't powers of two from 2**-127 to 2**127, and for
    scales that overflow float32 times `largest`, the largest number that they scale.
    """
    codes = _e8m0_codes(scale, where)
    highest, most = int(codes.max()) if codes.numel() else 0, int(math.log2(_F32_MAX / largest)) + 127
    if highest > most:
        raise CheckpointError(
            f"{where}: E8M0 scale {highest} of {codes.numel()} scales: expected 0 to {most}, beyond which weights "
            "overflow float32"
        )
    return codes


def _e8m0_codes(scale: torch.Tensor, where: str) -> torch.Tensor:
    if scale.dtype == torch.float32:
        bits = scale.contiguous().view(torch.int32)
        code = (bits >> 23) & 0xFF
        # 2**-127 lies below the normal range of float32: exponent 0 and the top mantissa bit alone.
        smallest = bits == 0x00400000
        power = (bits > 0) & (bits & 0x7FFFFF == 0) & (code < _E8M0_NAN)
        bad = scale[~(power | smallest)]
        if bad.numel():
            raise CheckpointError(
                f"{where}: {bad.numel()} of {scale.numel()} scales such as {bad[0].item()}: "
                "expected powers of two (E8M0 stored as float32)"
            )
        return code.to(torch.uint8)
    codes = scale.view(torch.uint8)
    bad_count = int((codes == _E8M0_NAN).sum())
    if bad_count:
        raise CheckpointError(f"{where}: {bad_count} of {codes.numel()} E8M0 scales are 255 (NaN): expected 0 to 254")
    return codes


# By what they scale: E4M3 or E2M1 numbers, or both at once (NVFP4).
E4M3_FACTOR = partial(positive_scale, largest=E4M3_MAX)
NVFP4_FACTOR = partial(positive_scale, largest=E2M1_MAX * E4M3_MAX)
E2M1_BYTES = partial(e8m0_scale, largest=E2M1_MAX)
E4M3_BYTES = partial(e8m0_scale, largest=E4M3_MAX)

"""Numbers of a few bits as their specifications have them, written by hand: nothing of eprt is used here."""

from __future__ import annotations

import torch

# OCP Microscaling Formats v1.0, table 6: E2M1, the sign in bit 3.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def packed(codes: torch.Tensor) -> torch.Tensor:
    """u8 [..., n / 2] of 4-bit codes [..., n]: two in a byte, the first in the low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def e2m1_numbers(codes: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of packed codes."""
    return E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]


def e8m0_numbers(scales: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of bytes."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - 127)


def mxfp4_numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of packed codes and E8M0 bytes [..., n / 32]."""
    return e2m1_numbers(codes) * e8m0_numbers(scales).repeat_interleave(32, dim=-1)

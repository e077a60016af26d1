"""The two layouts of FlashInfer's CuteDSL NVFP4 kernels, one type each, made once from canonical weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eprt.config import Activation
from eprt.experts.blackwell.scales import Nvfp4Factors, nvfp4_matrix, share_global_scale
from eprt.experts.blackwell.swizzle import GATED_ROWS, interleave_halves, mma_scale_view, swap_halves, swizzle_scales
from eprt.experts.padding import pad_parts, stack_experts
from eprt.rounding import round_up
from eprt.weights import NVFP4_BLOCK, ExpertWeights, Nvfp4

ROWS = 128  # both GEMMs need a number of output rows that is a multiple of this (FlashInfer 0.7.2)


@dataclass(frozen=True)
class PaddedSize:
    """The sizes that the kernels see: H and I rounded up. Padded weights are zero, padded outputs are cut off."""

    hidden: int
    intermediate: int

    @classmethod
    def of(cls, weights: ExpertWeights, parts: int) -> PaddedSize:
        _, hidden, intermediate = weights.down.shape
        return cls(round_up(hidden, ROWS), round_up(intermediate, GATED_ROWS if parts == 2 else ROWS))


@dataclass(frozen=True)
class MaskedLayout:
    """The weights that `grouped_gemm_nt_masked` reads: rows [gate; up], L last (memory [L, rows, cols]).

    Attributes:
        gate_up: u8 [parts * I, H/2, L]; down: u8 [H, I/2, L].
        gate_up_scales, down_scales: e4m3, 6-D (32, 4, row tiles, 4, column tiles, L).
    """

    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor

    @classmethod
    def prepare(cls, weights: ExpertWeights, size: PaddedSize, parts: int, device: torch.device) -> MaskedLayout:
        gate_up, down = nvfp4_matrix(weights.gate_up), nvfp4_matrix(weights.down)
        first = _stack(gate_up, parts, size.intermediate, size.hidden, device, lambda rows: rows)
        second = _stack(down, 1, size.hidden, size.intermediate, device, lambda rows: rows)
        return cls(
            gate_up=first["codes"].permute(1, 2, 0),
            gate_up_scales=mma_scale_view(first["scales"]),
            down=second["codes"].permute(1, 2, 0),
            down_scales=mma_scale_view(second["scales"]),
        )


@dataclass(frozen=True)
class ContiguousLayout:
    """The weights that `CuteDslMoEWrapper` reads: up and gate in turns of 64 rows; not gated: rows as they are.

    Attributes:
        gate_up: u8 [L, parts * I, H/2]; down: u8 [L, H, I/2].
        gate_up_scales, down_scales: u8 (E4M3 bytes), 6-D (32, 4, row tiles, 4, column tiles, L).
        factors: second-level scales, as one number for both halves of the first matrix.
    """

    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    factors: Nvfp4Factors

    @classmethod
    def prepare(
        cls, weights: ExpertWeights, size: PaddedSize, activation: Activation, device: torch.device
    ) -> ContiguousLayout:
        gate_up, down = nvfp4_matrix(weights.gate_up), nvfp4_matrix(weights.down)
        factors = Nvfp4Factors.from_weights(weights, device)
        parts = activation.parts
        shared = not activation.plain

        def order(rows: torch.Tensor) -> torch.Tensor:
            return interleave_halves(swap_halves(rows)) if activation.gated else rows

        first = _stack(gate_up, parts, size.intermediate, size.hidden, device, order, share_scale=shared)
        second = _stack(down, 1, size.hidden, size.intermediate, device, lambda rows: rows)
        if shared:
            factors = factors.sharing(gate_up.global_scale.to(device).amax(dim=1))
        return cls(
            gate_up=first["codes"],
            gate_up_scales=mma_scale_view(first["scales"].view(torch.uint8)),
            down=second["codes"],
            down_scales=mma_scale_view(second["scales"].view(torch.uint8)),
            factors=factors,
        )


def _stack(
    matrix: Nvfp4,
    parts: int,
    rows: int,
    cols: int,
    device: torch.device,
    order: Callable[[torch.Tensor], torch.Tensor],
    share_scale: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns codes [L, parts * rows, cols/2] and swizzled scales of a matrix, padded and with its rows in `order`."""

    def one(index: int) -> dict[str, torch.Tensor]:
        expert = matrix.expert(index).map(lambda tensor: tensor.to(device))
        scales = share_global_scale(expert.scales, expert.global_scale)[0] if share_scale else expert.scales
        codes = pad_parts(expert.codes, parts, rows, cols // 2)
        scales = pad_parts(scales, parts, rows, cols // NVFP4_BLOCK)
        return {"codes": order(codes), "scales": swizzle_scales(order(scales))}

    return stack_experts(matrix.shape[0], one)

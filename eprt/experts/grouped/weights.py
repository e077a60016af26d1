"""Expert matrices as the grouped GEMM reads them: gate and up rows taking turns, rows of whole 16 bytes or, of 4 bits,
units of `eprt.experts.grouped.four_bit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eprt.experts.base import present
from eprt.experts.grouped.four_bit import (
    int4_factor,
    mxfp4_factor,
    nvfp4_factor,
    pack_int4,
    pack_mxfp4,
    pack_nvfp4,
    room,
)
from eprt.experts.grouped.mxfp4_e4m3 import COLUMNS, e4m3_factor, pack_mxfp4_e4m3
from eprt.experts.padding import interleave_halves, pad_parts, stack_experts
from eprt.quant import decode
from eprt.rounding import ceil_div, round_up
from eprt.weights import FP8_BLOCK, Fp8Block, Fp8Channel, Fp8Tensor, Int4, Matrix, Mxfp4, Nvfp4

INTERLEAVE = 8  # gate and up rows take turns by so many: halves of what one thread holds of a tile, so nothing moves


@dataclass(frozen=True)
class GroupedMatrix:
    """One of the two matrices of all local experts.

    Attributes:
        data: [L, rows, stride] bf16 or e4m3; columns past `cols` are zeros. 4 bits: int32 [L, units, UNIT_WORDS].
        scale: [L, parts, ceil(rows / parts / 128), ceil(cols / 128)] float32 of FP8 weights; int32
            [L, units, words per unit] of 4 bits; else None.
        factor: [L, parts, rows / parts] float32 that sums of 4-bit weights and of FP8 by channel or tensor are
            multiplied by, else None.
        bias: [L, parts, rows / parts] float32, or None.
        parts: 2 where gate and up alternate by INTERLEAVE rows.
        rows, cols: of one expert; each part's rows padded to INTERLEAVE, columns to whole 128 for tokens of E4M3.
        zeros: INT4 with zero points of its own, among the words of `scale`.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    factor: torch.Tensor | None
    bias: torch.Tensor | None
    parts: int
    rows: int
    cols: int
    zeros: bool = False

    @classmethod
    def prepare(
        cls, matrix: Matrix, bias: torch.Tensor | None, parts: int, device: torch.device, *, e4m3: bool = False
    ) -> GroupedMatrix:
        """From a canonical matrix on any device, expert by expert; formats that no kernel has in bf16. `e4m3`: MXFP4
        will be decoded to E4M3 (`mxfp4_e4m3`)."""
        L, rows, cols = matrix.shape
        part = rows // parts
        padded = round_up(part, INTERLEAVE) if parts > 1 else part

        def prepare(index: int) -> dict[str, torch.Tensor]:
            found = _laid_out(matrix.expert(index).map(lambda tensor: tensor.to(device)), parts, padded, e4m3)
            if bias is not None:
                own = bias[index : index + 1].to(device, torch.float32)
                found["bias"] = pad_parts(own, parts, padded).view(1, parts, padded)
            return found

        cols = round_up(cols, COLUMNS) if e4m3 else cols
        units = room(parts * padded, cols) if isinstance(matrix, Mxfp4 | Nvfp4 | Int4) else 0
        tensors = stack_experts(L, prepare, {"data": units, "scale": units})
        scale, factor, bias = (tensors.get(name) for name in ("scale", "factor", "bias"))
        zeros = isinstance(matrix, Int4) and matrix.zeros is not None
        return cls(tensors["data"], scale, factor, bias, parts, parts * padded, cols, zeros)

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        # By its name, as other groups without zero points have as many words, and kernels know which as a constant.
        scale = {"scale_and_zeros" if self.zeros else "scale": self.scale}
        return present(data=self.data, **scale, factor=self.factor, bias=self.bias)


def _laid_out(own: Matrix, parts: int, padded: int, e4m3: bool) -> dict[str, torch.Tensor]:
    """One expert's data, scale and factor; parts of `padded` rows."""
    _, rows, cols = own.shape
    part = rows // parts
    match own:
        case Fp8Block():
            grid = ceil_div(part, FP8_BLOCK), ceil_div(cols, FP8_BLOCK)
            data = alternate(own.data, parts, padded, round_up(cols, 16))
            return {"data": data, "scale": own.scale.to(torch.float32).view(1, parts, *grid)}
        case Fp8Channel() | Fp8Tensor():
            scale = own.scale if isinstance(own, Fp8Channel) else own.scale.repeat_interleave(part, 1)
            factor = pad_parts(scale.to(torch.float32), parts, padded).view(1, parts, padded)
            return {"data": alternate(own.data, parts, padded, round_up(cols, 16)), "factor": factor}
        case Mxfp4() | Nvfp4() | Int4():
            packed, factor = _packed(own, parts, padded, e4m3)
            factor = pad_parts(factor.view(1, rows), parts, padded).view(1, parts, padded)
            return {"data": packed[0][None], "scale": packed[1][None], "factor": factor}
        case _:
            return {"data": alternate(decode(own, parts, torch.bfloat16), parts, padded, round_up(cols, 8))}


def _packed(
    own: Mxfp4 | Nvfp4 | Int4, parts: int, padded: int, e4m3: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """One expert's words and those of scales, and the factors of its rows, in their own order."""
    codes, scales = (alternate(each, parts, padded, each.shape[2])[0] for each in (own.codes, own.scales))
    match own:
        case Mxfp4() if e4m3:
            return pack_mxfp4_e4m3(codes, scales), e4m3_factor(own.codes[0], own.scales[0])
        case Mxfp4():
            return pack_mxfp4(codes, scales), mxfp4_factor(own.scales)
        case Nvfp4():
            return pack_nvfp4(codes, scales), nvfp4_factor(own.scales[0], own.global_scale[0])
        case Int4():
            zeros = None if own.zeros is None else alternate(own.zeros, parts, padded, own.zeros.shape[2])[0]
            return pack_int4(codes, scales, zeros), int4_factor(own.scales[0])


def alternate(stack: torch.Tensor, parts: int, rows: int, stride: int) -> torch.Tensor:
    """[n, parts * r, c] to [n, parts * rows, stride]: parts padded with zeros, their rows in turns of INTERLEAVE."""
    padded = pad_parts(stack, parts, rows, stride)
    return interleave_halves(padded, INTERLEAVE) if parts > 1 else padded

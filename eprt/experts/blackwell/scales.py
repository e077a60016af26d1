"""Second-level scales of NVFP4 experts, brought to the few numbers a kernel takes. Nothing is dropped.

With weights `w = e2m1 * block * global`, tokens `x = e2m1 * block * input` and `y` the sums over codes and block
scales alone, an expert computes

    gate = y_gate * (global_gate * input)
    up   = y_up   * (global_up * input)
    h    = act(gate, up), quantised as codes * block * intermediate
    out  = y_down * (global_down * intermediate)

A kernel with one factor for both halves of its first matrix sees `up / ratio` where `ratio = global_up / global_gate`.
For plain SwiGLU, `silu(gate) * up` is linear in up, so its `h` is `h / ratio`, and multiplying the second matrix'
factor by `ratio` is exact. With alpha, beta or a limit it isn't linear: then `share_global_scale` folds the difference
into the block scales of the half with the smaller global scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eprt.experts.blackwell.swizzle import swizzle_scales, widen
from eprt.experts.padding import interleave_halves, pad_parts, stack_experts
from eprt.tokens import Payload
from eprt.weights import NVFP4_BLOCK, Nvfp4

GATED_ROWS = 64  # rows of up, then of gate, that CuteDSL's fused SwiGLU reads together


@dataclass(frozen=True)
class Nvfp4Factors:
    """float32 second-level scales of the local experts, on the executor's device.

    Attributes:
        gate, up, down: [L], of the weights. Not gated: gate is up.
        input: [1], of the tokens, or None for a weight-only checkpoint. The largest of the local experts: the
            kernels quantise a token once, for all of them. It stays on its rank, so ranks may differ; tokens that
            travel as NVFP4 bring their own instead.
        intermediate: [L], of what enters the second matrix, or None.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    input: torch.Tensor | None
    intermediate: torch.Tensor | None

    @property
    def ratio(self) -> torch.Tensor:
        """The factor [L] that a kernel which only knows `gate` leaves out of up."""
        return self.up / self.gate

    @classmethod
    def from_matrices(cls, gate_up: Nvfp4, down: Nvfp4, device: torch.device, *, shared: bool = False) -> Nvfp4Factors:
        """`shared`: both halves have one factor, as `share_global_scale` makes it."""
        scale = gate_up.global_scale.to(device)
        if shared:
            scale = scale.amax(dim=1, keepdim=True)
        of_weights = scale[:, 0].clone(), scale[:, -1].clone(), down.global_scale[:, 0].to(device, copy=True)
        if gate_up.input_scale is None or down.input_scale is None:
            return cls(*of_weights, None, None)
        largest = gate_up.input_scale.to(device).amax().view(1)
        return cls(*of_weights, largest, down.input_scale[:, 0].to(device, copy=True))


def share_global_scale(scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Returns block scales e4m3 [L, 2 I, C/16] for which the larger global scale of both halves [L, 2] serves both.

    The larger half's stay, exactly. The other half's are multiplied by a number <= 1 and rounded to E4M3, so they can't
    overflow: a relative error of at most 2^-4 in a block whose scale stays normal (>= 2^-6), none if the two differ by
    a power of two.
    """
    L, rows, cols = scales.shape
    share = (global_scale / global_scale.amax(dim=1, keepdim=True))[:, :, None, None]
    return (scales.view(L, 2, rows // 2, cols).float() * share).to(scales.dtype).view(L, rows, cols)


def nvfp4_stack(
    matrix: Nvfp4,
    parts: int,
    rows: int,
    cols: int,
    device: torch.device,
    *,
    alternate: bool = False,
    share_scale: bool = False,
) -> dict[str, torch.Tensor]:
    """Lays out a matrix expert by expert: parts padded to [rows, cols], scales swizzled after that.

    Args:
        alternate: GATED_ROWS rows of up take turns with as many of gate.
        share_scale: both parts get one second-level scale (`share_global_scale`).

    Returns:
        codes u8 [L, parts * rows, cols/2], and scales e4m3 [L, parts * rows, cols/16].
    """

    def one(index: int) -> dict[str, torch.Tensor]:
        expert = matrix.expert(index).map(lambda tensor: tensor.to(device))
        scales = share_global_scale(expert.scales, expert.global_scale) if share_scale else expert.scales
        codes = pad_parts(expert.codes, parts, rows, cols // 2, reverse=alternate)
        scales = pad_parts(scales, parts, rows, cols // NVFP4_BLOCK, reverse=alternate)
        if alternate:
            codes, scales = interleave_halves(codes, GATED_ROWS), interleave_halves(scales, GATED_ROWS)
        return {"codes": codes, "scales": swizzle_scales(scales)}

    return stack_experts(matrix.shape[0], one)


def linear_nvfp4(
    hidden: Payload,
    width: int,
    plain: Callable[[Payload], torch.Tensor],
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    multiplier: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns NVFP4 tokens padded to `width` columns, packed ones as they came, others quantised by FlashInfer.

    Args:
        plain: bf16 tokens of a payload; raises InputError for others.
        quantize, multiplier: FlashInfer's `fp4_quantize`, and one over the tokens' second-level scale.

    Returns:
        codes u8 [N, width/2], linear scales e4m3 [N, width/16], the second-level scale that packed tokens brought.
    """
    blocks = width // NVFP4_BLOCK
    if hidden.format == "nvfp4" and hidden.scale is not None and hidden.global_scale is not None:
        codes = widen(hidden.data, width // 2).contiguous()
        return codes, widen(hidden.scale, blocks).contiguous(), hidden.global_scale
    x = widen(plain(hidden), width).contiguous()
    # nvfp4_4over6=None: don't let environment variables choose another recipe.
    codes, scales = quantize(x, multiplier, sf_vec_size=NVFP4_BLOCK, is_sf_swizzled_layout=False, nvfp4_4over6=None)
    # Two dimensions: given a flat scale, the library's tuner falls back to its default tactic.
    return codes, scales.view(torch.float8_e4m3fn).view(x.shape[0], blocks), None

"""What the stand-ins for FlashInfer's Blackwell kernels share (`cutedsl_kernels`, `trtllm_kernels`). They check what
they are given as the library's own launchers do, read the prepared tensors by the documented addresses, and compute
slowly.

Sources (FlashInfer 0.7.2): csrc/trtllm_fused_moe_kernel_launcher.cu (checks), batched_gemm/KernelRunner.h (formula),
utils.py srcToDstBlk32RowMap, cute_dsl/utils.py convert_sf_to_mma_layout, the docstrings of the CuteDSL gather GEMM
and of grouped_gemm_nt_masked. Nothing here uses eprt's layouts, its number formats or its executors.
"""

from __future__ import annotations

import torch

from support.cases.number_formats import E2M1, e2m1_numbers, packed

UNSET = object()
SWIGLU, RELU2 = 3, 6
U8, I32, F32, BF16, FP8 = torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float8_e4m3fn


def quantise(x: torch.Tensor, multiplier: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., C] -> (u8 [..., C/2], e4m3 [..., C/16]): block scale = e4m3(amax * multiplier / 6)."""
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // 16, 16) * multiplier
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(FP8)
    step = scales.float()[..., None]
    ratio = torch.where(step > 0, blocks / step, 0.0).flatten(-2)
    codes = (ratio[..., None] - E2M1[:8].where(ratio[..., None] >= 0, -E2M1[:8])).abs().argmin(-1)
    codes = codes + 8 * (ratio < 0)
    return packed(codes), scales


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """u8 [..., C/2], e4m3 [..., C/16] -> float32 [..., C]."""
    return e2m1_numbers(codes) * scales.float().repeat_interleave(16, -1)


def activate(kind: int, gate, up, alpha=1.0, beta=0.0, limit=None) -> torch.Tensor:
    if kind == RELU2:
        return torch.relu(gate) ** 2
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def scale_offset(row: torch.Tensor, col: torch.Tensor, cols: int) -> torch.Tensor:
    """Byte of the block scale (row, col) in the 128 x 4 swizzled order, for a matrix of `cols` scales a row."""
    tile = (row // 128) * -(-cols // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4


def expect(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(f"kernel contract: {what}")


def expect_like(**given) -> None:
    """Checks each `name=(tensor, dtype, *shape)`: tensors are contiguous, of this dtype and shape."""
    for name, (tensor, dtype, *shape) in given.items():
        fits = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.is_contiguous()
        expect(fits, f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}, contiguous")


def check_routing(ids, weights, N, top_k, num_experts):
    expect_like(ids=(ids, I32, N, top_k), weights=(weights, F32, N, top_k))
    expect(N > 0, "no rows")
    expect(bool(((ids >= 0) & (ids <= num_experts)).all()), "ids are global, E for none")
    in_order = ids.sort(1).values
    repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < num_experts)
    expect(not bool(repeated.any()), "a row names an expert twice: the kernel keeps one of the two slots")


class Quantiser:
    """`fp4_quantize`, and what its codes are worth.

    Args:
        rounding: False leaves tokens that the kernels quantise, and what passes between the two GEMMs, unrounded, so
            that the algebra of the scales shows.

    Attributes:
        calls: the entry points that were called.
    """

    def __init__(self, rounding: bool = True) -> None:
        self.rounding = rounding
        self.calls: list[str] = []
        self._exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address of the codes

    def fp4_quantize(self, x, global_scale, *, sf_vec_size, is_sf_swizzled_layout, nvfp4_4over6=UNSET):
        self.calls.append("fp4_quantize")
        expect(x.dtype == BF16 and x.dim() == 2 and x.is_contiguous(), "fp4_quantize takes bf16 [M, K]")
        expect_like(global_scale=(global_scale, F32, 1))
        expect(sf_vec_size == 16 and not is_sf_swizzled_layout, "linear scales of 16")
        expect(nvfp4_4over6 is None, "recipe left to environment variables")
        codes, scales = quantise(x, global_scale)
        self._exact[codes.data_ptr()] = (codes, x.float() * global_scale)
        return codes, scales.view(U8)

    def tokens(self, codes, scales):
        """Values of codes [.., C/2]; unrounded if this stand-in made them itself and doesn't round."""
        if not self.rounding and codes.data_ptr() in self._exact:
            return self._exact[codes.data_ptr()][1]
        return values(codes, scales)

"""The number formats of FlashInfer's TRTLLM-Gen kernels: weights laid out, tokens quantised, scales folded.

For each: `prepare` once from canonical weights; `arguments(hidden)` gives every keyword of a kernel call that depends
on the format. Rows of gated first matrices are [up; gate] to the kernels; except for DeepSeek FP8 they alternate and
are shuffled (`swizzle.trtllm_row_order`), and block scales are swizzled after that.

With x0, x1 the raw sums of up and gate, the fused kernels compute (FlashInfer 0.7.2, batched_gemm/KernelRunner.h)

    scale_c * (x0 + beta) * (x1 * scale_gate) * sigmoid(alpha * x1 * scale_gate)

after clamping x0 and x1, and for ReLU^2 `scale_c * relu(x * scale_gate) ** 2`. So beta and the limit are divided by the
factor that turns raw sums into values, and up's own factor is part of `scale_c`: two global scales are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from eprt.config import Activation, WeightFormat
from eprt.errors import ConfigError, InputError
from eprt.experts.blackwell.scales import Nvfp4Factors, linear_nvfp4, share_global_scale
from eprt.experts.blackwell.swizzle import swizzle_scales, take_rows, trtllm_row_order, widen
from eprt.experts.padding import pad_parts, stack_experts
from eprt.quant.blocks import encode_fp8_groups
from eprt.quant.elements import encode_e4m3
from eprt.rounding import round_up
from eprt.tokens import Payload
from eprt.weights import MX_BLOCK, NVFP4_BLOCK, ExpertWeights, Fp8Block, Fp8Tensor, Mxfp8, Nvfp4

ROWS = 128  # rows of a GEMM (H, and 2 I or I) come in tiles of 128; FP8 contracts 128 columns at a time


def load_kernels() -> SimpleNamespace:
    """Returns FlashInfer's entry points that are used here. A test puts its own in their place."""
    import flashinfer
    from flashinfer import fused_moe, tllm_enums
    from flashinfer.autotuner import autotune

    return SimpleNamespace(
        routed={
            "fp4": fused_moe.trtllm_fp4_block_scale_routed_moe,
            "fp8_block": fused_moe.trtllm_fp8_block_scale_routed_moe,
            "fp8_tensor": fused_moe.trtllm_fp8_per_tensor_scale_routed_moe,
        },
        logits={
            "fp4": fused_moe.trtllm_fp4_block_scale_moe,
            "fp8_block": fused_moe.trtllm_fp8_block_scale_moe,
            "fp8_tensor": fused_moe.trtllm_fp8_per_tensor_scale_moe,
        },
        fp4_quantize=flashinfer.fp4_quantize,
        mxfp8_quantize=flashinfer.mxfp8_quantize,
        autotune=autotune,
        enums=tllm_enums,
    )


class TrtllmFormat(ABC):
    """Prepared weights of one number format, and how its tokens are quantised.

    Attributes:
        entry: which pair of entry points of `load_kernels` takes it.
        hidden, intermediate: H and I as the kernels see them, rounded up with zero weights.
        weights: keyword -> prepared tensor.
        swiglu: alpha, beta and limit as keywords, for kernels whose sums are the values themselves.
    """

    entry: str

    def __init__(
        self, kernels: SimpleNamespace, weights: ExpertWeights, activation: Activation, device: torch.device
    ) -> None:
        self.num_local, H, I = weights.down.shape
        self.kernels = kernels
        self.activation = activation
        self.device = device
        self.hidden = round_up(H, ROWS)
        self.intermediate = round_up(I, ROWS // activation.parts if self.entry == "fp4" else ROWS)
        self.fold_scales(weights.gate_up, weights.down)
        self.weights = self._prepare(weights)
        self.swiglu: dict[str, torch.Tensor] = {}
        if not activation.plain:
            self.swiglu = {"gemm1_alpha": self.each(activation.alpha), "gemm1_beta": self.each(activation.beta)}
            if activation.limit is not None:
                self.swiglu["gemm1_clamp_limit"] = self.each(activation.limit)

    def fold_scales(self, gate_up: Any, down: Any) -> None:
        """Keeps what a call needs of the second-level scales; raises ConfigError where the kernels lack one."""

    @abstractmethod
    def lay_out(self, own: Any, parts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns one expert's matrix and its scales in the kernels' order; each part padded to [rows, cols]."""

    def _prepare(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        gemms = (
            ("gemm1_weights", weights.gate_up, self.activation.parts, self.intermediate, self.hidden),
            ("gemm2_weights", weights.down, 1, self.hidden, self.intermediate),
        )

        def one(index: int) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = {}
            for name, matrix, *size in gemms:
                own = matrix.expert(index).map(lambda tensor: tensor.to(self.device))
                found[name], scales = self.lay_out(own, *size)
                if scales is not None:
                    found[f"{name}_scale"] = scales
            return found

        return stack_experts(self.num_local, one)

    @abstractmethod
    def arguments(self, hidden: Payload) -> dict[str, Any]:
        """Returns the keywords of a call on tokens [N, H]: packed tokens, their scales, weights and scalars."""

    def plain_tokens(self, hidden: Payload) -> torch.Tensor:
        """Returns bf16 tokens [N, H] padded to the kernels' width."""
        if hidden.format != "bf16":
            raise InputError(f"trtllm_gen got {hidden.format} tokens for {self.entry} weights: it takes bf16 here")
        return widen(hidden.data, self.hidden).contiguous()

    def shuffled(self, matrix: torch.Tensor, parts: int, rows: int, cols: int) -> torch.Tensor:
        """Pads [1, parts * r, c] and puts its rows in the kernels' order."""
        padded = pad_parts(matrix, parts, rows, cols)
        return take_rows(padded, trtllm_row_order(parts * rows, parts == 2, padded.device))

    def each(self, value: float) -> torch.Tensor:
        return torch.full((self.num_local,), value, dtype=torch.float32, device=self.device)


class Nvfp4Format(TrtllmFormat):
    """NVFP4 tokens x NVFP4 weights; what leaves the first GEMM is NVFP4 again."""

    entry = "fp4"

    def fold_scales(self, gate_up: Nvfp4, down: Nvfp4) -> None:
        # One limit for both raw sums: only possible if one factor turns both into values.
        self._shared = self.activation.gated and self.activation.limit is not None
        self._factors = Nvfp4Factors.from_matrices(gate_up, down, self.device, shared=self._shared)
        scale, intermediate = self._factors.input, self._factors.intermediate
        if scale is None or intermediate is None:
            raise ConfigError(
                "trtllm_gen quantises activations to NVFP4 and needs the checkpoint's input_scale, which experts lack: "
                "use cutedsl_nvfp4 with flat tokens (bf16 activations)"
            )
        self._multiplier, self._intermediate = 1.0 / scale, intermediate
        self._calibrated = self._scalars(scale)

    def lay_out(self, own: Nvfp4, parts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        shared = self._shared and parts == 2
        scales = share_global_scale(own.scales, own.global_scale) if shared else own.scales
        scales = swizzle_scales(self.shuffled(scales, parts, rows, cols // NVFP4_BLOCK))
        return self.shuffled(own.codes, parts, rows, cols // 2), scales

    def arguments(self, hidden: Payload) -> dict[str, Any]:
        codes, scales, above = linear_nvfp4(
            hidden, self.hidden, self.plain_tokens, self.kernels.fp4_quantize, self._multiplier
        )
        return {
            "hidden_states": codes,
            "hidden_states_scale": scales,
            "hidden_states_scale_layout": self.kernels.enums.SfLayout.layout_linear,
            "gemm1_bias": None,
            "gemm2_bias": None,
            **(self._calibrated if above is None else self._scalars(above)),
            **self.weights,
        }

    def _scalars(self, scale: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Returns float32 [L] each, for tokens with the second-level scale `scale` [1]."""
        factors, activation = self._factors, self.activation
        gate, up = factors.gate * scale, factors.up * scale
        swiglu: dict[str, torch.Tensor | None] = {"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None}
        if not activation.plain:
            swiglu |= {"gemm1_alpha": self.each(activation.alpha), "gemm1_beta": activation.beta / up}
            swiglu["gemm1_clamp_limit"] = None if activation.limit is None else activation.limit / gate
        return swiglu | {
            "output1_scale_scalar": (up if activation.gated else 1.0) / self._intermediate,
            "output1_scale_gate_scalar": gate,
            "output2_scale_scalar": factors.down * self._intermediate,
        }


class Fp8TensorFormat(TrtllmFormat):
    """FP8 with one scale per tensor, calibrated for tokens and for what leaves the first GEMM."""

    entry = "fp8_tensor"

    def fold_scales(self, gate_up: Fp8Tensor, down: Fp8Tensor) -> None:
        if gate_up.input_scale is None or down.input_scale is None:
            raise ConfigError(
                "trtllm_gen's per-tensor FP8 kernels need the checkpoint's input_scale, which experts lack"
            )
        self.input = gate_up.input_scale.to(self.device).amax().view(1)
        scale, intermediate = gate_up.scale.to(self.device), down.input_scale[:, 0].to(self.device)
        gate, up = scale[:, 0] * self.input, scale[:, -1] * self.input
        self._scalars = {
            "output1_scales_scalar": (up if self.activation.gated else 1.0) / intermediate,
            "output1_scales_gate_scalar": gate,
            "output2_scales_scalar": down.scale[:, 0].to(self.device) * intermediate,
        }

    def lay_out(self, own: Fp8Tensor, parts: int, rows: int, cols: int) -> tuple[torch.Tensor, None]:
        return self.shuffled(own.data, parts, rows, cols), None

    def arguments(self, hidden: Payload) -> dict[str, Any]:
        codes = encode_e4m3(self.plain_tokens(hidden).float() / self.input)
        return {"hidden_states": codes, "use_routing_scales_on_input": False, **self._scalars, **self.weights}


class Fp8BlockFormat(TrtllmFormat):
    """DeepSeek's FP8: 128 x 128 blocks of weights, 128 values of a token. Rows [up; gate], not shuffled."""

    entry = "fp8_block"

    def lay_out(self, own: Fp8Block, parts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        gated = parts == 2
        scale = pad_parts(own.scale, parts, own.scale.shape[1] // parts, reverse=gated)
        return pad_parts(own.data, parts, rows, cols, reverse=gated), scale

    def arguments(self, hidden: Payload) -> dict[str, Any]:
        if hidden.format == "fp8_block" and hidden.scale is not None:
            codes, scale = widen(hidden.data, self.hidden).contiguous(), hidden.scale
        else:
            codes, scale = encode_fp8_groups(self.plain_tokens(hidden))
        quantisation = self.kernels.enums.Fp8QuantizationType.DeepSeekFp8
        return {
            "hidden_states": codes,
            "hidden_states_scale": scale.T.contiguous(),  # [H/128, N]
            "use_shuffled_weight": False,
            "fp8_quantization_type": quantisation,
            **self.swiglu,
            **self.weights,
        }


class Mxfp8Format(TrtllmFormat):
    """MXFP8 tokens x MXFP8 weights."""

    entry = "fp8_block"

    def lay_out(self, own: Mxfp8, parts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = swizzle_scales(self.shuffled(own.scales, parts, rows, cols // MX_BLOCK))
        return self.shuffled(own.data, parts, rows, cols), scales

    def arguments(self, hidden: Payload) -> dict[str, Any]:
        x = self.plain_tokens(hidden)
        codes, scales = self.kernels.mxfp8_quantize(x, is_sf_swizzled_layout=False)
        return {
            "hidden_states": codes,
            "hidden_states_scale": scales.view(torch.uint8).view(x.shape[0], self.hidden // MX_BLOCK),
            "use_shuffled_weight": True,
            "fp8_quantization_type": self.kernels.enums.Fp8QuantizationType.MxFp8,
            **self.swiglu,
            **self.weights,
        }


FORMATS: dict[WeightFormat, Callable[..., TrtllmFormat]] = {
    "nvfp4": Nvfp4Format,
    "fp8_tensor": Fp8TensorFormat,
    "fp8_block": Fp8BlockFormat,
    "mxfp8": Mxfp8Format,
}

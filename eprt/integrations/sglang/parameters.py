"""The names that SGLang's quantisation methods, parameters and activations have. Imports no SGLang.

Names and shapes are those of `create_weights` in SGLang 0.5.17 and 0.5.23 (`quantization/unquant.py`, `fp8.py`,
`mxfp4.py`, `modelopt_quant.py`, and those that `engine.packed` names). A layer with `gemm1_alpha` (gpt-oss) has rows
that alternate gate, up.
"""

from __future__ import annotations

from typing import Any

import torch

from eprt.config import Activation, WeightFormat
from eprt.integrations.engine import packed
from eprt.integrations.engine import parameters as shared
from eprt.integrations.engine.parameters import FallsBackToEngine, ParameterLayout, Parameters, layout_in
from eprt.integrations.engine.settings import SCALE_BLOCK, fall_back
from eprt.rounding import round_up
from eprt.weights import Matrix, Mxfp4


def keeper_of(layer: Any) -> Any:
    """Returns what keeps the experts of a FusedMoE: its quantisation method, or the scheme that this asks."""
    return getattr(layer, "scheme", None) or layer.quant_method


def layout_of(layer: Any) -> ParameterLayout:
    """Finds the layout of a FusedMoE by the exact name of its keeper's class. Raises FallsBackToEngine."""
    return layout_in(LAYOUTS, keeper_of(layer))


def activation_of(config: Any) -> Activation:
    """Returns the activation of a MoeRunnerConfig. Raises FallsBackToEngine."""
    name, alpha, limit = config.activation, config.gemm1_alpha, config.gemm1_clamp_limit
    if name == "silu" and config.is_gated and alpha is None:
        fall_back([(limit is not None, "its gate is clamped behind SiLU")])  # Step-3.5
        return Activation(limit=config.swiglu_limit)
    if name == "silu" and config.is_gated and limit is not None:
        beta = getattr(config, "gemm1_beta", None)  # not in 0.5.17
        return Activation(alpha=alpha, beta=1.0 if beta is None else beta, limit=limit)
    if name == "relu2" and not config.is_gated:
        return Activation("relu2")
    raise FallsBackToEngine(f"activation {name}{'' if config.is_gated else ' without a gate'}")


def part_of(layer: Any) -> int:
    """Returns the intermediate size of a rank's tensor-parallel part of a FusedMoE, in whole scales where gpt-oss's
    loader cuts between them and the parameters have the room: the last rank's end in zeros, which add nothing."""
    part: int = layer.intermediate_size_per_partition
    whole = round_up(part, SCALE_BLOCK["mxfp4"])
    padded = type(layer.quant_method).__name__ == "Mxfp4MoEMethod" and 2 * layer.w2_weight.shape[-1] >= whole
    return whole if padded else part


def interleaved(config: Any) -> bool:
    """Returns whether rows of w13 alternate gate, up under a MoeRunnerConfig."""
    return config.gemm1_alpha is not None and getattr(config, "gate_up_interleaved", True)


def canonical(layer: Any, given: Parameters) -> Parameters:
    """Returns a FusedMoE's loaded parameters under eprt's names, without paddings, this rank's experts alone."""
    method = layer.quant_method
    found = {name.replace("_weight_bias", "_bias"): tensor for name, tensor in given.items()}
    if not layer.with_bias:  # MXFP4's method declares biases for every model
        found = {name: tensor for name, tensor in found.items() if not name.endswith("_bias")}
    if getattr(method, "use_triton_kernels", False) and type(method).__name__ == "UnquantizedFusedMoEMethod":
        found |= {name: found[name].transpose(1, 2).contiguous() for name in ("w13_weight", "w2_weight")}
    for name in shared.INPUT_SCALES:
        if name in found and found[name].shape[0] == layer.num_experts:  # ModelOpt's are those of all ranks
            first = layer.moe_ep_rank * layer.num_local_experts
            found[name] = found[name][first : first + layer.num_local_experts]
    return _unpadded(layer, found) if type(method).__name__ == "Mxfp4MoEMethod" else found


def _unpadded(layer: Any, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cuts rows and columns that MXFP4's method adds behind the checkpoint's own."""
    H, I = layer.hidden_size, part_of(layer)
    rows = (2 if layer.moe_runner_config.is_gated else 1) * I
    sizes = {"w13_weight": (rows, H // 2), "w13_weight_scale": (rows, H // 32), "w13_bias": (rows,)}
    sizes |= {"w2_weight": (H, I // 2), "w2_weight_scale": (H, I // 32), "w2_bias": (H,)}
    cut = {name: (slice(None), *map(slice, size)) for name, size in sizes.items()}
    return {name: tensor[cut[name]].contiguous() for name, tensor in found.items()}


def _fp8(method: Any, *_: Any) -> WeightFormat:
    config = method.quant_config
    fp4 = getattr(method, "is_fp4_expert", False)
    fall_back(
        [
            (fp4 and getattr(method, "dequant_fp4_to_fp8", False), "FP4 experts that SGLang decodes to FP8"),
            (getattr(method, "use_mxfp8", False), "MXFP8 experts behind FP8's method"),
        ]
    )
    return "mxfp4" if fp4 else shared.fp8(config.weight_block_size)


def _fp8_matrices(p: Parameters) -> tuple[Matrix, Matrix]:
    """Reads plain experts, too, of which `--quantization fp8` makes FP8, and DeepSeek-V4's in FP4, which SGLang keeps
    with scales in float32, each a power of two."""
    if p["w13_weight"].itemsize > 1:
        return shared.dense_matrices(p)
    if p["w13_weight"].dtype != torch.int8:
        return shared.fp8_matrices(p)
    up, down = (
        Mxfp4(
            p[f"{name}_weight"].view(torch.uint8),
            p[f"{name}_weight_scale_inv"].to(torch.float8_e8m0fnu).view(torch.uint8),
        )
        for name in ("w13", "w2")
    )
    return up, down


LAYOUTS: dict[str, ParameterLayout] = {
    "UnquantizedFusedMoEMethod": shared.DENSE,
    "Fp8MoEMethod": ParameterLayout(_fp8, _fp8_matrices, online="fp8_tensor"),
    "Mxfp4MoEMethod": shared.MXFP4,
    "ModelOptFp8MoEMethod": shared.MODELOPT_FP8,
    "ModelOptNvFp4FusedMoEMethod": shared.NVFP4,
    "CompressedTensorsWNA16MoE": packed.WNA16,
    "CompressedTensorsWNA16TritonMoE": packed.WNA16,
    "CompressedTensorsW8A8Fp8MoE": packed.W8A8_FP8,
    "GPTQMarlinMoEScheme": packed.GPTQ,
    "AWQMoEScheme": packed.AWQ,
}

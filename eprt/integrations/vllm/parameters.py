"""The names that vLLM's quantisation methods and activations have. Imports no vLLM.

Names and shapes are those of `create_weights` in vLLM 0.26 and 0.32 (`fused_moe/unquantized_fused_moe_method.py`,
`quantization/fp8.py`, `mxfp4.py`, `modelopt.py`, and those that `engine.packed` names). Only gpt-oss (`swigluoai`) has
rows that alternate gate, up.
"""

from __future__ import annotations

from typing import Any

from eprt.config import Activation, WeightFormat
from eprt.integrations.engine import packed
from eprt.integrations.engine import parameters as shared
from eprt.integrations.engine.parameters import FallsBackToEngine, ParameterLayout, layout_in

INTERLEAVED = "swigluoai"
CUT_BETWEEN_SCALES = "GptOssMxfp4MoEMethod"  # the model's loader does; the others' cut rows alike for all ranks
_WITHOUT_NUMBERS = {"gelu_tanh": Activation("geglu"), "relu2_no_mul": Activation("relu2")}


def layout_of(method: object) -> ParameterLayout:
    """Finds the layout by the exact name of the method's class. Raises FallsBackToEngine."""
    return layout_in(LAYOUTS, method)


def activation_of(layer: Any) -> Activation:
    """Returns the activation of a RoutedExperts (`fused_moe/activation.py`). Raises FallsBackToEngine."""
    name: str = layer.activation.value
    alpha, beta, limit = (getattr(layer, f"swiglu_{key}", None) for key in ("alpha", "beta", "limit"))
    if name == "silu":
        return Activation(limit=limit)
    if name == INTERLEAVED:  # its kernel has these numbers built in; the model may repeat them
        return Activation(alpha=alpha or 1.702, beta=1.0 if beta is None else beta, limit=limit or 7.0)
    if name == "swigluoai_uninterleave" and limit is not None:
        return Activation(alpha=1.0 if alpha is None else alpha, beta=beta or 0.0, limit=limit)
    if name in _WITHOUT_NUMBERS:
        return _WITHOUT_NUMBERS[name]
    raise FallsBackToEngine(f"activation {name}")


def _fp8(method: Any, *_: Any) -> WeightFormat:
    return shared.fp8(method.weight_block_size, getattr(method, "weight_scale_refine", None))


LAYOUTS: dict[str, ParameterLayout] = {
    "UnquantizedFusedMoEMethod": shared.DENSE,
    "Fp8MoEMethod": ParameterLayout(_fp8, shared.fp8_matrices),
    "Fp8PerTensorOnlineMoEMethod": shared.online("fp8_tensor"),
    "Fp8PerBlockOnlineMoEMethod": shared.online("fp8_block"),
    "Fp8PtpcOnlineMoEMethod": shared.online("fp8_channel"),
    "GptOssMxfp4MoEMethod": shared.MXFP4,
    "Mxfp4MoEMethod": shared.MXFP4,
    "ModelOptFp8MoEMethod": shared.MODELOPT_FP8,
    "ModelOptNvFp4FusedMoE": shared.NVFP4,
    "CompressedTensorsWNA16MoEMethod": packed.WNA16,
    "CompressedTensorsWNA16MarlinMoEMethod": packed.WNA16,
    "CompressedTensorsW8A8Fp8MoEMethod": packed.W8A8_FP8,
    "CompressedTensorsW4A4Nvfp4MoEMethod": packed.NVFP4,
    "AutoGPTQMoEMethod": packed.GPTQ,
    "AutoAWQMoEMethod": packed.AWQ,
}

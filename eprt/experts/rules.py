"""Limits of executors that a table row can't say: plain functions of the plan's inputs. "" means no objection."""

from __future__ import annotations

from eprt.config import MoEConfig, PayloadFormat
from eprt.support import Device

# FlashInfer 0.7.2, trtllm/fused_moe/RoutingCustomPolicy.cuh: MaxSupportedTopExperts, MaxSupportedExperts
TRTLLM_MAX_TOP_K, TRTLLM_MAX_EXPERTS = 32, 2048

# (method, renormalize) -> tllm_enums.RoutingMethodType of the kernels that take logits.
TRTLLM_LOGITS = {
    ("softmax_topk", True): "RenormalizeNaive",
    ("softmax_topk", False): "Default",
    ("topk_softmax", True): "Renormalize",
    ("topk_softmax", False): "Renormalize",
    ("grouped_sigmoid", True): "DeepSeekV3",
}


def triton_grouped(config: MoEConfig, device: Device, payload: PayloadFormat) -> str:
    """FP8 is multiplied as it is, by tensor cores that have it; 4 bits are decoded by instructions of Hopper."""
    if config.weight_format != "bf16" and device.sm < 90:
        return f"{config.weight_format} weights need sm90, not {device}"
    return ""


def humming(config: MoEConfig, device: Device, payload: PayloadFormat) -> str:
    """From `HummingKernel.check_shape`: rows are padded in whole 16 bytes, of E4M3 in 16 numbers. I is padded here."""
    if config.weight_format in ("fp8_tensor", "fp8_block") and config.hidden_size % 16:
        return f"{config.weight_format} weights need a hidden size in multiples of 16, not {config.hidden_size}"
    return ""


def trtllm_routing(config: MoEConfig, device: Device, payload: PayloadFormat) -> str:
    """TRTLLM-Gen's routing kernels, with which CuteDSL's contiguous kernels sort tokens, too."""
    if config.top_k > TRTLLM_MAX_TOP_K:
        return f"top-k at most {TRTLLM_MAX_TOP_K}, the model has {config.top_k}"
    if config.num_experts > TRTLLM_MAX_EXPERTS:
        return f"at most {TRTLLM_MAX_EXPERTS} experts, the model has {config.num_experts}"
    return ""


def trtllm_gen(config: MoEConfig, device: Device, payload: PayloadFormat) -> str:
    """From the checks of `csrc/trtllm_fused_moe_kernel_launcher.cu`, which would fail at the first call."""
    weights, activation = config.weight_format, config.activation
    if payload in ("nvfp4", "fp8_block") and payload != weights:
        return f"{weights} kernels take bf16 or {weights} tokens, not {payload}"
    if weights == "fp8_block" and not activation.gated:
        return "DeepSeek FP8 runs its activation as a kernel of its own, which is SwiGLU only"
    if weights == "fp8_tensor" and not activation.plain:
        return "the per-tensor FP8 kernels compute plain SiLU-gated or ReLU^2 experts only, not alpha/beta/limit"
    if weights in ("fp8_block", "mxfp8") and (config.num_experts % 4 or config.num_experts <= config.top_k):
        return f"num_experts {config.num_experts} must be a multiple of 4 and more than top_k ({config.top_k})"
    return trtllm_routing(config, device, payload)


def trtllm_logits(config: MoEConfig) -> bool:
    """Says whether the logits kernels have the layer's routing, within DeepSeek's limits: `check_routing` of the same
    launcher and trtllm_fused_moe_routing_deepseek.cu."""
    routing, E, K = config.routing, config.num_experts, config.top_k
    method = TRTLLM_LOGITS.get((routing.method, routing.renormalize))
    if method != "DeepSeekV3":
        return method is not None and routing.scaling_factor == 1.0
    groups, kept = routing.num_groups, routing.topk_groups
    grouped = groups == 1 or (groups <= 8 and kept <= 4 and E // groups <= 32 and E % 4 == 0)
    return grouped and E <= 512 and (8 if E <= 384 else 22) >= K and kept * E // groups > K

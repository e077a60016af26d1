"""vLLM's own experts through its modular kernel, fed as its all-gather feeds a rank.

That is all tokens; `expert_map` names the local experts, unless all are. The names are internals of vLLM 0.26, which
0.32 still has.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from eprt.config import MoEConfig
from eprt.errors import EprtError
from eprt.experts.padding import interleave_halves, pad_parts
from eprt.placement import ExpertShard
from eprt.rounding import round_up
from eprt.tokens import FlatTokens
from eprt.weights import FP8_BLOCK, MX_BLOCK, ExpertWeights, Fp8Block, Fp8Channel, Int4, Mxfp4

from .direct import Call, Make, dense

_MOE = "vllm.model_executor.layers.fused_moe"
Laid = tuple[torch.Tensor, torch.Tensor, Any]  # w1, w2, quantisation


def _experts(module: str, name: str, lay: Callable[[MoEConfig, ExpertWeights], Laid]) -> Make:
    """Returns what runs one of vLLM's classes of experts, on weights that `lay` lays out."""

    @contextmanager
    def make(
        config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
    ) -> Iterator[Callable[[FlatTokens], Call]]:
        with _vllm(device):
            yield _kernel(config, shard, device, lay(config, weights), module, name)

    return make


@contextmanager
def marlin(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """Runs vLLM's Marlin experts of INT4, and of MXFP4, whose weights are padded once as vLLM pads them, tokens in each
    call."""
    with _vllm(device):
        if config.weight_format == "int4":
            yield _kernel(config, shard, device, _int4(weights), "marlin_moe", "MarlinExperts")
        else:
            yield _padded_kernel(config, shard, weights, device, _marlin, ("marlin_moe", "MarlinExperts"), (256, 128))


@contextmanager
def triton_kernels(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """Runs OpenAI's triton_kernels, as vendored: gpt-oss's experts as vLLM runs them on Hopper."""
    names = "gpt_oss_triton_kernels_moe", "OAITritonExperts"
    with _vllm(device):
        yield _padded_kernel(config, shard, weights, device, _mxfp4, names, (1, 64))


@contextmanager
def _vllm(device: torch.device) -> Iterator[None]:
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # Hopper's scales are float32
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.config import VllmConfig, set_current_vllm_config

    _workspace(device)
    with set_current_vllm_config(VllmConfig()):
        yield


@cache
def _workspace(device: torch.device) -> None:
    """Makes the workspace that vLLM's kernels share, once per process."""
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(device)


def _bf16_or_fp8(config: MoEConfig, weights: ExpertWeights, *, for_deep_gemm: bool = False) -> Laid:
    settings = importlib.import_module(f"{_MOE}.config")
    if config.weight_format == "bf16":
        return *dense(weights), settings.FusedMoEQuantConfig.make()
    if isinstance(weights.gate_up, Fp8Channel) and isinstance(weights.down, Fp8Channel):
        scales = weights.gate_up.scale[..., None], weights.down.scale[..., None]
        quant = settings.fp8_w8a8_moe_quant_config(*scales, per_act_token_quant=True, per_out_ch_quant=True)
        return weights.gate_up.data, weights.down.data, quant
    if not isinstance(weights.gate_up, Fp8Block) or not isinstance(weights.down, Fp8Block):
        raise EprtError("measured with FP8 by block and by channel")
    w1, w2, s1, s2 = weights.gate_up.data, weights.down.data, weights.gate_up.scale, weights.down.scale
    block = (FP8_BLOCK, FP8_BLOCK)
    if for_deep_gemm:
        utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
        w1, w2, s1, s2 = utils.prepare_fp8_moe_layer_for_deepgemm(w1, w2, s1, s2, block)
    return w1, w2, settings.fp8_w8a8_moe_quant_config(s1, s2, block_shape=list(block))


def _mxfp4(config: MoEConfig, weights: ExpertWeights) -> Laid:
    importlib.import_module(f"{_MOE}.config")  # whose import makes the vendored triton_kernels known under that name
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.mxfp4_utils")
    ogs = importlib.import_module("triton_kernels.matmul_ogs")
    gate_up, down = _of_mxfp4(weights)
    w1, f1, q1 = utils._swizzle_mxfp4(gate_up.codes, gate_up.scales)
    w2, f2, q2 = utils._swizzle_mxfp4(down.codes, down.scales)
    first, second = (
        ogs.PrecisionConfig(weight_scale=q, flex_ctx=ogs.FlexCtx(rhs_data=f)) for q, f in ((q1, f1), (q2, f2))
    )
    return w1, w2, _w4a16(config, first, second, weights.gate_up_bias, weights.down_bias)


def _marlin(config: MoEConfig, weights: ExpertWeights) -> Laid:
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    gate_up, down = _of_mxfp4(weights)
    biases = (None if bias is None else bias.bfloat16() for bias in (weights.gate_up_bias, weights.down_bias))
    dtype, laid = SimpleNamespace(params_dtype=torch.bfloat16), (gate_up.codes, down.codes, gate_up.scales, down.scales)
    w1, w2, q1, q2, b1, b2 = utils.prepare_moe_mxfp4_layer_for_marlin(dtype, *laid, *biases)
    return w1, w2, _w4a16(config, q1, q2, b1, b2)


def _int4(weights: ExpertWeights) -> Laid:
    """Lays out codes without zero points: eight to an int32 along the columns, columns first."""
    ops = importlib.import_module("vllm._custom_ops")
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    settings = importlib.import_module(f"{_MOE}.config")
    found, scales = list[torch.Tensor](), list[torch.Tensor]()
    for matrix in (weights.gate_up, weights.down):
        if not isinstance(matrix, Int4) or matrix.zeros is not None:
            raise EprtError("measured with INT4 without zero points")
        L, rows, cols = matrix.shape
        words = matrix.codes.view(torch.int32).transpose(1, 2).contiguous()
        unsorted = torch.empty(L, 0, dtype=torch.int32, device=words.device)
        found.append(ops.gptq_marlin_moe_repack(words, unsorted, cols, rows, 4))
        plain = matrix.scales.to(torch.bfloat16).transpose(1, 2).contiguous()
        scales.append(utils.marlin_moe_permute_scales(plain, cols, rows, matrix.group))
    group = [0, weights.gate_up.group] if isinstance(weights.gate_up, Int4) else None
    return found[0], found[1], settings.int4_w4a16_moe_quant_config(*scales, block_shape=group)


def _of_mxfp4(weights: ExpertWeights) -> tuple[Mxfp4, Mxfp4]:
    if not isinstance(weights.gate_up, Mxfp4) or not isinstance(weights.down, Mxfp4):
        raise EprtError("measured with MXFP4")
    return weights.gate_up, weights.down


def _interleaved(config: MoEConfig, weights: ExpertWeights) -> ExpertWeights:
    """Returns MXFP4 experts padded to the sizes of `config`, with rows of gate and up in turns, as both kernels take
    them."""
    gate_up, down = _of_mxfp4(weights)
    if not config.activation.gated or config.activation.beta != 1.0:
        raise EprtError("measured with gpt-oss's activation")
    H, I, bias, down_bias = config.hidden_size, config.intermediate_size, weights.gate_up_bias, weights.down_bias

    def alternate(stack: torch.Tensor, cols: int) -> torch.Tensor:
        return interleave_halves(pad_parts(stack, 2, I, cols), 1)

    return ExpertWeights(
        Mxfp4(alternate(gate_up.codes, H // 2), alternate(gate_up.scales, H // MX_BLOCK)),
        Mxfp4(pad_parts(down.codes, 1, H, I // 2), pad_parts(down.scales, 1, H, I // MX_BLOCK)),
        None if bias is None else alternate(bias[..., None], 1)[..., 0],
        None if down_bias is None else pad_parts(down_bias, 1, H),
    )


def _w4a16(config: MoEConfig, first: Any, second: Any, bias: Any, down_bias: Any) -> Any:
    """Returns vLLM's description of the quantisation, with scales as its kernel takes them."""
    settings = importlib.import_module(f"{_MOE}.config")
    return settings.mxfp4_w4a16_moe_quant_config(
        first,
        second,
        bias,
        down_bias,
        gemm1_alpha=config.activation.alpha,
        gemm1_beta=config.activation.beta,
        gemm1_clamp_limit=config.activation.limit,
    )


# Triton's experts take FP8 blocks with FP8 activations. vLLM falls back to Triton for shapes that its DeepGEMM doesn't
# take.
triton = _experts("triton_moe", "TritonExperts", _bf16_or_fp8)
cutlass = _experts("cutlass_moe", "CutlassExpertsFp8", _bf16_or_fp8)
deep_gemm = _experts("triton_deep_gemm_moe", "TritonOrDeepGemmExperts", partial(_bf16_or_fp8, for_deep_gemm=True))


def _padded_kernel(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device,
    lay: Callable[[MoEConfig, ExpertWeights], Laid], names: tuple[str, str], units: tuple[int, int],
) -> Callable[[FlatTokens], Call]:  # fmt: skip
    """Returns a call of vLLM's experts whose hidden and intermediate sizes are padded to whole `units`, as vLLM pads
    them: weights once, tokens in each call."""
    H, I = round_up(config.hidden_size, units[0]), round_up(config.intermediate_size, units[1])
    wide, config = H - config.hidden_size, replace(config, hidden_size=H, intermediate_size=I)
    return _kernel(config, shard, device, lay(config, _interleaved(config, weights)), *names, wide)


def _kernel(
    config: MoEConfig, shard: ExpertShard, device: torch.device, laid: Laid, module: str, name: str, padding: int = 0
) -> Callable[[FlatTokens], Call]:
    """Returns a call of vLLM's modular kernel. `padding`: columns of tokens that only the kernel has."""
    settings = importlib.import_module(f"{_MOE}.config")
    modular = importlib.import_module(f"{_MOE}.modular_kernel")
    kinds = importlib.import_module(f"{_MOE}.activation").MoEActivation
    plain = importlib.import_module(f"{_MOE}.prepare_finalize").make_moe_prepare_and_finalize_no_dp_ep
    others = {"swiglu": kinds.SWIGLUOAI, "geglu": kinds.GELU_TANH, "relu2": kinds.RELU2_NO_MUL}
    silu = config.activation.gated and config.activation.plain
    activation = kinds.SILU if silu else others[config.activation.kind]
    w1, w2, quant = laid
    moe = settings.FusedMoEConfig(
        num_experts=config.num_experts,
        experts_per_token=config.top_k,
        hidden_dim=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_local_experts=shard.num_local_experts,
        num_logical_experts=config.num_experts,
        activation=activation,
        device=device,
        routing_method=settings.RoutingMethodType.Renormalize,
        in_dtype=torch.bfloat16,
        moe_parallel_config=settings.FusedMoEParallelConfig.make_no_parallel(),
        max_num_tokens=16384,
        has_bias=config.bias,
    )
    experts = getattr(importlib.import_module(f"{_MOE}.experts.{module}"), name)(moe, quant)
    kernel = modular.FusedMoEKernel(plain(False), experts)
    local = _expert_map(config.num_experts, shard, device)

    def call_for(tokens: FlatTokens) -> Call:
        x, ids, scales = tokens.hidden.data, tokens.ids, tokens.weights.float()

        def call() -> torch.Tensor:
            wide = torch.nn.functional.pad(x, (0, padding)) if padding else x
            found = kernel.apply(wide, w1, w2, scales, ids, activation, config.num_experts, local, False)
            return found[:, : x.shape[1]]

        return call

    return call_for


def _expert_map(num_experts: int, shard: ExpertShard, device: torch.device) -> torch.Tensor | None:
    """Returns each expert's local number, -1 where it lies elsewhere; None where all are here: vLLM then looks nothing
    up, nor does it sort a few tokens."""
    L = shard.num_local_experts
    if num_experts == L:
        return None
    local = torch.full((num_experts,), -1, dtype=torch.int32, device=device)
    local[shard.first_expert : shard.end_expert] = torch.arange(L, dtype=torch.int32, device=device)
    return local

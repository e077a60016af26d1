"""The table of executors. A new one is a new file and one row here, or a row given to `register_executor`.

Nothing is imported until it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from eprt.errors import ConfigError
from eprt.experts import rules
from eprt.experts.base import AdaptedExecutor, Executor, ExecutorSpec, PreparedExecutor, anytime
from eprt.support import Requirement, load_class, register

if TYPE_CHECKING:
    import torch

    from eprt.config import MoEConfig, RuntimeConfig, TokenFormat
    from eprt.placement import ExpertShard
    from eprt.weights import ExpertWeights

__all__ = [
    "EXECUTORS",
    "Executor",
    "ExecutorSpec",
    "PreparedExecutor",
    "executor_spec",
    "make_executor",
    "register_executor",
]

_FLASHINFER = Requirement("flashinfer", ("flashinfer-python",), "0.6.18")
# The version whose signatures and layouts the two Blackwell executors were written and tested against.
_FLASHINFER_SM100 = Requirement("flashinfer", ("flashinfer-python",), "0.7.2")
_QUANTISED = ("mxfp4", "nvfp4", "fp8_tensor", "fp8_block", "fp8_channel", "mxfp8", "int4")
_BOTH = ("flat", "expert_major")
_ACTIVATIONS = ("swiglu", "geglu", "relu2")
_any_payload = partial(ExecutorSpec, payloads=("bf16", "f32", "fp8_block", "nvfp4"))
_cuda = partial(_any_payload, devices=("cuda",), graph_safe=True)
_sm100 = partial(_cuda, sm=(100, 103), bias=False, requirement=_FLASHINFER_SM100)

EXECUTORS: dict[str, ExecutorSpec] = {
    spec.name: spec
    for spec in (
        _any_payload(
            name="reference",
            path="eprt.experts.reference:ReferenceExecutor",
            summary="plain torch in float32, written from the formats' definitions; checks the others, slowly",
            formats=_BOTH,
            weights=("f32", "bf16", *_QUANTISED),
            devices=("cpu", "cuda"),
            activations=_ACTIVATIONS,
            witness=True,
            invariant=("cpu",),
        ),
        _any_payload(
            name="torch_grouped",
            path="eprt.experts.torch_grouped:GroupedExecutor",
            summary="torch grouped_mm; unquantised weights anywhere",
            formats=_BOTH,
            weights=("bf16", "f32"),
            decodes=_QUANTISED,
            devices=("cpu", "cuda"),
            sm=(80, 999),
            activations=_ACTIVATIONS,
            graph_safe=True,
            preference=2,
            invariant=("cpu",),
        ),
        _cuda(
            name="triton_grouped",
            path="eprt.experts.grouped:TritonGroupedExecutor",
            summary="Triton grouped GEMMs of our own; bf16, on Hopper FP8 and four bits too, nothing to install",
            formats=_BOTH,
            weights=("bf16", "mxfp4", "nvfp4", "int4", "fp8_tensor", "fp8_block", "fp8_channel"),
            sm=(80, 90),
            activations=_ACTIVATIONS,
            requirement=Requirement("triton", ("triton", "pytorch-triton"), "3.6"),
            rule=rules.triton_grouped,
            preference=5,
            invariant=("cuda",),
        ),
        _cuda(
            name="humming",
            path="eprt.experts.humming:HummingExecutor",
            summary="humming's JIT grouped GEMMs for low-bit weights",
            formats=_BOTH,
            weights=("mxfp4", "nvfp4", "fp8_tensor", "fp8_block"),
            sm=(80, 99),
            activations=_ACTIVATIONS,
            requirement=Requirement("humming", ("humming-kernels",), "0.1.19"),
            rule=rules.humming,
            preference=4,
            invariant=("cuda",),
        ),
        _cuda(
            name="cutlass_mxfp4",
            path="eprt.experts.cutlass_mxfp4:CutlassMxfp4Executor",
            summary="FlashInfer's fused cutlass MoE, MXFP4 weights on Hopper",
            formats=("flat",),
            weights=("mxfp4",),
            sm=(90, 90),
            activations=("swiglu",),
            requirement=_FLASHINFER,
            preference=3,
        ),
        _sm100(
            name="cutedsl_nvfp4",
            path="eprt.experts.blackwell.cutedsl:CuteDslExecutor",
            summary="FlashInfer's CuteDSL NVFP4 grouped GEMMs on Blackwell; not run on one yet",
            formats=_BOTH,
            weights=("nvfp4",),
            payloads=("bf16", "nvfp4"),
            rule=rules.trtllm_routing,
            preference=6,
        ),
        _sm100(
            name="trtllm_gen",
            path="eprt.experts.blackwell.trtllm:TrtllmGenExecutor",
            summary="FlashInfer's TRTLLM-Gen fused MoE on Blackwell; not run on one yet",
            formats=("flat",),
            weights=("nvfp4", "fp8_tensor", "fp8_block", "mxfp8"),
            payloads=("bf16", "nvfp4", "fp8_block"),
            rule=rules.trtllm_gen,
            takes_logits=rules.trtllm_logits,
            preference=7,
        ),
    )
}


def register_executor(spec: ExecutorSpec) -> None:
    """Makes an executor of your own known by its name, as `eprt.register_dispatcher` does for a dispatcher.

    Args:
        spec: the facts of the executor; `spec.path` is "module:Class" of a `PreparedExecutor`.

    Raises:
        ConfigError: another executor has the name or the class, or the spec names a format, payload or device that
            doesn't exist.
    """
    register(EXECUTORS, spec, ExecutorSpec)


def executor_spec(name: str) -> ExecutorSpec:
    """Raises ConfigError for a name that isn't in the table."""
    if name not in EXECUTORS:
        raise ConfigError(f"executor {name!r} doesn't exist; choose from {', '.join(EXECUTORS)} or 'auto'")
    return EXECUTORS[name]


def make_executor(
    name: str,
    config: MoEConfig,
    shard: ExpertShard,
    weights: ExpertWeights,
    device: torch.device,
    runtime: RuntimeConfig,
    token_format: TokenFormat | None = None,
    require_cold: Callable[[str], None] = anytime,
) -> Executor:
    """Imports and builds the executor `name`. Raises ConfigError for an unknown name, or weights that don't fit.

    Args:
        token_format: what the dispatcher emits: an `AdaptedExecutor` is put before kernels that don't take it. None:
            the executor's native formats will do.
        require_cold: `World.require_cold`: calls that would compile something after the warm-up are refused.
    """
    spec = executor_spec(name)
    kind: type[PreparedExecutor] = load_class(spec, PreparedExecutor)
    kind.spec = spec
    # An executor with a layout for each format makes the one it will be given.
    runtime = replace(runtime, token_format=token_format or runtime.token_format)
    executor = kind(config, shard, weights, device, runtime, require_cold)
    native = token_format is None or token_format in spec.formats
    return executor if native else AdaptedExecutor(executor)

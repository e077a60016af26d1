"""Decides what the plugin can run. Everything else falls back to vLLM: all layers under some flags, or single ones.

The decisions read only vLLM's configuration. It is the same on every rank, so every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig, WeightFormat
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError, UnsupportedError
from eprt.experts import EXECUTORS
from eprt.integrations.vllm.parameters import INTERLEAVED, FallsBackToVllm, activation_of, layout_of
from eprt.integrations.vllm.placement import OPTION as PLACEMENT
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.rounding import ceil_div
from eprt.support import Device
from eprt.world import World

OPTIONS = "eprt"  # key of `--additional-config`
STRICT = "strict"  # beside RuntimeConfig's fields there: layers that would fall back are errors
SCALE_BLOCK = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16, "fp8_block": 128}  # inputs that share a scale


def require_supported(config: Any, device_type: str, parallel: Any) -> None:
    """Checks what concerns all layers of a model. Raises FallsBackToVllm with the flag that is in the way.

    Args:
        config: a VllmConfig.
        parallel: vLLM's FusedMoEParallelConfig: how a layer is split.
    """
    flags, model = config.parallel_config, config.model_config
    reasons = [
        (device_type not in ("cuda", "cpu"), f"the platform is {device_type}: eprt runs on CUDA, and on CPU for tests"),
        (
            device_type == "cpu" and not model.enforce_eager,
            "on CPU vLLM compiles the experts' call into its graph: --enforce-eager gives them to eprt",
        ),
        (flags.enable_eplb, "--enable-eplb moves experts between ranks while eprt holds them"),
        (flags.use_ubatching, "--enable-dbo runs two batches at once through one layer"),
        (flags.enable_elastic_ep, "--enable-elastic-ep changes the ranks of a running engine"),
        (
            flags.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size splits tokens in a way that eprt isn't told",
        ),
        (config.lora_config is not None, "--enable-lora: adapters of the experts live in vLLM's own kernels"),
        (
            bool(getattr(model, "enable_sleep_mode", False)),
            "--enable-sleep-mode takes the experts' memory away and loads it again",
        ),
        (
            getattr(config, "weight_transfer_config", None) is not None,
            "--weight-transfer-config updates weights in place, and eprt keeps the experts in its own layout",
        ),
        (
            not parallel.use_ep and parallel.dp_size > 1,
            "--data-parallel-size cuts each expert over all ranks: --enable-expert-parallel gives them to eprt whole",
        ),
    ]
    _fall_back(reasons)


def _fall_back(reasons: list[tuple[bool, str]]) -> None:
    """Raises FallsBackToVllm with the first reason that holds, if any."""
    if reason := next((reason for holds, reason in reasons if holds), ""):
        raise FallsBackToVllm(reason)


def moe_config(layer: Any, method: Any) -> MoEConfig:
    """Translates a RoutedExperts whose method was just made into eprt's config. Raises FallsBackToVllm."""
    weight_format, moe = _weight_format(layer, method), layer.moe_config
    return MoEConfig(
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        activation=activation_of(layer),
        bias=moe.has_bias,
        weight_format=weight_format,
    )


def _weight_format(layer: Any, method: Any) -> WeightFormat:
    """Returns the number format of experts that eprt can run. Raises FallsBackToVllm for others."""
    moe, placement = layer.moe_config, getattr(layer, "expert_placement_strategy", "linear")
    fused = getattr(layer.expert_map_manager, "num_fused_shared_experts", 0)
    sums = moe.skip_final_all_reduce and moe.moe_parallel_config.use_ep
    reasons = [
        (moe.num_experts % moe.ep_size != 0, f"{moe.num_experts} experts don't divide by {moe.ep_size} ranks"),
        (moe.num_experts != moe.num_logical_experts, "experts are replicated"),
        (placement != "linear", f"experts are placed {placement}, eprt holds them in order"),
        (fused != 0, "shared experts are fused with the routed ones"),
        (layer.apply_router_weight_on_input, "router weights are applied to the experts' input"),
        (sums, "the model sums this layer's partial outputs itself"),
    ]
    _fall_back(reasons)
    found = layout_of(method).weight_format(method, layer.params_dtype)
    part, block, tokens = moe.intermediate_size_per_partition, SCALE_BLOCK.get(found, 1), moe.in_dtype
    cut = f"tensor parallelism {moe.tp_size} leaves {part} of the experts' rows to a rank, which cuts a scale of"
    alternating = found == "fp8_block" and layer.activation.value == INTERLEAVED
    reasons = [
        (moe.tp_size > 1 and part % block != 0, f"{cut} {block} ({found})"),
        (alternating, "FP8 blocks over rows that alternate gate, up"),
        (tokens not in (torch.bfloat16, torch.float32), f"tokens in {tokens}: eprt carries bfloat16 or float32"),
    ]
    _fall_back(reasons)
    return found


def runtime_config(config: Any, tp_size: int) -> RuntimeConfig:
    """Returns settings with vLLM's own limit as capacity, the rest from `--additional-config`. Raises ConfigError.

    Each of the `tp_size` ranks of a TP group sends its part of the batch, with sequence parallelism or without.
    """
    given = {name: value for name, value in options_of(config).items() if name not in (PLACEMENT, STRICT)}
    most = max(
        config.scheduler_config.max_num_batched_tokens, *(config.compilation_config.cudagraph_capture_sizes or [0])
    )
    return RuntimeConfig(max_tokens_per_rank=ceil_div(most, tp_size), **given)


def options_of(config: Any) -> dict[str, Any]:
    """Returns eprt's section of `--additional-config`. Raises ConfigError for names that it hasn't got."""
    given: Any = (config.additional_config or {}).get(OPTIONS, {})
    allowed = {field.name for field in fields(RuntimeConfig)} - {"max_tokens_per_rank", "on_rank_lost"}
    found = sorted(set(given) - {*allowed, PLACEMENT, STRICT}) if isinstance(given, dict) else given
    if found or not isinstance(given, dict):
        raise ConfigError(
            f"--additional-config {OPTIONS}: {found}; expected {PLACEMENT}, {STRICT}, or fields of RuntimeConfig: "
            f"{sorted(allowed)}"
        )
    if not isinstance(strict := given.get(STRICT, False), bool):
        raise ConfigError(f"--additional-config {OPTIONS}.{STRICT}: {strict!r}: expected true or false")
    return given


def with_low_precision(moe: MoEConfig, runtime: RuntimeConfig, options: Mapping[str, Any]) -> RuntimeConfig:
    """Quantises activations to FP8, one scale per 128 values, where the weights are FP8 with one scale per block.

    vLLM's own kernels do so with such a checkpoint (`Fp8MoEMethod`: kFp8Dynamic128Sym). The options may say otherwise.
    """
    if moe.weight_format != "fp8_block" or "low_precision_activations" in options:
        return runtime
    return replace(runtime, low_precision_activations=True)


def captures_graphs(config: Any) -> bool:
    """Returns whether vLLM may capture this model's layers in CUDA graphs."""
    if config.model_config.enforce_eager:
        return False
    return getattr(config.compilation_config.cudagraph_mode, "name", "NONE") != "NONE"


def choose(
    moe: MoEConfig, world: World, runtime: RuntimeConfig, placement: ExpertPlacement | None = None, *, captured: bool
) -> tuple[Plan, RuntimeConfig]:
    """Returns the plan, and settings that name its backends. Raises FallsBackToVllm, ConfigError."""
    device = Device.of(world.device)
    try:
        plan = make_plan(moe, world.parallel, runtime, device, placement)
    except UnsupportedError as error:
        raise FallsBackToVllm(str(error)) from error
    if captured and not _graph_safe(plan.dispatcher, plan.executor):
        pairs = [(c.dispatcher, c.executor) for c in plan.candidates if c.support]
        pairs = [pair for pair in pairs if _graph_safe(*pair)]
        if not pairs:
            raise FallsBackToVllm(
                f"{plan.dispatcher} + {plan.executor} can't be captured in CUDA graphs and nothing else can run this "
                "layer: --enforce-eager gives it to eprt"
            )
        dispatcher, executor = min(pairs, key=lambda pair: pair[1] != plan.executor)
        named = replace(runtime, dispatcher=dispatcher, executor=executor)
        plan = make_plan(moe, world.parallel, named, device, placement)
    if device.kind == "cuda" and runtime.executor == "auto":
        _require_packed(plan.executor, moe, world.parallel, runtime, device)
    return plan, replace(runtime, dispatcher=plan.dispatcher, executor=plan.executor)


def _require_packed(
    executor: str, moe: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device
) -> None:
    """Raises FallsBackToVllm if the executor would decode packed experts, with why no other can multiply them."""
    if moe.weight_format in EXECUTORS[executor].weights:
        return
    others = [spec for spec in EXECUTORS.values() if moe.weight_format in spec.weights and spec.name != "reference"]
    payload = runtime.payload or "bf16"
    reasons = [f"{e.name}: {e.supports(moe, parallel, runtime, device, payload).reason}" for e in others]
    raise FallsBackToVllm(f"eprt would decode its {moe.weight_format} experts to bf16 ({'; '.join(reasons)})")


def _graph_safe(dispatcher: str, executor: str) -> bool:
    return DISPATCHERS[dispatcher].graph_safe and EXECUTORS[executor].graph_safe

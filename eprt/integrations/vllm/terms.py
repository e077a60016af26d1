"""What the plugin can't do with vLLM, decided before anything is built: refused at start, or left to vLLM.

Both are decided from vLLM's configuration, which is the same on every rank, so every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from eprt.config import MoEConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError, UnsupportedError
from eprt.experts import EXECUTORS
from eprt.integrations.vllm.parameters import INTERLEAVED, LeftToVllm, activation_of, layout_of
from eprt.integrations.vllm.placed import OPTION as PLACEMENT
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.rounding import round_up
from eprt.support import Device
from eprt.world import World

OPTIONS = "eprt"  # key of `--additional-config`


def require_host(config: Any, device_type: str) -> None:
    """Raises ConfigError, with what to change, unless eprt can run under this VllmConfig."""
    parallel, model = config.parallel_config, config.model_config
    refusals = [
        (device_type not in ("cuda", "cpu"), f"the platform is {device_type}: eprt runs on CUDA, and on CPU for tests"),
        (
            device_type == "cpu" and not model.enforce_eager,
            "on CPU vLLM compiles the experts' call into its graph, which has collectives in it: add --enforce-eager",
        ),
        (parallel.enable_eplb, "--enable-eplb moves experts between ranks while eprt holds them: leave it out"),
        (parallel.use_ubatching, "--enable-dbo runs two batches at once through one layer: leave it out"),
        (parallel.enable_elastic_ep, "elastic EP changes the ranks of a running engine: leave it out"),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism splits tokens in a way that eprt isn't told: use data parallelism",
        ),
        (config.lora_config is not None, "LoRA adapters of the experts live in vLLM's own kernels: serve without LoRA"),
        (
            bool(getattr(model, "enable_sleep_mode", False)),
            "sleep mode takes the experts' memory away and loads it again: leave it out",
        ),
        (
            getattr(config, "weight_transfer_config", None) is not None,
            "weights that are updated in place: eprt keeps the experts in its own layout; restart with new weights",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise ConfigError(f"eprt can't run this: {reason}; or take eprt out of VLLM_PLUGINS")


def moe_config(layer: Any, method: Any) -> MoEConfig:
    """eprt's view of a RoutedExperts whose method was just made. Raises LeftToVllm."""
    moe = layer.moe_config
    manager = layer.expert_map_manager
    placement = getattr(layer, "expert_placement_strategy", "linear")
    reasons = [
        (moe.num_experts % moe.ep_size != 0, f"{moe.num_experts} experts don't divide by {moe.ep_size} ranks"),
        (moe.num_experts != moe.num_logical_experts, "experts are replicated"),
        (placement != "linear", f"experts are placed {placement}, eprt holds them in order"),
        (getattr(manager, "num_fused_shared_experts", 0) != 0, "shared experts are fused with the routed ones"),
        (layer.apply_router_weight_on_input, "router weights are applied to the experts' input"),
        (moe.skip_final_all_reduce, "the model sums this layer's partial outputs itself"),
    ]
    for left, reason in reasons:
        if left:
            raise LeftToVllm(reason)
    weight_format = layout_of(method).weight_format(method, layer.params_dtype)
    if weight_format == "fp8_block" and layer.activation.value == INTERLEAVED:
        raise LeftToVllm("FP8 blocks over rows that alternate gate, up")
    if (tokens := str(moe.in_dtype)) not in ("torch.bfloat16", "torch.float32"):
        raise LeftToVllm(f"tokens in {tokens}: eprt carries bfloat16 or float32")
    return MoEConfig(
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        activation=activation_of(layer),
        bias=moe.has_bias,
        weight_format=weight_format,
    )


def runtime_config(config: Any, ranks_of_a_token: int) -> RuntimeConfig:
    """Capacity from vLLM's own limits, the rest from `--additional-config`. Raises ConfigError.

    Args:
        ranks_of_a_token: TP size; each TP rank sends its part of the batch, with sequence parallelism or without.
    """
    given = {name: value for name, value in options_of(config).items() if name != PLACEMENT}
    most = max(
        config.scheduler_config.max_num_batched_tokens, *(config.compilation_config.cudagraph_capture_sizes or [0])
    )
    return RuntimeConfig(max_tokens_per_rank=round_up(most, ranks_of_a_token) // ranks_of_a_token, **given)


def options_of(config: Any) -> dict[str, Any]:
    """What `--additional-config` says to eprt. Raises ConfigError for names that it hasn't got."""
    given: Any = (config.additional_config or {}).get(OPTIONS, {})
    allowed = {field.name for field in fields(RuntimeConfig)} - {"max_tokens_per_rank", "rank_mask", "on_rank_lost"}
    found = sorted(set(given) - {*allowed, PLACEMENT}) if isinstance(given, dict) else given
    if found or not isinstance(given, dict):
        raise ConfigError(
            f"--additional-config {OPTIONS}: {found}; expected {PLACEMENT}, or fields of RuntimeConfig: "
            f"{sorted(allowed)}"
        )
    return given


def as_vllm_computes(moe: MoEConfig, runtime: RuntimeConfig, options: Mapping[str, Any]) -> RuntimeConfig:
    """FP8 weights with a scale a block meet activations that are quantised alike, 128 values to a scale, which is what
    vLLM's own kernels do with such a checkpoint (`Fp8MoEMethod`: kFp8Dynamic128Sym). The options may say otherwise."""
    if moe.weight_format != "fp8_block" or "low_precision_activations" in options:
        return runtime
    return replace(runtime, low_precision_activations=True)


def captures_graphs(config: Any) -> bool:
    """Whether vLLM may capture this model's layers in CUDA graphs."""
    if config.model_config.enforce_eager:
        return False
    return getattr(config.compilation_config.cudagraph_mode, "name", "NONE") != "NONE"


def choose(
    moe: MoEConfig, world: World, runtime: RuntimeConfig, placement: ExpertPlacement | None = None, *, captured: bool
) -> tuple[Plan, RuntimeConfig]:
    """The plan, with the names that make it again. Raises LeftToVllm, ConfigError."""
    device = Device.of(world.device)
    try:
        plan = make_plan(moe, world.parallel, runtime, device, placement)
    except UnsupportedError as error:
        raise LeftToVllm(str(error)) from error
    if captured and not _graph_safe(plan.dispatcher, plan.executor):
        pairs = [(c.dispatcher, c.executor) for c in plan.candidates if c.support]
        pairs = [pair for pair in pairs if _graph_safe(*pair)]
        if not pairs:
            raise LeftToVllm(
                f"{plan.dispatcher} + {plan.executor} can't be captured in CUDA graphs and nothing else can run this "
                "layer: --enforce-eager gives it to eprt"
            )
        dispatcher, executor = min(pairs, key=lambda pair: pair[1] != plan.executor)
        named = replace(runtime, dispatcher=dispatcher, executor=executor)
        plan = make_plan(moe, world.parallel, named, device, placement)
    if (
        device.kind == "cuda"
        and runtime.executor == "auto"
        and moe.weight_format not in EXECUTORS[plan.executor].weights
    ):
        others = [spec for spec in EXECUTORS.values() if moe.weight_format in spec.weights and spec.name != "reference"]
        payload = runtime.payload or "bf16"
        reasons = [f"{e.name}: {e.supports(moe, world.parallel, runtime, device, payload).reason}" for e in others]
        raise LeftToVllm(f"eprt would decode its {moe.weight_format} experts to bf16 ({'; '.join(reasons)})")
    return plan, replace(runtime, dispatcher=plan.dispatcher, executor=plan.executor)


def _graph_safe(dispatcher: str, executor: str) -> bool:
    return DISPATCHERS[dispatcher].graph_safe and EXECUTORS[executor].graph_safe

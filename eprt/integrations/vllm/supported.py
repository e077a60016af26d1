"""Decides what the plugin can run. Everything else falls back to vLLM: all layers under some flags, or single ones.

The decisions read only vLLM's configuration. It is the same on every rank, so every rank decides alike.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from typing import Any

from eprt.config import MoEConfig, RuntimeConfig, WeightFormat
from eprt.integrations.engine.balancing import BalanceConfig
from eprt.integrations.engine.reloading import MATRICES
from eprt.integrations.engine.settings import (
    ADAPTERS,
    SCALE_BLOCK,
    adapts_attention,
    checked_options,
    fall_back,
    on_input,
    require_whole_scales,
    runtime_with,
)
from eprt.integrations.vllm.parameters import CUT_BETWEEN_SCALES, INTERLEAVED, activation_of, layout_of
from eprt.rounding import ceil_div, round_up

OPTIONS = "eprt"  # key of `--additional-config`
DECODE = "decode_backend"  # there, vLLM's own: DeepSeek-V4.1 and others bind the experts' kernels once layers are made
# `--load-format`s whose experts come as vLLM's own kernels keep them, and aren't prepared again.
PREPARED = ("sharded_state", "runai_streamer_sharded", "tensorizer", "ipc_cache", "modelexpress")
# MoE runners of models (vLLM 0.33: Muse Spark, Kimi K3) that reach into the kernel of vLLM's own methods, and decode
# kernels (Flint's) that read the experts as one of those keeps them.
RUNNERS = re.compile(r"vllm\.models\.(\w+\.nvidia\.\w+moe_runner|flint\.ops\.moe)$")
# Models that sum their layers' partial outputs themselves, and say so once a layer is made.
SUMMING = re.compile(r"vllm\.models\.inkling\.nvidia\.moe$")
BY_KIND = ("text_experts", "vision_experts")  # ERNIE 4.5 VL's, each called for its kind of tokens where a rank has any
FAULT_TOLERANT = "nixl_ep"  # an all-to-all of vLLM's that is so without a flag
EPLB = "eplb"  # beside RuntimeConfig's fields there: a `BalanceConfig`, for a vLLM whose own flag refuses the platform


def require_supported(config: Any, device_type: str) -> None:
    """Checks a VllmConfig for what concerns all layers of a model. Raises FallsBackToEngine with the flag that is in
    the way."""
    eplb = config.parallel_config.enable_eplb, "--enable-eplb moves experts between ranks while eprt holds them"
    runner = loaded(RUNNERS)
    owned = bool(runner), f"the model runs its MoE layers itself ({runner}), on what vLLM's own methods keep"
    fall_back([*_reasons(config, device_type), owned, eplb])


def left_whole(config: Any, device_type: str) -> bool:
    """Returns whether a flag leaves all layers of a model to vLLM, before any is made."""
    return any(holds for holds, _ in _reasons(config, device_type))


def _reasons(config: Any, device_type: str) -> list[tuple[bool, str]]:
    flags, model, loaded = config.parallel_config, config.model_config, config.load_config.load_format
    chosen = getattr(getattr(config, "kernel_config", None), "moe_backend", "auto")  # of a draft, its own
    return [
        (device_type not in ("cuda", "cpu"), f"the platform is {device_type}: eprt runs on CUDA, and on CPU for tests"),
        (
            device_type == "cpu" and not model.enforce_eager,
            "on CPU vLLM compiles the experts' call into its graph: --enforce-eager gives them to eprt",
        ),
        (loaded in PREPARED, f"--load-format {loaded} brings experts in the order of vLLM's own kernels"),
        (chosen != "auto", f"--moe-backend {chosen} names the experts' kernels"),
        (flags.use_ubatching, "--enable-dbo runs two batches at once through one layer"),
        (
            (config.additional_config or {}).get(DECODE, "auto") != "auto",
            f"--additional-config {DECODE}: such decode steps run on the kernel object of vLLM's own methods",
        ),
        (
            _offloads(getattr(config, "offload_config", None)),
            "--cpu-offload-gb, --offload-group-size: eprt would hold on the GPU what they keep on the CPU",
        ),
        (flags.enable_elastic_ep, "--enable-elastic-ep changes the ranks of a running engine"),
        (
            getattr(flags, "enable_fault_tolerance", False)
            or (flags.all2all_backend == FAULT_TOLERANT and flags.data_parallel_size > 1),
            f"--enable-fault-tolerance, --all2all-backend {FAULT_TOLERANT}: vLLM asks its own all-to-all after each "
            "step which ranks are lost; another --all2all-backend leaves the layers to eprt",
        ),
        (
            flags.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size splits tokens in a way that eprt isn't told",
        ),
        (
            (lora := config.lora_config) is not None and not adapts_attention(getattr(lora, "target_modules", None)),
            ADAPTERS.format("vLLM"),
        ),
    ]


def _offloads(offload: Any) -> bool:
    """Returns whether an OffloadConfig keeps weights on the CPU."""
    return offload is not None and (offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0)


def loaded(modules: re.Pattern[str]) -> str:
    """Returns which of some modules of vLLM's models is loaded, or ""; vLLM loads those of the models that it makes."""
    return next((name for name in tuple(sys.modules) if modules.match(name)), "")


def require_lost_in_sleep(name: str, config: Any) -> None:
    """Checks that a layer's experts aren't among the parameters that vLLM keeps in sleep level 2 (since 0.32): it
    copies what the parameters hold, of eprt's nothing. Raises FallsBackToEngine."""
    patterns = getattr(config.model_config, "sleep_preserve_parameter_names", None) or ()
    own = ("draft." if makes_draft() else "") + name + ".routed_experts."
    kept = any(fnmatch.filter([own + part + end for part in ("w13", "w2") for end in MATRICES], p) for p in patterns)
    fall_back([(kept, "--sleep-preserve-parameter-names names experts")])


def makes_draft() -> bool:
    """Returns whether the model that is being made is a draft of another, by the tag that vLLM compiles it under."""
    tag = getattr(sys.modules.get("vllm.compilation.backends"), "model_tag", "")
    return tag == "draft_model" or tag.endswith("_head")


def moe_config(layer: Any, method: Any) -> MoEConfig:
    """Translates a RoutedExperts whose method was just made into eprt's config. Raises FallsBackToEngine."""
    weight_format, moe = _weight_format(layer, method), layer.moe_config
    return MoEConfig(
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        intermediate_size=whole_part(method, moe.intermediate_size_per_partition),
        activation=activation_of(layer),
        bias=moe.has_bias,
        weight_format=weight_format,
        weight_on_input=layer.apply_router_weight_on_input,
    )


def whole_part(method: Any, part: int) -> int:
    """Returns the intermediate size of a rank's tensor-parallel part, in whole scales where vLLM's loader cuts between
    them: of gpt-oss's 2880 rows an eighth has 384, the last one 192 and zeros, which add nothing."""
    return round_up(part, SCALE_BLOCK["mxfp4"]) if type(method).__name__ == CUT_BETWEEN_SCALES else part


def _weight_format(layer: Any, method: Any) -> WeightFormat:
    """Returns the number format of experts that eprt can run. Raises FallsBackToEngine for others."""
    moe, placement = layer.moe_config, getattr(layer, "expert_placement_strategy", "linear")
    fused = getattr(layer.expert_map_manager, "num_fused_shared_experts", 0)
    parallel = moe.moe_parallel_config
    sums = parallel.use_ep and (moe.skip_final_all_reduce or bool(loaded(SUMMING)))
    foreign = _foreign_declaration(method)
    apart = parallel.use_ep and parallel.dp_size > 1 and layer.layer_name.endswith(BY_KIND)
    reasons = [
        (moe.num_experts % moe.ep_size != 0, f"{moe.num_experts} experts don't divide by {moe.ep_size} ranks"),
        (moe.num_experts > moe.num_logical_experts, "experts are replicated"),
        (moe.num_experts < moe.num_logical_experts, "constants stand for some experts"),  # expert_substitution, 0.33
        (placement != "linear", f"experts are placed {placement}, eprt holds them in order"),
        (fused != 0, "shared experts are fused with the routed ones"),
        *on_input(layer.apply_router_weight_on_input, moe.experts_per_token, method),
        (sums, "the model sums this layer's partial outputs itself"),
        (bool(foreign), f"{foreign} has replaced what declares the experts' parameters"),
        (
            apart,
            "data-parallel ranks call it only in steps in which they have an image, or text; without "
            "--enable-expert-parallel eprt runs it",
        ),
    ]
    fall_back(reasons)
    source = type(getattr(method, "requantization_source", None)).__name__
    fall_back([(source != "NoneType", f"experts that are kept by {source} and quantised anew when they are loaded")])
    part = whole_part(method, moe.intermediate_size_per_partition)
    layout = layout_of(method)
    found = layout.weight_format(method, part, layer.params_dtype)
    alternating = found == "fp8_block" and layout.online is None and layer.activation.value == INTERLEAVED
    fall_back([(alternating, "FP8 blocks over rows that alternate gate, up")])
    require_whole_scales(found, part, moe.tp_size, moe.in_dtype)
    return found


def _foreign_declaration(method: Any) -> str:
    """Returns the module whose function stands in for `create_weights` in a method's class, or "": ROLL's FP8, say,
    which asks which kernel was chosen, and quantises in loaders."""
    owner = next((kind for kind in type(method).__mro__ if "create_weights" in vars(kind)), None)
    module = "" if owner is None else vars(owner)["create_weights"].__module__
    return "" if owner is None or module == owner.__module__ else module


def gathered_ranks(moe: Any) -> int:
    """Returns of how many data-parallel ranks vLLM gathers the tokens in front of a layer with this FusedMoEConfig:
    without expert parallelism each rank has a part of every expert."""
    parallel = moe.moe_parallel_config
    return 1 if parallel.use_ep else parallel.dp_size


def runtime_config(config: Any, tp_size: int, gathered: int = 1) -> RuntimeConfig:
    """Returns settings with vLLM's own limit as capacity, the rest from `--additional-config`. Raises ConfigError.

    Each of the `tp_size` ranks of a TP group sends its part of the batch, with sequence parallelism or without; or a
    layer gets the batches of `gathered` ranks. Under vLLM's batch-invariant switch the layers are so, too.
    """
    most = max(
        config.scheduler_config.max_num_batched_tokens, *(config.compilation_config.cudagraph_capture_sizes or [0])
    )
    invariant = bool(getattr(sys.modules.get("vllm.envs"), "VLLM_BATCH_INVARIANT", False))
    given = ({"batch_invariant": True} if invariant else {}) | options_of(config)
    return runtime_with(given, ceil_div(most * gathered, tp_size))


def options_of(config: Any) -> dict[str, Any]:
    """Returns eprt's section of `--additional-config`. Raises ConfigError for names that it hasn't got."""
    return checked_options((config.additional_config or {}).get(OPTIONS, {}), f"--additional-config {OPTIONS}", EPLB)


def balance_options(config: Any) -> BalanceConfig | None:
    """Returns what eprt's own option says of balancing, or None. Raises ConfigError."""
    given: Any = (config.additional_config or {}).get(OPTIONS, {})
    if not isinstance(given, dict) or EPLB not in given:
        return None
    return BalanceConfig.read(given[EPLB], f"--additional-config {OPTIONS}.{EPLB}")


def captures_graphs(config: Any) -> bool:
    """Returns whether vLLM may capture this model's layers in CUDA graphs."""
    mode = getattr(config.compilation_config.cudagraph_mode, "name", "NONE")
    return not config.model_config.enforce_eager and mode != "NONE"

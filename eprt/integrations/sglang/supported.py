"""Decides what the plugin can run. Everything else falls back to SGLang: all layers under some flags, or single ones.

The decisions read only SGLang's arguments and the model's configuration. They are the same on every rank, so every rank
decides alike.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch

from eprt.config import MoEConfig, ParallelConfig, Routing, RuntimeConfig
from eprt.errors import CheckpointError, ConfigError, EprtError
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.integrations.engine.settings import (
    ADAPTERS,
    adapts_attention,
    checked_options,
    choose,
    fall_back,
    on_input,
    require_whole_scales,
    runtime_with,
    with_low_precision,
)
from eprt.integrations.sglang.parameters import activation_of, interleaved, keeper_of, layout_of, part_of
from eprt.models import family_for
from eprt.models.checkpoint import CONFIG, QUANT_CONFIG, read_config
from eprt.models.hf_config import flatten
from eprt.models.schemes import scheme_of
from eprt.support import Device

VARIABLE = "EPRT_SGLANG"
ALL_TO_ALL = "all_to_all"  # beside RuntimeConfig's fields there; False: SGLang gathers and sums the tokens
CARRIED = "customized"  # SGLang's name for an all-to-all that isn't its own
EAGER = "--disable-cuda-graph"
GRAPHS_ASLEEP = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"  # with --enable-memory-saver
# Its config lists which layers have experts, has no factor, and else the names of GLM-4.5's.
MIMO_V2 = {"model_type": "glm4_moe", "moe_layer_freq": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
# Models whose code was read for what it does around the experts under an all-to-all. The fields make the config of one
# without a family, which may nest its text model's, that of a family with the same maths.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {},
    "Qwen2MoeForCausalLM": {},
    "Qwen3NextForCausalLM": {},
    "GptOssForCausalLM": {},
    "Glm4MoeForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "MiniMaxM2ForCausalLM": {},
    "Qwen3_5MoeForConditionalGeneration": {},
    "Qwen3VLMoeForConditionalGeneration": {"model_type": "qwen3_moe"},
    "Glm4vMoeForConditionalGeneration": {"model_type": "glm4_moe"},
    "MiMoV2FlashForCausalLM": MIMO_V2,
}
MTP = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")  # so, too, for the layers of their own that draft tokens
# Models with images, of whose prefills SGLang has no graphs.
WITHOUT_PREFILL_GRAPHS = ("Qwen3VLMoeForConditionalGeneration", "Glm4vMoeForConditionalGeneration")
DENSE_DRAFTS = ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3")
FORMATS = ("bf16", "f32", "fp8_block", "fp8_tensor", "fp8_channel", "int4", "mxfp4", "nvfp4")
COMPRESSED = "compressed-tensors"
DIALECTS = ("none", "fp8", "mxfp4", "modelopt", "modelopt_fp4", COMPRESSED)  # of `quant_method` in config.json
# `--load-format`s whose experts come as SGLang's own methods leave them, or that keep what these leave.
PREPARED = ("sharded_state", "presharded", "remote", "remote_instance", "expert_pack", "flash_rl")
RUNNERS = ("auto", "triton", "triton_kernel")  # others load weights in an order of their own
# Models that multiply the parameters of a FusedMoE themselves, or load rows of gate and up in turn and don't say so.
OWN_KERNELS = ("InklingForConditionalGeneration", "InklingForConditionalGenerationMTP")
SEED = "remote_instance_weight_loader_start_seed_via_transfer_engine"


def options() -> dict[str, Any]:
    """Returns the options in `EPRT_SGLANG`. Raises ConfigError for text that is no JSON, or names it hasn't got."""
    text = os.environ.get(VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {text!r} is no JSON: {error}") from error
    given = checked_options(given, VARIABLE, ALL_TO_ALL)
    if not isinstance(given.get(ALL_TO_ALL, True), bool):
        raise ConfigError(f"{VARIABLE}.{ALL_TO_ALL}: {given[ALL_TO_ALL]!r}: expected true or false")
    return given


def require_supported(args: Any) -> None:
    """Checks a ServerArgs for what concerns all layers. Raises FallsBackToEngine with the flag that is in the way."""

    def has(name: str) -> bool:
        return bool(getattr(args, name, None))

    a2a, loaded, drafts = args.moe_a2a_backend, getattr(args, "load_format", "auto"), args.speculative_draft_load_format
    device = _device(args)
    mode = getattr(args, "weight_cache_mode", "off")
    require_runner(args.moe_runner_backend, "--moe-runner-backend")
    fall_back(
        [
            (device not in ("cuda", "cpu"), f"the device is {device}: eprt runs on CUDA, and on CPU for tests"),
            (a2a not in ("none", CARRIED), f"--moe-a2a-backend {a2a} carries the tokens"),
            (has("enable_eplb") or has("ep_num_redundant_experts"), "--enable-eplb moves experts that eprt holds"),
            (getattr(args, "init_expert_location", "trivial") != "trivial", "--init-expert-location orders experts"),
            (has("enable_two_batch_overlap"), "--enable-two-batch-overlap runs two batches at once through a layer"),
            (has("enable_single_batch_overlap"), "--enable-single-batch-overlap splits a layer's call"),
            (
                (has("enable_lora") or has("lora_paths")) and not adapts_attention(args.lora_target_modules),
                ADAPTERS.format("SGLang"),
            ),
            (has("elastic_ep_backend"), "--elastic-ep-backend changes the ranks of a running engine"),
            (_context_parallel(args), "context parallelism splits tokens in a way that eprt isn't told"),
            (getattr(args, "dwdp_size", 1) > 1, "--dwdp-size moves experts while layers run"),
            (has("kt_weight_path"), "--kt-weight-path keeps experts on the CPU"),
            (has("cpu_offload_gb"), "--cpu-offload-gb keeps weights on the CPU"),
            (getattr(args, "offload_group_size", -1) > 0, "--offload-group-size keeps weights on the CPU"),
            (has("enable_pdmux"), "--enable-pdmux runs two batches at once through a layer"),
            (loaded in PREPARED, f"--load-format {loaded} has experts in the order of SGLang's own kernels"),
            (
                drafts in PREPARED,
                f"--speculative-draft-load-format {drafts} has a draft's experts in the order of SGLang's own kernels",
            ),
            (has(SEED), f"--{SEED.replace('_', '-')} gives parameters away, and eprt frees the experts'"),
            (has("modelopt_quant"), "--modelopt-quant quantises and exports parameters, and eprt frees the experts'"),
            (mode != "off", f"--weight-cache-mode {mode} has experts in the order of SGLang's own kernels"),
            (
                getattr(args, "startup_weight_load_mode", "serial") != "serial",
                "--startup-weight-load-mode overlap prepares experts before they are loaded",
            ),
            (has("enable_torch_compile"), "--enable-torch-compile compiles the experts' call into its graph"),
            (
                compiles_prefill(args),
                "--cuda-graph-backend-prefill tc_piecewise compiles the experts' call: breakable leaves it as it is",
            ),
        ]
    )


def require_runner(name: str, flag: str) -> None:
    """Checks a flag's runner for layers that are made. Raises FallsBackToEngine."""
    reason = (  # SGLang's own choice for some models: Nemotron-H, many on Blackwell
        f"{flag} {name} keeps experts in an order of its own; triton, where SGLang has it for them, leaves them to eprt"
    )
    fall_back([(name not in RUNNERS, reason)])


def _device(args: Any) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _context_parallel(args: Any) -> bool:
    sizes = (getattr(args, f"{kind}_size", 1) for kind in ("attn_cp", "dcp", "moe_dp"))
    return any(size > 1 for size in sizes) or bool(getattr(args, "enable_prefill_cp", False))


def chooses_prefill_graphs(args: Any) -> bool:
    """Returns whether flags say how prefill is captured, or that it isn't."""
    off = args.disable_cuda_graph or args.disable_prefill_cuda_graph
    return off or args.cuda_graph_backend_prefill is not None or args.cuda_graph_config is not None


def keeps_prefill_graphs(args: Any) -> bool:
    """Returns whether a flag has to ask for CUDA graphs of prefill, which SGLang's default keeps from foreign
    all-to-alls. All ranks replay them at once, padded to one size, or none does.

    SGLang has none for latent attention (DeepSeek's), for most models with images, on ranks that only decode, and in
    memory that it gives away.
    """
    given_away = args.enable_memory_saver and os.environ.get(GRAPHS_ASLEEP, "").lower() in ("true", "1")
    if args.moe_a2a_backend != CARRIED or _device(args) != "cuda" or given_away:
        return False
    found = flatten(_model_config(args))
    images = _architecture(found) in WITHOUT_PREFILL_GRAPHS and getattr(args, "enable_multimodal", None) is not False
    lacking = found.get("kv_lora_rank") is not None or images
    return not lacking and getattr(args, "disaggregation_mode", "null") != "decode"


def compiles_prefill(args: Any) -> bool:
    """Returns whether SGLang compiles prefill: by a flag, or by what it makes of its arguments."""
    backends = [args.cuda_graph_backend_prefill, *(phase.backend for phase in _captured(args, "prefill"))]
    return "tc_piecewise" in backends and _device(args) == "cuda"


def _captured(args: Any, *phases: str) -> list[Any]:
    """Returns the settings of those phases of which the resolved arguments have CUDA graphs."""
    found = (getattr(getattr(args, "cuda_graph_config", None), phase, None) for phase in phases)
    return [phase for phase in found if phase is not None and phase.backend != "disabled"]


def attention_dp(args: Any) -> int:
    """Returns how many ranks have attention of their own: since SGLang 0.5.23 a size beside that of replicas."""
    return args.dp_size if args.enable_dp_attention else getattr(args, "attn_dp_size", 1)


def all_to_all_reason(args: Any, given: dict[str, Any]) -> str:
    """Returns why eprt doesn't carry tokens between the ranks of these arguments, or "" where it does."""
    width, code = attention_dp(args), args.model_impl
    try:
        fall_back(
            [
                (given.get(ALL_TO_ALL) is False, f"{VARIABLE} says {ALL_TO_ALL}: false"),
                (code not in ("auto", "sglang"), f"--model-impl {code}: its blocks add up what ranks' experts say"),
                (args.pp_size > 1, "--pp-size: each stage of a pipeline has ranks of its own"),
                (width == 1, "attention isn't data-parallel (--attn-dp-size, or --dp-size and --enable-dp-attention)"),
                (width != args.tp_size, f"--dp-size {width} isn't --tp-size {args.tp_size}"),
                (args.ep_size != args.tp_size, f"--ep-size {args.ep_size} isn't --tp-size {args.tp_size}"),
            ]
        )
        require_supported(args)
        found = _model_config(args)
        _require_model(args, given, found)
        if _drafts_itself(args, found):  # with the layer behind its last one
            _require_model(args, given, found | {"num_hidden_layers": found["num_hidden_layers"] + 1})
    except FallsBackToEngine as reason:
        return str(reason)
    return ""


def _drafts_itself(args: Any, found: dict[str, Any]) -> bool:
    """Returns whether the model drafts tokens itself. Raises FallsBackToEngine: eprt can't carry its draft's tokens."""
    if args.speculative_algorithm is None:
        return False
    algorithm, draft = args.speculative_algorithm.upper(), args.speculative_draft_model_path
    exchange, runner = args.speculative_moe_a2a_backend, args.speculative_moe_runner_backend
    format = args.speculative_draft_model_quantization
    fall_back(
        [
            (algorithm not in ("EAGLE", "EAGLE3", "NEXTN"), f"--speculative-algorithm {algorithm}: its code is unread"),
            (getattr(args, "enable_multi_layer_eagle", False), "--enable-multi-layer-eagle: its code is unread"),
            (exchange not in (None, CARRIED), f"--speculative-moe-a2a-backend {exchange} carries the draft's tokens"),
            (runner not in (None, *RUNNERS), f"--speculative-moe-runner-backend {runner} runs the draft"),
            (
                format not in (None, "unquant"),
                f"--speculative-draft-model-quantization {format} makes the format of the draft's experts",
            ),
        ]
    )
    itself = draft in (None, args.model_path)
    name = _architecture(found if itself else _model_config(args, draft))
    unread = f"the draft of --speculative-algorithm {algorithm}, {name}, isn't among those whose code was read"
    alone = itself and algorithm == "EAGLE3"  # SGLang gives its draft's experts to each rank whole
    fall_back([(alone or name not in (MTP if itself else DENSE_DRAFTS), unread)])
    return itself


def _require_model(args: Any, given: dict[str, Any], found: dict[str, Any]) -> None:
    """Checks that every layer of the model will run: under an all-to-all none can be left to SGLang."""
    name, said = _architecture(found), flatten(found)
    dialect = (said.get("quantization_config") or {}).get("quant_method", "none")
    dtype = said.get("dtype", said.get("torch_dtype")) if args.dtype == "auto" else args.dtype
    # float16 is what SGLang makes of float32, and where no dtype is named.
    half = dtype in ("float16", "half") or (args.dtype == "auto" and dtype in (None, "float32"))
    known = f"isn't among the models whose code was read: {', '.join(ARCHITECTURES)}"
    fall_back(
        [
            (name not in ARCHITECTURES, f"{name} {known}"),
            (args.quantization is not None, f"--quantization {args.quantization} makes the experts' format"),
            (dialect not in DIALECTS, f"experts in {dialect}: eprt reads {', '.join(DIALECTS)} here"),
            (half and dialect == "none", "experts in float16: eprt computes with --dtype bfloat16 or float32"),
        ]
    )
    device = torch.device(_device(args))
    if of_text := ARCHITECTURES[name]:  # a family's, which knows its modules without the prefix
        found = json.loads(json.dumps(said | of_text).replace("model.language_model.", "model."))
    try:
        family = family_for(found)
        for layer in family.moe_layers(found)[-1:]:
            moe = replace(family.moe_config(found, layer), routing=Routing(), shared=None)
            ordered = scheme_of(found, family.expert_modules(layer)).ordered
            uneven = f"{moe.num_experts} experts on {args.ep_size} ranks"
            fall_back(
                [
                    (moe.num_experts % args.ep_size != 0, uneven),
                    (moe.weight_format not in FORMATS, f"experts in {moe.weight_format}"),
                    (ordered, "INT4 with columns in activation order"),
                    (
                        dialect == COMPRESSED and moe.weight_format in ("nvfp4", "mxfp4"),
                        f"compressed-tensors' {moe.weight_format.upper()}",
                    ),
                ]
            )
            runtime = with_low_precision(moe, runtime_with(_invariant(args) | given, 1024), given)
            parallel = ParallelConfig(world_size=args.tp_size)
            choose(moe, parallel, runtime, Device.of(device), captured=device.type == "cuda", eager_flag=EAGER)
    except EprtError as error:
        raise FallsBackToEngine(str(error)) from error


def _architecture(config: dict[str, Any]) -> str:
    return next(iter(config.get("architectures") or ()), "no architecture")


def _model_config(args: Any, draft: str | None = None) -> dict[str, Any]:
    """Returns config.json of the model, or of its draft, with hf_quant_config.json and `--json-model-override-args`
    merged in. Raises FallsBackToEngine: it has none (a GGUF file, a bucket's address)."""
    from transformers.utils import cached_file

    absent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    model, revision = (draft, args.speculative_draft_model_revision) if draft else (args.model_path, args.revision)
    try:
        path: Any = cached_file(model, CONFIG, revision=revision)
        cached_file(model, QUANT_CONFIG, revision=revision, **absent)  # beside it
        return read_config(path) | json.loads(args.json_model_override_args)
    except (OSError, ValueError, CheckpointError) as error:
        raise FallsBackToEngine(f"{CONFIG} of {model} can't be read: {error}") from error


def moe_config(layer: Any, *, all_to_all: bool, routed: int | None = None) -> MoEConfig:
    """Translates a FusedMoE that was just made into eprt's config. Raises FallsBackToEngine.

    With an all-to-all the config is that of all ranks' experts, else of those that this rank has.

    Args:
        routed: K of the router that was made before it, for a layer that isn't told (OLMoE's, Hunyuan's).
    """
    config, method, top_k = layer.moe_runner_config, layer.quant_method, layer.top_k or routed or 0
    fall_back(
        [
            *on_input(config.apply_router_weight_on_input, top_k, method),
            (layer.num_fused_shared_experts > 0, "shared experts are fused: --disable-shared-experts-fusion"),
            (config.no_combine, "the model combines the experts' outputs itself"),
            (getattr(layer, "is_shared_fused_moe", False), "its experts are shared ones"),
            (getattr(method, "load_up_proj_weight_first", False), "rows of up are loaded before the gate's"),
            (all_to_all and layer.moe_tp_size > 1, f"each expert is cut in {layer.moe_tp_size}"),
            (all_to_all and layer.reduce_results, "SGLang adds up what the ranks' layers say"),
            (type(layer).__name__ != "FusedMoE", f"{type(layer).__name__} computes in a way of its own"),
            (
                not all_to_all and layer.moe_ep_size > 1 and layer.dispatcher.skip_local_expert_mapping,
                "its runner gets ids of all ranks' experts; --moe-runner-backend triton gets this rank's",
            ),
        ]
    )
    part = part_of(layer)
    found = layout_of(layer).weight_format(keeper_of(layer), part, layer.params_dtype)
    experts = layer.num_experts if all_to_all else layer.num_local_experts
    alternating = found == "fp8_block" and interleaved(config)
    fall_back(
        [
            (top_k == 0, "SGLang doesn't say how many experts a token visits"),
            (top_k > experts, f"top-{top_k} of {experts} experts on a rank"),
            (alternating, "FP8 blocks over rows that alternate gate, up"),
        ]
    )
    require_whole_scales(found, part, layer.moe_tp_size, layer.params_dtype)
    return MoEConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_size=layer.hidden_size,
        intermediate_size=part,
        activation=activation_of(config),
        bias=layer.with_bias,
        weight_format=found,
        weight_on_input=config.apply_router_weight_on_input,
    )


def runtime_config(args: Any, given: dict[str, Any], *, all_to_all: bool) -> RuntimeConfig:
    """Returns settings with the largest batch of a rank as capacity, the rest from the options. Raises ConfigError.

    Without an all-to-all SGLang gathers the tokens of all data-parallel ranks in front of the experts. Under its switch
    for deterministic inference the layers are batch-invariant, too.
    """
    chunk = args.chunked_prefill_size or 0
    prefill = chunk if chunk > 0 else args.max_prefill_tokens
    sequences = max(args.max_running_requests or 0, *(phase.max_bs or 0 for phase in _captured(args, "decode")), 0)
    drafted = max(args.speculative_num_draft_tokens or 1, args.speculative_eagle_topk or 1)
    most = max(
        prefill,
        sequences * drafted,  # one step verifies, or drafts, all of them
        *(phase.max_bs or 0 for phase in _captured(args, "prefill")),
    )
    gathered = 1 if all_to_all else attention_dp(args)
    return runtime_with(_invariant(args) | given, most * gathered)


def _invariant(args: Any) -> dict[str, Any]:
    return {"batch_invariant": True} if getattr(args, "enable_deterministic_inference", False) else {}


def captures_graphs(args: Any) -> bool:
    """Returns whether SGLang may capture this model's layers in CUDA graphs."""
    return args.device == "cuda" and not args.disable_cuda_graph and bool(_captured(args, "prefill", "decode"))

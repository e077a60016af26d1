"""What the vLLM plugin leaves to vLLM, and asks of it; no vLLM needed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases.vllm_layouts import named
from support.stand_ins import vllm as stand_in
from support.stand_ins.vllm import host

from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig, WeightFormat
from eprt.errors import ConfigError
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.integrations.engine.settings import choose, with_low_precision
from eprt.integrations.vllm import TESTED, check_version
from eprt.integrations.vllm.method import EprtMoEMethod, Kernel, tokens_per_rank
from eprt.integrations.vllm.routing import padding_of
from eprt.integrations.vllm.supported import (
    captures_graphs,
    gathered_ranks,
    moe_config,
    require_lost_in_sleep,
    require_supported,
    runtime_config,
)
from eprt.support import Device


@pytest.mark.parametrize("version", [*TESTED, f"{TESTED[0]}+cpu", "0.26.1", "0.29.0", "0.33.2"])
def test_versions_that_fit(version: str) -> None:
    warning = f"vLLM {version}: tested with 0.26.0 and 0.32.0 and 0.33.0"
    assert check_version(version) == ("" if version.partition("+")[0] in TESTED else warning)


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0", "0.1.dev1"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.26 to below 0\.34"):
        check_version(version)


def lora(*targets: str) -> dict[str, Any]:
    return {"lora_config": SimpleNamespace(target_modules=list(targets) or None)}


def offload(gigabytes: float = 0.0, group: int = 0) -> dict[str, Any]:
    sizes = {"uva": SimpleNamespace(cpu_offload_gb=gigabytes), "prefetch": SimpleNamespace(offload_group_size=group)}
    return {"offload_config": SimpleNamespace(**sizes)}


def nixl(ranks: int) -> dict[str, Any]:
    return {"parallel_config__all2all_backend": "nixl_ep", "parallel_config__data_parallel_size": ranks}


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({}, "cuda"),
        ({"model_config__enforce_eager": True}, "cpu"),
        (lora("q_proj", "v_proj"), "cuda"),  # of attention alone
        (lora("qkv_proj", "o_proj"), "cuda"),
        (offload(), "cuda"),
        ({"kernel_config": SimpleNamespace(moe_backend="auto")}, "cuda"),
        (nixl(ranks=1), "cuda"),
    ],
)
def test_a_plain_host_is_welcome(changes: dict[str, Any], device: str) -> None:
    require_supported(host(**changes), device)


TARGETS = "--enable-lora: .*--lora-target-modules that names projections of attention alone"


@pytest.mark.parametrize(
    ("changes", "device", "flag"),
    [
        ({"parallel_config__enable_eplb": True}, "cuda", "--enable-eplb"),
        ({"parallel_config__use_ubatching": True}, "cuda", "--enable-dbo"),
        ({"load_config__load_format": "ipc_cache"}, "cuda", "--load-format ipc_cache"),
        ({"kernel_config": SimpleNamespace(moe_backend="marlin")}, "cuda", "--moe-backend marlin"),
        ({"parallel_config__enable_elastic_ep": True}, "cuda", "--enable-elastic-ep"),
        ({"parallel_config__enable_fault_tolerance": True}, "cuda", "--enable-fault-tolerance"),  # since 0.32
        (nixl(ranks=2), "cuda", "--all2all-backend nixl_ep"),
        ({"additional_config": {"decode_backend": "latency_specialized"}}, "cuda", "decode_backend"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "cuda", "--prefill-context-parallel-size"),
        *(({"lora_config": object()} | given, "cuda", TARGETS) for given in ({}, lora(), lora("experts"))),
        (lora("q_proj", "gate_proj"), "cuda", TARGETS),
        *((offload(**size), "cuda", "--cpu-offload-gb") for size in ({"gigabytes": 4.0}, {"group": 8})),
        ({}, "cpu", "--enforce-eager"),
        ({}, "xpu", "xpu"),
    ],
)
def test_flags_under_which_vllm_keeps_every_layer(changes: dict[str, Any], device: str, flag: str) -> None:
    with pytest.raises(FallsBackToEngine, match=flag):
        require_supported(host(**changes), device)


@pytest.mark.parametrize(
    ("module", "owned"),
    [
        ("vllm.models.muse_spark.nvidia.muse_moe_runner", True),
        ("vllm.models.kimi_k3.nvidia.latent_moe_runner", True),
        ("vllm.models.kimi_k3.amd.latent_moe_runner", False),
        ("vllm.models.flint.ops.moe", True),  # 0.33: it reads w13_weight as FlashInfer's kernel has it
        ("vllm.models.flint.ops.linear", False),
        ("vllm.model_executor.layers.fused_moe.runner.moe_runner", False),
    ],
)
def test_models_with_a_runner_of_their_own_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, module: str, owned: bool
) -> None:
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    left = pytest.raises(FallsBackToEngine, match=module.replace(".", r"\.")) if owned else nullcontext()
    with left:
        require_supported(host(), "cuda")


@pytest.mark.parametrize("use_ep", [False, True])
def test_a_model_that_asks_for_partial_sums_once_its_layer_is_made_is_left(
    monkeypatch: pytest.MonkeyPatch, use_ep: bool
) -> None:
    """`models/inkling/nvidia/moe.py`, since 0.26: the runner refuses a kernel that has summed already."""
    monkeypatch.setitem(sys.modules, "vllm.models.inkling.nvidia.moe", SimpleNamespace())
    layer = routed(moe__moe_parallel_config=SimpleNamespace(use_ep=use_ep, dp_size=1))
    with pytest.raises(FallsBackToEngine, match="partial outputs") if use_ep else nullcontext():
        moe_config(layer, named("GptOssMxfp4MoEMethod"))


@pytest.mark.parametrize(
    ("patterns", "draft", "left"),
    [([], False, False), (["*.engram.*"], False, False), (["*.experts.*"], False, True), (["draft.*"], False, False),
     (["draft.*"], True, True), (["draft.*norm*"], True, False)],
)  # fmt: skip
def test_experts_that_sleep_is_to_keep_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, patterns: list[str], draft: bool, left: bool
) -> None:
    """`v1/worker/gpu_worker.py` since 0.32 copies what its parameters hold, and back when it wakes up."""
    monkeypatch.setitem(sys.modules, "vllm.compilation.backends", SimpleNamespace(model_tag="eagle_head" * draft))
    given = host(model_config__sleep_preserve_parameter_names=patterns)
    with pytest.raises(FallsBackToEngine, match="--sleep-preserve-parameter-names") if left else nullcontext():
        require_lost_in_sleep("model.layers.3.mlp.experts", given)
    require_lost_in_sleep("model.layers.3.mlp.experts", host())  # 0.26 has no such names


def test_the_batch_invariant_switch_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (False, True):
        monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace(VLLM_BATCH_INVARIANT=value))
        assert runtime_config(host(), 1).batch_invariant is value
    said = host(additional_config={"eprt": {"batch_invariant": False}})
    assert runtime_config(said, 1).batch_invariant is False


def test_capacity_is_vllms_own_limit() -> None:
    assert runtime_config(host(), 1).max_tokens_per_rank == 8192
    # Each TP rank sends its part, the last one perhaps less.
    assert runtime_config(host(scheduler_config__max_num_batched_tokens=8190), 4).max_tokens_per_rank == 2048
    # A captured batch may be larger than a scheduled one.
    small = host(scheduler_config__max_num_batched_tokens=256)
    assert runtime_config(small, 1).max_tokens_per_rank == 512
    assert runtime_config(small, 1, gathered=3).max_tokens_per_rank == 1536


@pytest.mark.parametrize(("use_ep", "dp_size", "ranks"), [(True, 2, 1), (False, 1, 1), (False, 2, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_padding_is_unmarked_in_sequence_parallel_layers(
    monkeypatch: pytest.MonkeyPatch, use_ep: bool, dp_size: int, ranks: int, split: bool
) -> None:
    """vLLM's mask is of a rank's tokens before they are split, or of its part, as the model likes."""
    context = make_dataclass("ForwardContext", ["is_padding"])
    forward = SimpleNamespace(ForwardContext=context, get_forward_context=lambda: context(None))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", forward)
    parallel = SimpleNamespace(use_ep=use_ep, dp_size=dp_size)
    moe = SimpleNamespace(is_sequence_parallel=split, moe_parallel_config=parallel)
    assert gathered_ranks(moe) == ranks
    assert (padding_of(SimpleNamespace(moe=moe)) is None) == split


def test_options_are_runtime_configs_fields() -> None:
    given = host(additional_config={"eprt": {"dispatcher": "none", "validate": "full"}})
    found = runtime_config(given, 1)
    assert (found.dispatcher, found.validate, found.executor) == ("none", "full", "auto")
    assert runtime_config(host(additional_config={"eprt": {"placement": "FILE"}}), 1) == runtime_config(host(), 1)
    for wrong in ({"dispatch": "none"}, {"max_tokens_per_rank": 5}, "none"):
        with pytest.raises(ConfigError, match="expected placement, strict, eplb, or fields of RuntimeConfig"):
            runtime_config(host(additional_config={"eprt": wrong}), 1)
    with pytest.raises(ConfigError, match="'yes': expected true or false"):
        runtime_config(host(additional_config={"eprt": {"strict": "yes"}}), 1)


def test_graphs_are_captured_unless_vllm_says_eager() -> None:
    assert captures_graphs(host())
    assert not captures_graphs(host(model_config__enforce_eager=True))
    assert not captures_graphs(host(compilation_config__cudagraph_mode=SimpleNamespace(name="NONE")))


def routed(**changes: Any) -> SimpleNamespace:
    """A RoutedExperts of gpt-oss, as far as the plugin reads it; `moe__field` reaches its moe_config."""
    moe = stand_in.moe_config(128, 4, 2880, 2880, ranks=2)
    moe.has_bias = True
    layer = SimpleNamespace(
        moe_config=moe,
        layer_name="model.layers.0.mlp.experts",
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=0),
        expert_placement_strategy="linear",
        apply_router_weight_on_input=False,
        params_dtype=torch.bfloat16,
        activation=SimpleNamespace(value="swigluoai"),
    )
    for path, value in changes.items():
        where, _, field = path.rpartition("__")
        setattr(moe if where else layer, field, value)
    return layer


GPT_OSS = MoEConfig(128, 4, 2880, 2880, Activation(alpha=1.702, beta=1.0, limit=7.0), bias=True, weight_format="mxfp4")
TWO_RANKS, HOPPER = ParallelConfig(world_size=2), Device("cuda", 90)


def test_a_layers_maths() -> None:
    assert moe_config(routed(), named("GptOssMxfp4MoEMethod")) == GPT_OSS
    llama4 = routed(apply_router_weight_on_input=True, moe__experts_per_token=1)
    assert moe_config(llama4, named("GptOssMxfp4MoEMethod")) == replace(GPT_OSS, top_k=1, weight_on_input=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"moe__num_experts": 129, "moe__num_logical_experts": 129}, "129 experts don't divide by 2"),
        ({"moe__num_experts": 130}, "replicated"),
        ({"moe__num_experts": 126}, "constants stand for some"),
        ({"expert_placement_strategy": "round_robin"}, "round_robin"),
        ({"expert_map_manager": SimpleNamespace(num_fused_shared_experts=1)}, "fused"),
        ({"apply_router_weight_on_input": True}, "top_k 4: must be 1"),
        ({"moe__skip_final_all_reduce": True}, "partial outputs"),
        ({"layer_name": "model.layers.1.mlp.vision_experts"}, "only in steps in which they have an image"),
        ({"moe__in_dtype": torch.float64}, "float64"),
        ({"activation": SimpleNamespace(value="gelu")}, "gelu"),
    ],
)
def test_layers_that_are_left(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FallsBackToEngine, match=reason):
        moe_config(routed(**change), named("GptOssMxfp4MoEMethod"))


def test_scales_that_come_past_the_loaders_are_left() -> None:
    llama4 = routed(apply_router_weight_on_input=True, moe__experts_per_token=1)
    with pytest.raises(FallsBackToEngine, match="input of ModelOptFp8MoEMethod"):
        moe_config(llama4, named("ModelOptFp8MoEMethod"))


@pytest.mark.parametrize(("ranks", "part", "whole"), [(2, 1440, 1440), (4, 720, 736), (8, 360, 384)])
def test_parts_of_tensor_parallelism_keep_scales_whole(ranks: int, part: int, whole: int) -> None:
    """2880 rows: halves hold 45 scales of 32, eighths 11 and a quarter; gpt-oss's loader brings 12, and 6 at last."""
    cut = {"moe__tp_size": ranks, "moe__ep_size": 1, "moe__intermediate_size_per_partition": part}
    layer = routed(**cut, moe__moe_parallel_config=SimpleNamespace(use_ep=False), moe__skip_final_all_reduce=True)
    assert moe_config(layer, named("GptOssMxfp4MoEMethod")).intermediate_size == whole
    if part != whole:
        with pytest.raises(FallsBackToEngine, match=rf"parallelism {ranks} leaves {part} .* a scale of 32 \(mxfp4\)"):
            moe_config(layer, named("Mxfp4MoEMethod"))


def test_packed_experts_that_vllm_quantises_anew_are_left() -> None:
    """`online/requantization.py` of vLLM 0.33: the parameters are those of the checkpoint's method."""
    method = named("Fp8PerBlockOnlineMoEMethod", requantization_source=named("ModelOptNvFp4FusedMoE"))
    with pytest.raises(FallsBackToEngine, match="kept by ModelOptNvFp4FusedMoE and quantised anew"):
        moe_config(routed(), method)


def test_fp8_blocks_over_alternating_rows_are_left() -> None:
    with pytest.raises(FallsBackToEngine, match="alternate"):
        moe_config(routed(), named("Fp8MoEMethod", weight_block_size=[128, 128]))


def test_parameters_that_another_package_declares_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL's FP8 ends the engine at its start where no kernel was chosen."""

    def create_weights(*_: Any) -> None:
        raise AssertionError

    create_weights.__module__ = "roll.third_party.vllm.fp8"
    method = named("GptOssMxfp4MoEMethod")
    monkeypatch.setattr(type(method), "create_weights", create_weights, raising=False)
    with pytest.raises(FallsBackToEngine, match=r"roll\.third_party\.vllm\.fp8 has replaced what declares"):
        moe_config(routed(), method)


def test_the_plan_is_pinned() -> None:
    plan, runtime = choose(GPT_OSS, TWO_RANKS, RuntimeConfig(), HOPPER, captured=True)
    assert (runtime.dispatcher, runtime.executor) == (plan.dispatcher, plan.executor)
    assert plan.executor == "triton_grouped"


def test_under_graph_capture_only_what_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2048 tokens of 16 ranks over hosts: DeepEP can't hold them at once, NVLink doesn't reach. Between the two that are
    # left preference decides, as where nothing is known of their time.
    monkeypatch.setattr("eprt.plan.dispatch_estimate", lambda *_: None)
    runtime = RuntimeConfig(max_tokens_per_rank=2048, strict_capacity=True)
    where = ParallelConfig(world_size=16, ranks_per_host=8), runtime, Device("cuda", 80)
    eager, _ = choose(GPT_OSS, *where, captured=False)
    captured, _ = choose(GPT_OSS, *where, captured=True)
    assert (eager.dispatcher, captured.dispatcher) == ("torch", "none")
    assert eager.executor == captured.executor
    with pytest.raises(FallsBackToEngine, match=r"graphs \(dispatcher torch reads sizes on the host.* --enforce-eager"):
        choose(GPT_OSS, TWO_RANKS, RuntimeConfig(dispatcher="torch"), HOPPER, captured=True)


def test_experts_that_would_be_decoded_are_left_on_gpus() -> None:
    blackwell = Device("cuda", 100)
    with pytest.raises(FallsBackToEngine, match=r"decode its mxfp4 experts to bf16 \(.*humming: needs sm80 to sm99"):
        choose(GPT_OSS, TWO_RANKS, RuntimeConfig(), blackwell, captured=True)
    plan, _ = choose(GPT_OSS, TWO_RANKS, RuntimeConfig(executor="torch_grouped"), blackwell, captured=True)
    assert plan.executor == "torch_grouped"  # asked for by name


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel", "fp8_tensor"])
def test_fp8_meets_fp8_activations_as_in_vllm(weight_format: WeightFormat) -> None:
    deepseek_v3 = MoEConfig(256, 8, 7168, 2048, weight_format=weight_format)
    runtime = with_low_precision(deepseek_v3, RuntimeConfig(), {})
    plan, pinned = choose(deepseek_v3, TWO_RANKS, runtime, HOPPER, captured=True)
    assert (plan.executor, pinned.low_precision_activations) == ("triton_grouped", True)
    for said in (False, True):
        options = {"low_precision_activations": said}
        assert with_low_precision(deepseek_v3, RuntimeConfig(**options), options) == RuntimeConfig(**options)
    assert with_low_precision(GPT_OSS, RuntimeConfig(), {}) == RuntimeConfig()


def test_no_pair_at_all_is_left_with_the_table() -> None:
    with pytest.raises(FallsBackToEngine, match="symm: runs on cuda"):
        choose(GPT_OSS, TWO_RANKS, RuntimeConfig(dispatcher="symm"), Device("cpu"), captured=False)


def metadata(*tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens, dtype=torch.int32))


def test_tokens_per_rank_comes_from_vllm() -> None:
    assert tokens_per_rank(metadata(3, 17), 3, 1) == 17
    assert tokens_per_rank(metadata(0, 0), 0, 1) == 1  # R is at least 1
    assert tokens_per_rank(metadata(3, 17), 2, 4) == 5  # sequence parallel: each TP rank has its chunk
    assert tokens_per_rank(None, 9, 1) == 9  # no data parallelism: TP ranks hold the same tokens


def test_what_vllms_runner_asks_of_a_kernel() -> None:
    assert not Kernel(reduces=False).output_is_reduced()
    kernel = Kernel(reduces=True)
    assert kernel.output_is_reduced()
    assert not kernel.is_monolithic
    assert not kernel.fused_experts.consumes_expert_mask
    assert kernel.prepare_finalize.topk_indices_dtype() == EprtMoEMethod.topk_indices_dtype == torch.int32

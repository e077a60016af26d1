"""What the SGLang plugin leaves to SGLang, asks of it, and reads from it; no SGLang needed."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.builders import distinct_experts
from support.cases.packed_int4 import QUANT
from support.cases.vllm_layouts import named
from support.stand_ins.sglang import GPT_OSS, FusedMoE, TopK, arguments, fused_moe, runner_config

from eprt.bench.experts import random_experts
from eprt.config import Activation, MoEConfig, RuntimeConfig
from eprt.conformance.oracle import layer_of
from eprt.errors import ConfigError, UsageError
from eprt.experts.in_place import leaves
from eprt.integrations.engine.bound import ids_of
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.integrations.engine.ranks import world_alone
from eprt.integrations.engine.sleeping import address, addresses
from eprt.integrations.sglang import TESTED, asked_for, check_version, hooks, routing, supported
from eprt.integrations.sglang.method import EprtFusedMoEMethod, output_scale
from eprt.integrations.sglang.parameters import activation_of
from eprt.integrations.sglang.state import SglangState, name_of
from eprt.models.published import MODELS
from eprt.support import Device
from eprt.tokens import TopK as Chosen


@pytest.mark.parametrize("version", [*TESTED, "0.5.18", "0.5.22.post1"])
def test_versions_whose_hooks_were_read(version: str) -> None:
    warning = f"SGLang {version}: tested with 0.5.17 and 0.5.23"
    assert check_version(version) == ("" if version in TESTED else warning)


@pytest.mark.parametrize("version", ["0.5.16.post3", "0.5.24", "0.6.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.17 to below 0\.5\.24"):
        check_version(version)


@pytest.mark.parametrize(
    ("named_plugins", "options", "acts"),
    [(None, None, False), ("other", None, False), ("cpu, eprt", None, True), (None, '{"strict": true}', True)],
)
def test_an_installed_plugin_acts_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, named_plugins: str | None, options: str | None, acts: bool
) -> None:
    for name, value in (("SGLANG_PLUGINS", named_plugins), ("EPRT_SGLANG", options)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert asked_for() is acts


def test_options_are_runtime_configs_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPRT_SGLANG", '{"dispatcher": "none", "all_to_all": false, "strict": true}')
    found = supported.runtime_config(arguments(), supported.options(), all_to_all=True)
    assert (found.dispatcher, found.max_tokens_per_rank) == ("none", 4096)
    for text, message in (
        ("{", "is no JSON"),
        ("[]", "expected placement, strict, all_to_all, or fields of RuntimeConfig"),
        ('{"dispatch": "none"}', "'dispatch'"),
        ('{"all_to_all": 1}', "expected true or false"),
    ):
        monkeypatch.setenv("EPRT_SGLANG", text)
        with pytest.raises(ConfigError, match=message):
            supported.options()


@pytest.mark.parametrize(("given", "invariant"), [({}, True), ({"batch_invariant": False}, False)])
def test_deterministic_inference_is_batch_invariant(given: dict[str, Any], invariant: bool) -> None:
    args = arguments(enable_deterministic_inference=True)
    assert supported.runtime_config(args, given, all_to_all=True).batch_invariant is invariant
    assert not supported.runtime_config(arguments(), {}, all_to_all=True).batch_invariant


def test_capacity_is_the_largest_batch_of_a_rank() -> None:
    def most(all_to_all: bool, **changes: Any) -> int:
        return supported.runtime_config(arguments(**changes), {}, all_to_all=all_to_all).max_tokens_per_rank

    assert most(True) == 4096
    assert most(False) == 8192  # SGLang has gathered both ranks' tokens by then
    assert most(True, chunked_prefill_size=-1) == 16384
    assert most(True, chunked_prefill_size=256) == 512  # a captured batch may be larger
    assert most(True, chunked_prefill_size=256, max_running_requests=600) == 600
    captured = SimpleNamespace(prefill=SimpleNamespace(backend="breakable", max_bs=1024))
    assert most(True, chunked_prefill_size=256, cuda_graph_config=captured) == 1024
    verified: dict[str, Any] = {"chunked_prefill_size": 256, "speculative_num_draft_tokens": 4}
    assert most(True, **verified) == 2048  # of 512 sequences in the largest captured batch
    assert most(True, **verified, speculative_eagle_topk=8) == 4096  # a draft's step is wider than the verified one
    assert most(True, **verified, cuda_graph_config=captured, max_running_requests=300) == 1200


ALONE: dict[str, Any] = {
    "tp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "enable_dp_attention": False,
    "cuda_graph_config": None,
}
FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"device": "xpu"}, "xpu"),
    ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend deepep"),
    ({"moe_runner_backend": "marlin"}, "--moe-runner-backend marlin .*; triton, .*, leaves them to eprt"),
    ({"enable_eplb": True}, "--enable-eplb"),
    ({"init_expert_location": "file.json"}, "--init-expert-location"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap"),
    ({"enable_lora": True}, "--enable-lora: .*--lora-target-modules"),
    ({"lora_paths": ["folder"]}, "--enable-lora"),  # which may adapt anything
    ({"enable_lora": True, "lora_target_modules": {"q_proj", "gate_up_proj", "down_proj"}}, "--enable-lora"),
    ({"enable_lora": True, "lora_target_modules": ["all"]}, "--enable-lora"),
    ({"elastic_ep_backend": "nixl"}, "--elastic-ep-backend"),
    ({"attn_cp_size": 2}, "context parallelism"),
    ({"dwdp_size": 2}, "--dwdp-size"),
    ({"kt_weight_path": "folder"}, "--kt-weight-path"),
    ({"cpu_offload_gb": 4}, "--cpu-offload-gb"),
    ({"offload_group_size": 4}, "--offload-group-size"),
    ({"enable_pdmux": True}, "--enable-pdmux"),
    ({"load_format": "presharded"}, "--load-format presharded"),
    ({"load_format": "flash_rl"}, "--load-format flash_rl"),
    ({"speculative_draft_load_format": "sharded_state"}, "--speculative-draft-load-format sharded_state"),
    (
        {"remote_instance_weight_loader_start_seed_via_transfer_engine": True},
        "--remote-instance-weight-loader-start-seed-via-transfer-engine",
    ),
    ({"modelopt_quant": "fp8"}, "--modelopt-quant"),
    ({"weight_cache_mode": "client"}, "--weight-cache-mode client"),
    ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode overlap"),
    ({"enable_torch_compile": True}, "--enable-torch-compile"),
    ({"cuda_graph_backend_prefill": "tc_piecewise"}, "tc_piecewise compiles the experts' call"),
    ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))}, "tc_piecewise compiles"),
]


@pytest.mark.parametrize(("change", "flag"), FLAGS)
def test_flags_under_which_sglang_keeps_every_layer(change: dict[str, Any], flag: str) -> None:
    supported.require_supported(arguments())
    supported.require_supported(arguments(pp_size=2))
    supported.require_supported(arguments(enable_lora=True, lora_target_modules=["q_proj", "o_proj"]))
    with pytest.raises(FallsBackToEngine, match=flag):
        supported.require_supported(arguments(**change))


@pytest.fixture
def qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Qwen3-30B-A3B's config.json, on a machine of H100s."""
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, _: Device("cuda", 90)))
    more = {"architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-30B-A3B"] | more))
    return tmp_path


@pytest.mark.parametrize("quant", [None, QUANT["pack_quantized"], QUANT["float_channel"]])
@pytest.mark.parametrize("newer", [{}, {"enable_dp_attention": False, "dp_size": 1, "attn_dp_size": 2}])
def test_eprt_carries_tokens_where_each_rank_has_its_own(
    qwen3: Path, newer: dict[str, Any], quant: dict[str, Any] | None
) -> None:
    """SGLang 0.5.23 has a size of its own for data-parallel attention."""
    config = json.loads((qwen3 / "config.json").read_text()) | {"quantization_config": quant}
    (qwen3 / "config.json").write_text(json.dumps(config))
    args = arguments(model_path=str(qwen3), **newer)
    assert supported.all_to_all_reason(args, {}) == ""
    assert supported.runtime_config(args, {}, all_to_all=False).max_tokens_per_rank == 8192


MORE = ("enable_eplb", "attn_dp_size", "enable_multi_layer_eagle")  # arguments that the stand-in lacks
DRAFT = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": "draft"}


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        ({}, {"all_to_all": False}, "all_to_all: false"),
        ({"pp_size": 2}, {}, "--pp-size"),
        ({"speculative_algorithm": "NGRAM"}, {}, "--speculative-algorithm NGRAM"),
        ({"speculative_algorithm": "NEXTN"}, {}, "NEXTN, Qwen3MoeForCausalLM, isn't among those"),
        (DRAFT | {"speculative_moe_a2a_backend": "none"}, {}, "--speculative-moe-a2a-backend none"),
        (DRAFT | {"speculative_moe_runner_backend": "deep_gemm"}, {}, "--speculative-moe-runner-backend deep_gemm"),
        (DRAFT | {"speculative_draft_model_path": "s3://bucket/draft"}, {}, "config.json of s3://bucket/draft can't"),
        (DRAFT | {"speculative_draft_model_quantization": "awq"}, {}, "--speculative-draft-model-quantization awq"),
        (DRAFT | {"enable_multi_layer_eagle": True}, {}, "--enable-multi-layer-eagle"),
        ({"model_impl": "transformers"}, {}, "--model-impl transformers"),
        ({"json_model_override_args": '{"architectures": ["Other"]}'}, {}, "Other isn't among the models"),
        ({"json_model_override_args": "{"}, {}, "can't be read"),
        ({"enable_dp_attention": False}, {}, "--enable-dp-attention"),
        ({"enable_dp_attention": False, "attn_dp_size": 4}, {}, "--dp-size 4 isn't --tp-size 2"),
        ({"tp_size": 4, "ep_size": 4}, {}, "--dp-size 2 isn't --tp-size 4"),
        ({"ep_size": 1}, {}, "--ep-size 1 isn't --tp-size 2"),
        ({"enable_eplb": True}, {}, "--enable-eplb"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, {}, "DeepseekV4ForCausalLM isn't among the models"),
        ({"num_experts": 127}, {}, "127 experts on 2 ranks"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, "experts in awq"),
        ({"quantization_config": QUANT["pack_quantized_act_order"]}, {}, "activation order"),
        ({"quantization_config": QUANT["nvfp4_packed"]}, {}, "compressed-tensors' NVFP4"),
        ({"quantization_config": QUANT["mxfp4_packed"]}, {}, "compressed-tensors' MXFP4"),
        ({"quantization": "fp8"}, {}, "--quantization fp8"),
        ({"dtype": "half"}, {}, "float16"),
        ({"torch_dtype": "float32"}, {}, "float16"),  # which SGLang makes of it
        ({"torch_dtype": None}, {}, "float16"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}, {}, "experts in mxfp8"),
        ({"model_path": "s3://bucket/model"}, {}, "config.json of s3://bucket/model can't be read"),
        ({}, {"dispatcher": "deepep", "executor": "humming"}, "deepep"),
    ],
)
def test_sglang_carries_them_otherwise(qwen3: Path, change: dict[str, Any], given: dict[str, Any], reason: str) -> None:
    config = json.loads((qwen3 / "config.json").read_text())
    flags = {name: value for name, value in change.items() if hasattr(arguments(), name) or name in MORE}
    config |= {name: value for name, value in change.items() if name not in flags}
    (qwen3 / "config.json").write_text(json.dumps(config))
    assert reason in supported.all_to_all_reason(arguments(**{"model_path": str(qwen3)} | flags), given)


def loading(*architectures: str, draft: bool = False) -> Any:
    """The ModelRunner of a model that is about to be made."""
    return Mock(model_config=Mock(hf_config=Mock(architectures=list(architectures))), is_draft_worker=draft)


def test_a_placement_file_is_not_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives a draft's layers other numbers, or none; the model itself may be dense."""
    monkeypatch.setenv(supported.VARIABLE, '{"placement": "file.json", "strict": true}')
    state = SglangState()
    hooks._loading(state, loading("Qwen3ForCausalLM"))
    assert state.options() == {"placement": "file.json", "strict": True}
    hooks._loading(state, loading("Glm4MoeForCausalLMNextN", draft=True))
    assert state.options() == {"strict": True}


def test_a_report_of_a_drafts_layers_has_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eprt.integrations.engine.state.describe", lambda some, total, **_: f"{len(some)} of {total}")
    state = SglangState()
    for layers, left, said in ((3, 1, ["3 of 4", "1 of 4"]), (1, 0, ["1 of 1"])):
        state.bindings += [Mock(config="same", runtime="same")] * layers
        state.fallbacks.setdefault("a reason", []).extend(["a layer"] * left)
        state.spent["to build"] += layers
        caplog.clear()
        with caplog.at_level(logging.INFO):
            state.report()
        lines = [record.getMessage().removeprefix("eprt: ") for record in caplog.records]
        assert [line.partition(" MoE")[0] for line in lines] == [*said, f"ready after {layers}.0 s to build"]


BEHIND = {  # GLM-4.5-Air's last layer is 45
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.46.mlp.experts": {"quant_algo": "MXFP8"}},
}


@pytest.mark.parametrize(
    ("model", "architecture", "more", "reason"),
    [
        ("GLM-4.5-Air", "Glm4MoeForCausalLM", {}, ""),
        ("DeepSeek-V3", "DeepseekV3ForCausalLM", {}, ""),
        (
            "GLM-4.5-Air",
            "Glm4MoeForCausalLM",
            {"quantization_config": {"quant_method": "modelopt", **BEHIND}},
            "experts in mxfp8",
        ),
        ("Qwen3-Next-80B-A3B-Instruct", "Qwen3NextForCausalLM", {}, "EAGLE, Qwen3NextForCausalLM, isn't among those"),
    ],
)
def test_models_that_draft_tokens_themselves(
    qwen3: Path, model: str, architecture: str, more: dict[str, Any], reason: str
) -> None:
    config = MODELS[model] | {"architectures": [architecture], "torch_dtype": "bfloat16"} | more
    (qwen3 / "config.json").write_text(json.dumps(config))
    without, drafting = arguments(model_path=str(qwen3)), {"speculative_algorithm": "EAGLE"}
    assert supported.all_to_all_reason(without, {}) == ""
    for path in (None, str(qwen3)):
        args = arguments(model_path=str(qwen3), speculative_draft_model_path=path, **drafting)
        found = supported.all_to_all_reason(args, {})
        assert reason in found
        assert bool(reason) == bool(found)
        args.speculative_algorithm = "EAGLE3"  # whose draft has all experts on each rank
        assert "isn't among those" in supported.all_to_all_reason(args, {})


@pytest.mark.parametrize(
    ("architectures", "reason"),
    [
        (["LlamaForCausalLMEagle3"], ""),
        (["Qwen3MoeForCausalLM"], "Qwen3MoeForCausalLM, isn't among those whose code was read"),
        (None, "no architecture, isn't among those whose code was read"),
    ],
)
def test_drafts_beside_a_model(qwen3: Path, tmp_path: Path, architectures: list[str] | None, reason: str) -> None:
    """A dense one has no experts whose tokens would be carried."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"architectures": architectures}))
    args = arguments(model_path=str(qwen3), **DRAFT | {"speculative_draft_model_path": str(tmp_path / "draft")})
    found = supported.all_to_all_reason(args, {})
    assert found.endswith(reason)
    assert bool(found) == bool(reason)


def test_a_file_of_its_own_for_quantisation_is_read(qwen3: Path) -> None:
    (qwen3 / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8"}}')
    assert supported.all_to_all_reason(arguments(model_path=str(qwen3)), {}) == "experts in mxfp8"


@pytest.mark.parametrize(
    ("architecture", "model_type", "text"),
    [
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", MODELS["Qwen3.5-397B-A17B"]["text_config"]),
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", MODELS["Qwen3-30B-A3B"]),
        ("Glm4vMoeForConditionalGeneration", "glm4v_moe", MODELS["GLM-4.5-Air"]),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "algorithm", "reason"),
    [("bfloat16", "FP8", ""), ("float32", None, "experts in float16"), ("bfloat16", "MXFP8", "experts in mxfp8")],
)
def test_models_with_images_nest_the_text_models_config(
    qwen3: Path, architecture: str, model_type: str, text: dict[str, Any], dtype: str, algorithm: Any, reason: str
) -> None:
    """Its dtype, too; quantised modules have names with a prefix."""
    last = f"model.language_model.layers.{text['num_hidden_layers'] - 1}.mlp.experts"
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {last: {"quant_algo": algorithm}}}
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text | {"dtype": dtype}}
    config |= {"quantization_config": {"quant_method": "modelopt", **mixed}} if algorithm else {}
    (qwen3 / "config.json").write_text(json.dumps(config))
    found = supported.all_to_all_reason(arguments(model_path=str(qwen3)), {})
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(("algorithm", "reason"), [("fp8", ""), ("awq", "experts in awq")])
def test_mimo_v2_lists_its_layers_and_has_no_factor(qwen3: Path, algorithm: str, reason: str) -> None:
    config = MODELS["GLM-4.5"] | {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"}
    config |= {"moe_layer_freq": [0] + [1] * (config["num_hidden_layers"] - 1), "first_k_dense_replace": None}
    config |= {"routed_scaling_factor": None, "n_shared_experts": None, "scoring_func": "sigmoid"}
    config |= {"quantization_config": {"quant_method": algorithm, "weight_block_size": [128, 128], "bits": 4}}
    (qwen3 / "config.json").write_text(json.dumps(config))
    found = supported.all_to_all_reason(arguments(model_path=str(qwen3)), {})
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_gpt_oss_names_no_dtype(qwen3: Path) -> None:
    """SGLang takes bfloat16 around MXFP4."""
    (qwen3 / "config.json").write_text(json.dumps(MODELS["gpt-oss-20b"]))
    assert supported.all_to_all_reason(arguments(model_path=str(qwen3)), {}) == ""


def test_arguments_say_who_carries_the_tokens(qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def original(args: Any) -> None:
        seen.append(args.moe_a2a_backend)

    ours, theirs = arguments(model_path=str(qwen3)), arguments(model_path=str(qwen3), enable_eplb=True)
    hooks._arguments_made(SglangState(), original, ours)
    with caplog.at_level(logging.WARNING):
        hooks._arguments_made(SglangState(), original, theirs)
    hooks._arguments_made(SglangState(), original, ours)  # copied arguments are looked at again
    done = arguments(model_path=str(qwen3), _resolution_finished=True)  # SGLang 0.5.23 lets nobody write into these
    hooks._arguments_made(SglangState(), original, done)
    assert seen == ["customized", "none", "customized", "none"]
    assert ours.disable_shared_experts_fusion
    assert not theirs.disable_shared_experts_fusion
    assert "eprt: SGLang carries the tokens between ranks: --enable-eplb" in caplog.text


def test_updates_of_weights_that_eprt_cannot_take_are_refused() -> None:
    state = SglangState()
    state.bindings.append(Mock(placement=None))
    assert hooks._update_refused(state, lambda: "SGLang's own reason") == "SGLang's own reason"
    state.bindings.append(Mock())
    assert "its 'placement' says" in str(hooks._update_refused(state, lambda: None))


@pytest.mark.parametrize("way", [None, "flattened_bucket", "direct", "verl.workers.delta_loader.apply_delta"])
def test_loaders_that_may_add_to_parameters_are_refused(way: str | None) -> None:
    state, taken = SglangState(), Mock(return_value=(True, "Success"))
    assert hooks._from_tensors(state, taken, None, [], way) == (True, "Success")
    state.bindings.append(Mock(placement=None))
    success, said = hooks._from_tensors(state, taken, None, [], way)
    assert success == (way in (None, "flattened_bucket"))
    assert success or f"load_format '{way}' would write into parameters" in said


def test_new_weights_that_came_in_part_wait(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang may serve between two pieces of an update: the first reason is said once, and what is whole comes in."""
    state = SglangState()
    whole, part, other = Mock(lacking=""), Mock(lacking="layer 1 lacks w3"), Mock(lacking="layer 2 lacks w2")
    state.unfinished = [whole, part, other]
    with caplog.at_level(logging.WARNING, logger="sglang.eprt"):
        hooks._before_forward(state)
        hooks._before_forward(state)
    assert whole.finish.called
    for bound in (whole, part):
        layer = fused_moe(named("UnquantizedFusedMoEMethod"), runner_config())
        EprtFusedMoEMethod.process_weights_after_loading(Mock(eprt=bound), layer)
    assert whole.load.called
    assert not part.finish.called
    assert not part.load.called
    assert [record.getMessage() for record in caplog.records] == [
        "eprt: old weights serve until the rest of the new ones comes: layer 1 lacks w3"
    ]


@pytest.mark.parametrize(
    ("backup", "tags", "counted"),
    [(False, None, 6), (False, ["kv_cache", "weights"], 6), (False, ["kv_cache"], 0), (True, None, 0)],
)
def test_what_released_memory_held_comes_back(
    backup: bool, tags: list[str] | None, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a layer had when it was loaded is overwritten; counters are as they were, unless SGLang itself keeps
    them, or the weights' memory."""
    args = arguments(enable_memory_saver=True, enable_weights_cpu_backup=backup)
    monkeypatch.setattr("eprt.integrations.sglang.state._arguments", lambda: args)
    config, state = MoEConfig(8, 2, 32, 64), SglangState()
    monkeypatch.setattr(state, "reports", lambda: False)
    with world_alone(torch.device("cpu")) as world:
        layer = layer_of(
            world,
            config,
            random_experts(config, 8, world.device),
            RuntimeConfig(max_tokens_per_rank=16, count_load=True),
        )
        state.worlds["local"], state.built, state.cold = world, [layer], [layer]
        held = addresses([layer])
        hooks._loaded(state, None, SimpleNamespace(model=torch.nn.Module()))
        layer(torch.randn(3, 32), Chosen(distinct_experts(3, 8, 2, torch.Generator()), torch.ones(3, 2)))

        def taken(manager: Any, request: Any) -> None:
            for tensor in leaves(layer).values():
                if isinstance(tensor, torch.Tensor) and address(tensor) in held:
                    tensor.zero_()

        request = SimpleNamespace(tags=tags)
        hooks._released(state, taken, None, request)
        hooks._resumed(state, lambda manager, request: None, None, request)
        assert int(layer.load().sum()) == counted


def test_sglangs_checker_of_weights_sees_the_experts() -> None:
    """And what came last, which still lies in SGLang's parameters."""
    state, down = SglangState(), torch.ones(2, 3)
    experts, layer = torch.nn.Module(), Mock()
    layer.executor.slot_tensors.return_value = {"down": down}
    experts.quant_method = SimpleNamespace(eprt=SimpleNamespace(binding=SimpleNamespace(name="layers.0"), layer=layer))
    state.built = [layer, Mock()]  # the other is a draft's, which has a checker of its own
    state.unfinished = [Mock(lacking="", finish=Mock(side_effect=lambda: down.mul_(2)))]
    own = {"norm": torch.ones(4), "w2_weight": torch.empty(0)}  # the latter is freed
    checker = SimpleNamespace(_get_model=lambda: torch.nn.ModuleList([experts]))
    found = dict(hooks._checked(state, lambda _: own.items(), checker))
    assert found.keys() == {"norm", "layers.0.down"}
    assert found["layers.0.down"] is down
    assert bool((down == 2).all())


@pytest.mark.parametrize("flags", [{}, {"enable_eplb": True}])
def test_shared_experts_are_not_fused_where_eprt_runs_layers(flags: dict[str, Any]) -> None:
    one = arguments(**ALONE, **flags)
    hooks._arguments_made(SglangState(), lambda args: None, one)
    assert one.disable_shared_experts_fusion is ("enable_eplb" not in flags)
    assert one.moe_a2a_backend == "none"


@pytest.mark.parametrize(
    ("flags", "default", "resolved"),
    [
        ({}, "breakable", "breakable"),
        ({}, "tc_piecewise", "disabled"),  # Kimi-K2.5 in 0.5.17
        ({"cuda_graph_backend_prefill": "tc_piecewise"}, "tc_piecewise", "tc_piecewise"),  # the layers will say so
    ],
)
def test_graphs_of_prefill_are_sglangs_default_unless_they_are_compiled(
    flags: dict[str, Any], default: str, resolved: str
) -> None:
    def resolve(args: Any) -> None:
        args.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend=default, max_bs=4096))

    one = arguments(**ALONE, **flags)
    hooks._arguments_made(SglangState(), resolve, one)
    assert one.cuda_graph_config.prefill.backend == resolved
    assert one.cuda_graph_backend_prefill == flags.get("cuda_graph_backend_prefill")


@pytest.mark.parametrize(
    ("flags", "model", "asked"),
    [
        ({}, {}, "breakable"),
        ({}, {"kv_lora_rank": 512}, None),
        ({}, {"text_config": {"kv_lora_rank": 512}}, None),
        ({}, {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "breakable"),
        ({}, {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, None),
        ({"enable_multimodal": False}, {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "breakable"),
        ({"disable_prefill_cuda_graph": True}, {}, None),
        ({"disable_cuda_graph": True}, {}, None),
        ({"disaggregation_mode": "decode"}, {}, None),
        ({"device": "cpu"}, {}, None),
        ({"enable_memory_saver": True}, {}, "breakable"),
        ({"enable_memory_saver": "graphs"}, {}, None),  # with the graphs' memory
        ({"cuda_graph_backend_prefill": "full"}, {}, "full"),
    ],
)
def test_graphs_of_prefill_are_asked_for_under_eprts_all_to_all(
    flags: dict[str, Any], model: dict[str, Any], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang switches its default off where it doesn't know who carries the tokens."""
    if flags.get("enable_memory_saver") == "graphs":
        monkeypatch.setenv(supported.GRAPHS_ASLEEP, "1")
    monkeypatch.setattr(hooks, "all_to_all_reason", lambda args, given: "")
    monkeypatch.setattr(supported, "_model_config", lambda args: model)
    several = arguments(cuda_graph_config=None, **flags)
    hooks._arguments_made(SglangState(), lambda args: None, several)
    assert several.moe_a2a_backend == supported.CARRIED
    assert several.cuda_graph_backend_prefill == asked


MXFP4 = MoEConfig(128, 4, 2880, 2880, Activation(alpha=1.702, beta=1.0, limit=7.0), bias=True, weight_format="mxfp4")


def oss(**changes: Any) -> Any:
    in_config = {name: changes.pop(name) for name in list(changes) if hasattr(runner_config(), name)}
    return fused_moe(named("Mxfp4MoEMethod"), runner_config(**GPT_OSS | in_config), **changes)


def test_a_layers_maths() -> None:
    assert supported.moe_config(oss(), all_to_all=True) == MXFP4
    assert supported.moe_config(oss(), all_to_all=False).num_experts == 64  # this rank's
    scaled = supported.moe_config(oss(apply_router_weight_on_input=True, top_k=1), all_to_all=True)
    assert scaled == replace(MXFP4, top_k=1, weight_on_input=True)


def test_a_layer_that_is_not_told_its_top_k_has_its_routers() -> None:
    """OLMoE's and Hunyuan's, whose blocks make the router first; the latter has no name either."""
    untold, state = oss(top_k=None, layer_name="", layer_id=5), SglangState()
    with pytest.raises(FallsBackToEngine, match="how many experts a token visits"):
        supported.moe_config(untold, all_to_all=True, routed=state.top_k)
    hooks._router_made(state, None, TopK(4, renormalize=False))
    assert supported.moe_config(untold, all_to_all=True, routed=state.top_k) == MXFP4
    assert name_of(untold) == "layers.5"
    assert name_of(oss()) == "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
        ({"apply_router_weight_on_input": True}, "top_k 4: must be 1"),
        ({"apply_router_weight_on_input": True, "top_k": 1, "quant_method": named("ModelOptFp8MoEMethod")}, "ModelOpt"),
        ({"no_combine": True}, "combines the experts' outputs itself"),
        ({"is_shared_fused_moe": True}, "shared ones"),
        ({"moe_tp_size": 2}, "cut in 2"),
        ({"top_k": 129}, "top-129 of 128"),
        ({"params_dtype": torch.float64}, "float64"),
        ({"activation": "gelu"}, "gelu"),
        ({"is_gated": False}, "silu without a gate"),
        ({"quant_method": named("AWQMoEMethod")}, "AWQMoEMethod"),
        ({"reduce_results": True}, "adds up"),
    ],
)
def test_layers_that_are_left(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FallsBackToEngine, match=reason):
        supported.moe_config(oss(**change), all_to_all=True)


def test_children_of_sglangs_layer_compute_in_their_own_way() -> None:
    """Muse Spark's in 0.5.23, whose forward has a norm behind each expert."""

    class MuseSpark1xInt4Experts(FusedMoE):
        pass

    with pytest.raises(FallsBackToEngine, match="MuseSpark1xInt4Experts"):
        supported.moe_config(MuseSpark1xInt4Experts(**vars(oss())), all_to_all=False)


def test_ids_of_all_ranks_experts_are_not_taken_for_this_ranks() -> None:
    """In 0.5.23 an NVFP4 layer's own choice on Blackwell keeps them, whatever `--moe-runner-backend` says."""
    layer = oss(dispatcher=SimpleNamespace(skip_local_expert_mapping=True))
    with pytest.raises(FallsBackToEngine, match="--moe-runner-backend triton"):
        supported.moe_config(layer, all_to_all=False)
    assert supported.moe_config(layer, all_to_all=True) == MXFP4  # eprt's dispatcher is in its place
    layer.moe_ep_size = 1
    assert supported.moe_config(layer, all_to_all=False).num_experts == 64


@pytest.mark.parametrize(
    ("architecture", "runner", "reason"),
    [
        ("GptOssForCausalLM", "triton_kernel", ""),
        ("Glm4MoeForCausalLMNextN", "flashinfer_trtllm", "--speculative-moe-runner-backend flashinfer_trtllm"),
        ("InklingForConditionalGeneration", "auto", "InklingForConditionalGeneration multiplies"),
    ],
)
def test_layers_of_a_model_that_sglang_makes_otherwise(
    architecture: str, runner: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's with a runner of their own, which loads up in front of the gate, and those of a model that reads the
    parameters, which are freed by then."""
    flags = SimpleNamespace(get_moe_runner_backend=lambda: SimpleNamespace(value=runner))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe", flags)
    monkeypatch.setattr("eprt.integrations.sglang.state._arguments", lambda: arguments(**ALONE))
    monkeypatch.setattr(SglangState, "bind_layer", lambda *_, **__: "bound")
    state = SglangState()
    hooks._loading(state, loading(architecture))
    if not reason:
        assert state.bind(oss()) == "bound"
        return
    with pytest.raises(FallsBackToEngine, match=reason):
        state.bind(oss())


def test_parts_of_tensor_parallelism_keep_scales_whole() -> None:
    """gpt-oss's loader brings 12 scales for an eighth of 90, and 6 at last, where the parameters have the room."""
    cut = {"moe_ep_size": 1, "moe_tp_size": 8, "num_local_experts": 128, "intermediate_size_per_partition": 360}
    assert supported.moe_config(oss(**cut), all_to_all=False).intermediate_size == 384
    with pytest.raises(FallsBackToEngine, match=r"leaves 360 .* cuts a scale of 32 \(mxfp4\)"):
        supported.moe_config(oss(**cut, w2_weight=torch.empty(128, 2880, 180, device="meta")), all_to_all=False)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, Activation()),
        ({"swiglu_limit": 10.0}, Activation(limit=10.0)),
        (GPT_OSS, Activation(alpha=1.702, beta=1.0, limit=7.0)),
        (GPT_OSS | {"gemm1_beta": 0.0}, Activation(alpha=1.702, beta=0.0, limit=7.0)),
        ({"activation": "relu2", "is_gated": False}, Activation("relu2")),
    ],
)
def test_activations(change: dict[str, Any], wanted: Activation) -> None:
    assert activation_of(runner_config(**change)) == wanted


def test_a_clamp_behind_silu_is_sglangs() -> None:
    """Step-3.5's: a limit without an alpha."""
    with pytest.raises(FallsBackToEngine, match="clamped behind SiLU"):
        activation_of(runner_config(gemm1_clamp_limit=7.0))


def test_the_routed_scaling_factor_is_applied_once() -> None:
    """By eprt where SGLang's runner would do so: on GPUs, unless the router or the model does."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    layer = oss(routed_scaling_factor=2.5)
    assert output_scale(layer, cuda, all_to_all=False) == 2.5
    assert output_scale(layer, cpu, all_to_all=False) == 1.0
    assert output_scale(layer, cuda, all_to_all=True) == 1.0
    assert output_scale(oss(), cuda, all_to_all=False) == 1.0
    layer.should_fuse_routed_scaling_factor_in_topk = True
    assert output_scale(layer, cuda, all_to_all=False) == 1.0


def test_routers_of_layers_that_eprt_runs_say_ids_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's triton_kernel runner has its routers keep them to themselves. A draft numbers its layers from 0, too."""

    class Chooser(torch.nn.Module):
        def __init__(self, layer_id: int | None) -> None:
            super().__init__()
            self.layer_id, self.topk_config = layer_id, SimpleNamespace(output_format="TRITON")

    formats = SimpleNamespace(STANDARD="STANDARD")
    monkeypatch.setitem(
        sys.modules, "sglang.srt.layers.moe.topk", SimpleNamespace(TopK=Chooser, TopKOutputFormat=formats)
    )

    def formats_in(bound: object, *layer_ids: int | None) -> list[str]:
        experts, topks = torch.nn.Module(), [Chooser(layer_id) for layer_id in layer_ids]
        experts.layer_id, experts.quant_method = 3, SimpleNamespace(eprt=bound)
        routing.ask_for_ids(torch.nn.ModuleList([experts, *topks]))
        return [topk.topk_config.output_format for topk in topks]

    assert formats_in(Mock(), 3, None, 4) == ["STANDARD", "STANDARD", "TRITON"]  # 4 is left to SGLang
    assert formats_in(None, 3, None) == ["TRITON", "TRITON"]


def test_a_layer_that_cannot_run_where_eprt_carries_tokens_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eprt.integrations.sglang.state._arguments", lambda: arguments(moe_a2a_backend="customized"))
    with pytest.raises(ConfigError, match=r'EPRT_SGLANG=.*"all_to_all": false.* leaves the layers to SGLang'):
        SglangState().leave("layers.0", "activation gelu")


def test_padding_and_other_ranks_experts_are_sent_to_no_expert() -> None:
    ids = torch.tensor([[0, 7], [-1, -1], [3, -1]], dtype=torch.int64)
    marked = ids_of(ids, 8, signed=True)
    assert marked.dtype == torch.int32
    assert marked.tolist() == [[0, 7], [8, 8], [3, 8]]
    own = ids[:1].int()
    assert ids_of(own, 8).data_ptr() == own.data_ptr()  # no kernel in a decode step of one rank


def test_experts_that_eprt_holds_are_not_exported() -> None:
    """A save would lack them; another server would wait for them, or take the freed parameters' zero bytes."""
    state, save, send = SglangState(), Mock(), Mock()
    hooks._saved(state, save, "scheduler", path="dense")
    hooks._sent(state, send, "exporter", "address", group_name="dense")
    state.bindings.append(Mock())
    with pytest.raises(UsageError, match="eprt holds the experts"):
        hooks._saved(state, save, "scheduler", path="experts")
    save.assert_called_once_with("scheduler", path="dense")
    assert hooks._sent(state, send, "exporter", "address", group_name="experts") == (False, hooks.EXPORT)
    send.assert_called_once_with("exporter", "address", group_name="dense")


def test_layers_that_are_left_say_so_once_or_are_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eprt.integrations.sglang.state._arguments", lambda: arguments(enable_eplb=True))
    state, other = SglangState(), SglangState(unfit="SGLang 0.6.0: install another")
    for _ in range(2):
        hooks._layer_made(state, None, oss())
        hooks._layer_made(other, None, oss())
    assert caplog.text.count("fall back to SGLang: --enable-eplb") == 1
    assert caplog.text.count("fall back to SGLang: SGLang 0.6.0: install another") == 1
    monkeypatch.setenv("EPRT_SGLANG", '{"strict": true}')
    with pytest.raises(ConfigError, match=r"would fall back to SGLang, and eprt\.strict is set: --enable-eplb"):
        hooks._layer_made(state, None, oss())


def test_a_model_without_a_layer_for_eprt_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dbrx and AfMoE call SGLang's kernel themselves; a draft may be dense beside a model that eprt runs."""
    monkeypatch.setattr(SglangState, "reports", lambda _: True)
    dense, beside = SglangState(), SglangState()
    beside.bindings.append(Mock())
    for state in (dense, beside):
        hooks._loaded(state, None, Mock(model=torch.nn.Linear(1, 1)))
    assert [record.getMessage() for record in caplog.records] == [hooks.NONE]

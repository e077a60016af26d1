"""The plan: what it chooses for each family on each machine, and the reasons for everything else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.cases.plan_table import DEVICES, MODELS, TOKENS, choice, config_of, on_page, plan_for, table

from eprt.cli import main
from eprt.config import ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError, UnsupportedError
from eprt.experts import EXECUTORS
from eprt.models import FAMILIES
from eprt.plan import make_plan
from eprt.support import Device

GPT_OSS, QWEN3, NEMOTRON = "gpt-oss-120b, MXFP4", "Qwen3-30B-A3B, bf16", "Nemotron-H (latent experts), NVFP4"
DEEPSEEK_FP8, DEEPSEEK_NVFP4 = "DeepSeek-V3, FP8 blocks", "DeepSeek-V3, NVFP4"


def verdict(model: str, device: str, dispatcher: str, executor: str, **runtime):
    """The pair's Support in its first token format; a refused pair too."""
    try:
        candidates = plan_for(model, device, "decode", **runtime).candidates
    except UnsupportedError as error:
        return str(error)
    return next(c.support for c in candidates if (c.dispatcher, c.executor) == (dispatcher, executor))


def test_the_page_shows_the_table_that_the_plan_makes() -> None:
    assert on_page() == table(), "run: python tests/support/cases/plan_table.py"


def test_the_table_has_every_number_format_and_machine() -> None:
    """What a plan depends on; families whose layers have the sizes and formats of one that is listed aren't."""
    assert {hf["model_type"] for hf in MODELS.values()} <= set(FAMILIES)
    assert {config_of(model).weight_format for model in MODELS} >= {"mxfp4", "bf16", "fp8_block", "nvfp4"}
    assert {"sm90", "sm100"} <= set(DEVICES)
    assert set(TOKENS) == {"prefill", "decode"}


@pytest.mark.parametrize("phase", TOKENS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_is_listed_with_a_reason(model: str, device: str, phase: str) -> None:
    plan = plan_for(model, device, phase)
    assert {(c.dispatcher, c.executor) for c in plan.candidates} == {(d, e) for d in DISPATCHERS for e in EXECUTORS}
    assert all(c.support.reason for c in plan.candidates if not c.support)
    chosen = [
        c
        for c in plan.candidates
        if (c.dispatcher, c.executor, c.token_format) == (plan.dispatcher, plan.executor, plan.token_format)
    ]
    assert len(chosen) == 1
    assert chosen[0].support
    assert plan.reason
    assert plan.chosen is chosen[0]


@pytest.mark.parametrize(
    ("model", "device", "executors"),
    [
        (GPT_OSS, "cpu", {"torch_grouped"}),
        (GPT_OSS, "sm90", {"triton_grouped", "humming"}),
        (QWEN3, "sm90", {"triton_grouped"}),
        (QWEN3, "sm100", {"torch_grouped"}),
        (DEEPSEEK_FP8, "sm90", {"triton_grouped"}),
        (DEEPSEEK_FP8, "sm100", {"trtllm_gen"}),
        (DEEPSEEK_NVFP4, "sm90", {"triton_grouped", "humming"}),
        (DEEPSEEK_NVFP4, "sm100", {"trtllm_gen", "cutedsl_nvfp4"}),
        (NEMOTRON, "sm90", {"triton_grouped", "humming"}),
        (NEMOTRON, "sm100", {"trtllm_gen", "cutedsl_nvfp4"}),
    ],
)
def test_executor_by_generation_and_format(model: str, device: str, executors: set[str]) -> None:
    """What a user of that machine must get, whatever the measured rows say between those that fit."""
    for phase in TOKENS:
        assert choice(model, device, phase).split(" + ")[1] in executors


@pytest.mark.parametrize(
    ("model", "device", "dispatcher", "executor", "reason"),
    [
        (GPT_OSS, "cpu", "symm", "torch_grouped", "symm: runs on cuda, not on cpu"),
        (GPT_OSS, "cpu", "torch", "humming", "humming: runs on cuda, not on cpu"),
        (GPT_OSS, "sm100", "none", "cutlass_mxfp4", "needs sm90"),
        (GPT_OSS, "sm90", "none", "trtllm_gen", "needs sm100 to sm103, not sm90"),
        (QWEN3, "sm90", "none", "cutlass_mxfp4", "takes mxfp4 weights, not bf16"),
        (GPT_OSS, "sm80", "none", "triton_grouped", "mxfp4 weights need sm90, not sm80"),
        (NEMOTRON, "sm90", "none", "cutlass_mxfp4", "takes mxfp4 weights, not nvfp4"),
        (NEMOTRON, "sm90", "deepep", "humming", "top-k at most 11, the model has 22"),
    ],
)
def test_a_refusal_names_limit_and_value(model: str, device: str, dispatcher: str, executor: str, reason: str) -> None:
    found = verdict(model, device, dispatcher, executor)
    assert not found.ok
    assert reason in found.reason


def test_remarks_name_padding_decoding_and_adapters() -> None:
    assert "decodes mxfp4 to bf16 at load" in verdict(GPT_OSS, "cpu", "torch", "torch_grouped").reason
    padded = verdict(GPT_OSS, "sm90", "deepep", "cutlass_mxfp4")
    assert padded.ok
    assert "hidden 2880 padded to 3072" in padded.reason
    assert "adapter from expert_major" in padded.reason


def test_native_pairs_win_over_adapted_ones() -> None:
    plan = plan_for(GPT_OSS, "sm90", "decode", dispatcher="deepep")
    assert plan.executor == "triton_grouped"
    assert plan.token_format == "expert_major"


def test_a_world_of_one_moves_nothing() -> None:
    for device in ("cpu", "sm90"):
        plan = make_plan(config_of(GPT_OSS), ParallelConfig(1), RuntimeConfig(), Device.parse(device))
        assert plan.dispatcher == "none"
        assert plan.reason.count("moves nothing") == 1
        assert "torch 0" not in plan.reason, "every dispatcher would take no time"


def test_a_measured_choice_shows_the_row_it_used() -> None:
    reason = plan_for(GPT_OSS, "sm90", "decode").reason
    assert " us (" in reason
    assert "hidden 2880" in reason
    assert "nothing measured on sm100" in plan_for(GPT_OSS, "sm100", "decode").reason


def plan_of(model: str, world: int, device: str, per_host: int = 8, **runtime):
    parallel = ParallelConfig(world, ranks_per_host=per_host)
    return make_plan(config_of(model), parallel, RuntimeConfig(**runtime), Device.parse(device))


@pytest.mark.parametrize("phase", TOKENS)
@pytest.mark.parametrize("world", [16, 32, 64])
@pytest.mark.parametrize("model", MODELS)
def test_over_hosts_of_hopper_all_is_gathered_only_where_it_is_the_cheapest(model: str, world: int, phase: str) -> None:
    plan = plan_of(model, world, "sm90", phase=phase)
    times = {c.dispatcher: c.dispatch.us for c in plan.candidates if c.support and c.dispatch}
    assert {"none", "torch"} <= set(times)
    assert plan.dispatcher == min(times, key=lambda name: times[name])
    assert "modelled, not measured" in plan.reason
    assert f"{plan.dispatcher} measured" not in plan.reason


def test_prefill_over_hosts_passes_through_deepep_in_rounds() -> None:
    plan = plan_of(DEEPSEEK_FP8, 64, "sm90", phase="prefill")
    assert (plan.dispatcher, plan.max_tokens_per_rank, plan.tokens) == ("deepep", 1024, 4096)
    assert "in rounds of at most 1024 tokens a rank" in plan.chosen.support.reason
    assert "4 rounds" in plan.reason
    with pytest.raises(UnsupportedError, match="at most 1024 tokens a rank, max_tokens_per_rank is 4096"):
        plan_of(DEEPSEEK_FP8, 64, "sm90", dispatcher="deepep", strict_capacity=True)
    assert plan_of(DEEPSEEK_FP8, 64, "sm90", max_tokens_per_rank=256).max_tokens_per_rank == 256


def test_the_witness_is_taken_by_name_only() -> None:
    """sm70 has nothing else: that is an answer, not a layer that is a hundred times slower."""
    with pytest.raises(
        UnsupportedError, match=r"only by name, executor='reference'[\s\S]*needs sm80 or later, not sm70"
    ):
        plan_for(QWEN3, "sm70", "decode")
    assert plan_for(QWEN3, "sm70", "decode", executor="reference").executor == "reference"


def test_nothing_possible_raises_the_whole_table() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_for(GPT_OSS, "cpu", "decode", dispatcher="symm")
    assert "no dispatcher/executor pair can run this layer on 4 x cpu" in str(caught.value)
    for executor in EXECUTORS:
        assert f"  {executor} " in str(caught.value)


def test_wrong_names_and_sizes_are_config_errors() -> None:
    config, cpu = config_of(GPT_OSS), Device.parse("cpu")
    for runtime, parallel, text in (
        (RuntimeConfig(executor="marlin"), ParallelConfig(4), "executor 'marlin' doesn't exist; choose from reference"),
        (RuntimeConfig(), ParallelConfig(7, moe_tp_size=7), "2880 doesn't divide by moe_tp_size 7"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_plan(config, parallel, runtime, cpu)


def test_only_some_dispatchers_bring_outputs_back_in_fp8_and_nothing_chooses_that_by_itself() -> None:
    plan = plan_for(GPT_OSS, "sm90", "decode", combine_payload="fp8")
    able = {name for name, spec in DISPATCHERS.items() if "fp8" in spec.combine_payloads}
    assert {c.dispatcher for c in plan.candidates if c.support} == able == {"flashinfer"}
    reason = "combine_payload fp8: brings outputs back in the tokens' own format only"
    assert all(c.support.reason == f"{c.dispatcher}: {reason}" for c in plan.candidates if c.dispatcher not in able)
    assert RuntimeConfig().combine_payload is None


def test_nvfp4_tokens_need_whole_groups_of_values() -> None:
    config = replace(config_of(GPT_OSS), hidden_size=2888)
    with pytest.raises(UnsupportedError, match="nvfp4: hidden size must be a multiple of 16, the model has 2888"):
        make_plan(config, ParallelConfig(4), RuntimeConfig(payload="nvfp4"), Device.parse("sm90"))


def test_humming_needs_whole_16_bytes_of_fp8_rows() -> None:
    config = replace(config_of(DEEPSEEK_FP8), hidden_size=7176)
    with pytest.raises(UnsupportedError, match="humming: fp8_block weights need a hidden size in multiples of 16, not"):
        make_plan(config, ParallelConfig(4), RuntimeConfig(executor="humming"), Device.parse("sm89"))
    assert make_plan(config, ParallelConfig(4), RuntimeConfig(), Device.parse("sm89")).executor == "torch_grouped"


def test_what_one_half_of_a_pair_lacks_does_not_hide_what_the_other_was_measured_to_take() -> None:
    measured = plan_for(GPT_OSS, "sm90", "prefill")
    assert plan_for(GPT_OSS, "sm90", "prefill", executor="reference").dispatcher == measured.dispatcher
    assert plan_for(GPT_OSS, "sm90", "prefill", executor="humming").dispatcher == measured.dispatcher


def test_a_float32_models_tokens_travel_as_they_are_unless_told_otherwise() -> None:
    config = replace(config_of(QWEN3), weight_format="f32")
    for payload, dispatchers in ((None, {"none", "torch"}), ("bf16", {"symm"})):
        plan = make_plan(config, ParallelConfig(4), RuntimeConfig(payload=payload), Device.parse("sm90"))
        assert plan.dispatcher in dispatchers
        assert ("carries float32 tokens" in plan.reason) is (payload is None)


def test_packed_tokens_need_a_gpu_that_converts_them() -> None:
    for payload in ("fp8_block", "nvfp4"):
        with pytest.raises(UnsupportedError, match=f"payload {payload}: packing it needs sm89, not sm80"):
            plan_for(QWEN3, "sm80", "decode", payload=payload)
        assert plan_for(QWEN3, "sm89", "decode", payload=payload).payload == payload


def test_explain_prints_it(tmp_path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[GPT_OSS]))
    words = ["explain", "--model", str(path), "--device", "sm90"]
    assert main([*words, "--phase", "prefill", "--max-tokens-per-rank", "4096"]) == 0
    text = capsys.readouterr().out
    plan = plan_for(GPT_OSS, "sm90", "prefill")
    assert "layers 0-35: 128 experts in mxfp4, top-4, hidden 2880" in text
    assert "needs sm100 to sm103, not sm90" in text
    assert f"Choice: dispatcher {plan.dispatcher}, executor {plan.executor}" in text

    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["plans"][0]["candidates"]) == len(plan.candidates)
    assert shown["plans"][0]["layers"] == list(range(36))


def test_memory_is_mapped_within_a_host_or_a_fabric() -> None:
    """symm maps memory within one host, FlashInfer within one NVLink fabric, which hosts share from SM100 on."""
    refused: dict[tuple[str, int], set[str]] = {}
    for device, per_host in (("sm90", 8), ("sm90", 4), ("sm100", 4)):
        candidates = plan_of(GPT_OSS, 8, device, per_host).candidates
        refused[device, per_host] = {c.dispatcher for c in candidates if "one NVLink" in c.support.reason}
    assert refused == {("sm90", 8): set(), ("sm90", 4): {"symm", "flashinfer"}, ("sm100", 4): {"symm"}}


def test_engines_are_named_with_what_they_do_or_why_not(capsys) -> None:
    def reasons(model: str, world: int, device: str = "sm100", **options) -> dict[str, tuple[bool, str]]:
        plan = plan_of(model, world, device, **options)
        return {name: (support.ok, support.reason) for name, support in plan.engines.items()}

    model = "Qwen3-235B-A22B, FP8 blocks"
    alone = {"executor": "trtllm_gen"}
    assert reasons(model, 1, **alone)["kernel_routed"][0]
    for found, says in (
        (reasons(model, 4, **alone), "tokens travel in a world of 4"),
        (reasons(model, 1, executor="torch_grouped"), "torch_grouped doesn't choose experts by itself"),
        (reasons(model, 1, count_load=True, **alone), "it counts them, or has replicas"),
        (reasons(model, 1, validate="full", **alone), "validate='full'"),
    ):
        assert not found["kernel_routed"][0]
        assert says in found["kernel_routed"][1]
        assert found["split"] == (True, "every call that no engine before it takes")
    assert main(["explain", "--model", "gpt-oss-120b", "--world", "2", "--device", "sm90"]) == 0
    out = capsys.readouterr().out
    assert "Engines (what does a call: the first that takes it)" in out
    assert "  kernel_routed (the executor's kernel chooses the experts, nothing travels): none: tokens travel in" in out
    assert "  split (a dispatcher carries tokens to an executor, and its sums back): every call that no engine" in out

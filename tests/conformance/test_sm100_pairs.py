"""The whole layer on gloo ranks with the Blackwell executors, for every way in which a plan for B200 reaches them."""

from __future__ import annotations

import pytest
from sm100_jobs import run_sm100_checks

from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.cases import CASES
from eprt.conformance.checks import Check, summarize
from eprt.plan import make_plan
from eprt.support import Device

B200 = Device.parse("sm100")
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
RELU2 = Activation("relu2")


def config(weight_format: str, H: int = 96, I: int = 64, activation: Activation | None = None) -> MoEConfig:
    return MoEConfig(8, 3, H, I, activation=activation or Activation(), weight_format=weight_format)


# Every weight format of either executor, gated and not, with sizes that must be padded.
CONFIGS = [
    config("nvfp4"),
    config("nvfp4", I=32, activation=RELU2),
    config("fp8_tensor", I=40),
    config("fp8_tensor", I=24, activation=RELU2),
    config("mxfp8", H=160),
    config("mxfp8", activation=GPT_OSS),
    config("fp8_block", H=160, I=40, activation=GPT_OSS),
]
# DeepSeek FP8 scales a token's 128 values by their largest over 448, which rounds the whole numbers the cases send:
# three mantissa bits, in norm 0.03. Everything else is exact up to bf16 outputs.
BOUND = {"fp8_block": 0.05}

# How tokens come: the dispatchers that run here, in the two formats that all dispatchers emit.
WAYS = [("none", "flat"), ("torch", "flat"), ("torch", "expert_major")]


def name(moe: MoEConfig) -> str:
    return f"{moe.weight_format}-{moe.activation.kind}-h{moe.hidden_size}-i{moe.intermediate_size}"


def run(pools, size: int, checks: list[Check]) -> None:
    rows = summarize(pools(size).run(run_sm100_checks, checks=checks))
    assert len(rows) == len(checks) > 0
    # `not <=` so that NaN counts as wrong.
    wrong = [f"{row.check.name}: {row.error:.2e} {row.detail}" for row in rows if not row.error <= bound(row.check)]
    assert wrong == []


def bound(check: Check) -> float:
    return BOUND.get(check.moe.weight_format, 1e-2)


def executors(moe: MoEConfig) -> list[str]:
    return ["cutedsl_nvfp4", "trtllm_gen"] if moe.weight_format == "nvfp4" else ["trtllm_gen"]


@pytest.mark.parametrize(("dispatcher", "token_format"), WAYS)
@pytest.mark.parametrize("moe", CONFIGS, ids=name)
def test_layer(pools, moe, dispatcher, token_format):
    checks = [
        Check("layer", case, dispatcher, token_format, executor, moe) for executor in executors(moe) for case in CASES
    ]
    run(pools, 4, checks)
    run(pools, 1, checks[::4])


@pytest.mark.parametrize(("dispatcher", "token_format"), WAYS)
@pytest.mark.parametrize("moe", [CONFIGS[0], CONFIGS[2], CONFIGS[4]], ids=name)
def test_layer_under_tensor_parallelism(pools, moe, dispatcher, token_format):
    checks = [
        Check("layer", case, dispatcher, token_format, executor, moe, attention_tp_size=2, moe_tp_size=2)
        for executor in executors(moe)
        for case in CASES[::3]
    ]
    run(pools, 4, checks)


@pytest.mark.parametrize("moe", CONFIGS, ids=name)
def test_plans_for_b200_reach_nothing_that_is_not_run_here(moe):
    """Each pair the plan calls possible hands these executors a format that the rows above hand them."""
    candidates = make_plan(moe, ParallelConfig(4), RuntimeConfig(max_tokens_per_rank=64), B200).candidates
    ours = [c for c in candidates if c.executor in ("cutedsl_nvfp4", "trtllm_gen") and c.support]
    assert {c.executor for c in ours} == set(executors(moe))
    assert {c.dispatcher for c in ours} >= {"none", "torch", "symm"}
    assert {c.token_format for c in ours} <= {token_format for _, token_format in WAYS}
    for c in ours:
        assert c.adapted == (c.executor == "trtllm_gen" and c.token_format == "expert_major")


def test_pairs_that_cannot_work_say_why():
    def reason(executor: str, moe: MoEConfig, **runtime) -> str:
        candidates = make_plan(moe, ParallelConfig(4), RuntimeConfig(**runtime), B200).candidates
        return next(c.support.reason for c in candidates if c.executor == executor and c.dispatcher == "torch")

    assert "takes nvfp4 weights, not mxfp4" in reason("cutedsl_nvfp4", config("mxfp4"))
    assert "SwiGLU only" in reason("trtllm_gen", config("fp8_block", activation=RELU2))
    assert "alpha/beta/limit" in reason("trtllm_gen", config("fp8_tensor", activation=GPT_OSS))
    assert "bf16 or mxfp8 tokens" in reason("trtllm_gen", config("mxfp8"), payload="nvfp4")
    assert "multiple of 4" in reason("trtllm_gen", MoEConfig(12, 12, 128, 128, weight_format="fp8_block"))
    assert "top-k at most 32" in reason("cutedsl_nvfp4", MoEConfig(64, 40, 128, 128, weight_format="nvfp4"))
    assert "at most 2048 experts" in reason("trtllm_gen", MoEConfig(4096, 8, 128, 128, weight_format="nvfp4"))

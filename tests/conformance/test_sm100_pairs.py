"""The whole layer with the Blackwell executors, for every way in which a plan for B200 reaches them: on gloo ranks, and
behind stand-ins for the libraries of the other dispatchers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.builders import wrong_checks
from support.jobs.sm100_jobs import executors_on_cpu, run_sm100_checks
from support.stand_ins import deepep as deepep_stand_in
from support.stand_ins import flashinfer as flashinfer_stand_in
from support.stand_ins import symm as symm_stand_in
from support.stand_ins.flashinfer import FakeWorld, run_ranks

from eprt.config import Activation, MoEConfig, ParallelConfig, PayloadFormat, RuntimeConfig
from eprt.conformance.cases import CASES, COUNTS, ROUTINGS, Batch, make_batch
from eprt.conformance.checks import Check, NanOutput
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.dispatch import DISPATCHERS
from eprt.experts.reference import decode_hidden
from eprt.plan import Candidate, make_plan
from eprt.quant import encode_payload
from eprt.support import Device
from eprt.weights import ExpertWeights, Nvfp4

SIZE = 4
CAPACITY = 32
_LARGEST = 15 / (6 * 448)  # second-level scale for the conformance tokens: whole numbers up to 15

INSTALL: dict[str, Callable] = {
    "symm": lambda monkeypatch: symm_stand_in.install(monkeypatch, SIZE),
    "flashinfer": lambda monkeypatch: flashinfer_stand_in.install(monkeypatch, SIZE),
    "deepep": deepep_stand_in.install,
}


def install(monkeypatch, dispatcher: str) -> None:
    """`dispatcher` on a stand-in, where a layer on CPU ranks can ask for it, for the rest of a test."""
    INSTALL[dispatcher](monkeypatch)
    on_cpu = replace(DISPATCHERS[dispatcher], devices=("cpu",), requirement=None)
    monkeypatch.setitem(DISPATCHERS, dispatcher, on_cpu)


@contextmanager
def _one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def weights_of(config: MoEConfig) -> ExpertWeights:
    """All experts. NVFP4: calibrated differently, so that ranks must agree on the scale of packed tokens; what the
    executors quantise by themselves has another one (`sm100_jobs`)."""
    full = full_weights(config)
    if not isinstance(full.gate_up, Nvfp4):
        return full
    scale = torch.linspace(0.5, 1.0, config.num_experts)[:, None] * _LARGEST
    scale = scale.expand(-1, config.activation.parts).contiguous()
    return replace(full, gate_up=replace(full.gate_up, input_scale=scale))


@cache
def expected(config: MoEConfig, payload: PayloadFormat | None) -> dict[tuple[str, int, int], torch.Tensor]:
    """By case, call and rank: the oracle's output for tokens as they travel."""

    def travelled(batch: Batch) -> Batch:
        if payload is None:
            return batch
        return replace(batch, hidden=decode_hidden(encode_payload(batch.hidden, payload, torch.tensor([_LARGEST]))))

    batches = {
        (case.name, call, rank): travelled(make_batch(case, call, rank, SIZE, config, torch.bfloat16))
        for case in CASES
        for call in range(case.num_calls)
        for rank in range(SIZE)
    }
    outputs = expected_outputs(config, weights_of(config), list(batches.values()))
    return dict(zip(batches, outputs, strict=True))


def wrong_cases(pair: Candidate, config: MoEConfig, payload: PayloadFormat | None, bound: float) -> list[str]:
    """Every case through one layer, warmed up: what is off by more than `bound`, or breaks a kernel's contract."""
    fabric, wanted = deepep_stand_in.Fabric(SIZE), expected(config, payload)
    chosen = {"dispatcher": pair.dispatcher, "executor": pair.executor, "token_format": pair.token_format}
    runtime = RuntimeConfig(payload=payload, max_tokens_per_rank=CAPACITY, **chosen)

    def wrong(world: FakeWorld) -> Iterator[str]:
        world.group = deepep_stand_in.Group(fabric, world.rank) if pair.dispatcher == "deepep" else None
        world.timeout_s = symm_stand_in.TIMEOUT_S
        layer = layer_of(world, config, weights_of(config), runtime)
        layer.executor = NanOutput(layer.executor)
        layer.warmup()
        world.warm = True  # nothing may be allocated later
        for case in CASES:
            for call in range(case.num_calls):
                own = make_batch(case, call, world.rank, SIZE, config, torch.bfloat16)
                out = layer(own.hidden, own.topk, tokens_per_rank=case.counts.agreed)
                error = relative_error(out, wanted[case.name, call, world.rank])
                if not error <= bound:  # NaN counts as wrong
                    yield f"{case.name}, call {call}: {error:.2e}"
        layer.close()

    def job(world: FakeWorld) -> list[str]:
        try:
            return [f"{pair.executor}: rank {world.rank}: {text}" for text in wrong(world)]
        except (AssertionError, threading.BrokenBarrierError) as broken:
            return [f"{pair.executor}: rank {world.rank}: {type(broken).__name__}: {broken}"]

    with executors_on_cpu(), _one_thread_a_rank():
        return [text for texts in run_ranks(job, SIZE) for text in texts]


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
    assert wrong_checks(pools(size), checks, run_sm100_checks, bound) == []


def bound(check: Check) -> float:
    return BOUND.get(check.moe.weight_format, 1e-2)


def executors(moe: MoEConfig) -> list[str]:
    return ["cutedsl_nvfp4", "trtllm_gen"] if moe.weight_format == "nvfp4" else ["trtllm_gen"]


@pytest.mark.parametrize(("dispatcher", "token_format"), WAYS)
@pytest.mark.parametrize("moe", CONFIGS, ids=name)
def test_layer(pools, moe, dispatcher, token_format):
    """Every third case, which has each count and each routing; all are travelled by test_matrix.py's layers."""
    checks = [
        Check("layer", case, dispatcher, token_format, executor, moe)
        for executor in executors(moe)
        for case in CASES[::3]
    ]
    run(pools, 4, checks)
    if moe == CONFIGS[0]:
        run(pools, 1, checks[::4])


def test_every_third_case_has_each_count_and_each_routing():
    for part in (CASES[::3], CASES):
        assert {case.counts for case in part} == set(COUNTS)
        assert {case.routing for case in part} == set(ROUTINGS)


@pytest.mark.parametrize(("dispatcher", "token_format"), WAYS)
@pytest.mark.parametrize("moe", [CONFIGS[0], CONFIGS[2], CONFIGS[4]], ids=name)
def test_layer_under_tensor_parallelism(pools, moe, dispatcher, token_format):
    checks = [
        Check("layer", case, dispatcher, token_format, executor, moe, attention_tp_size=2, moe_tp_size=2)
        for executor in executors(moe)
        for case in CASES[::3]
    ]
    run(pools, 4, checks)


def ours(moe: MoEConfig, payload: PayloadFormat | None = None) -> list[Candidate]:
    """What a plan for four B200 calls possible with these executors."""
    runtime = RuntimeConfig(max_tokens_per_rank=CAPACITY, payload=payload)
    candidates = make_plan(moe, ParallelConfig(SIZE), runtime, B200).candidates
    return [c for c in candidates if c.executor in ("cutedsl_nvfp4", "trtllm_gen") and c.support]


# Every pair whose dispatcher needs a library: dispatcher, payload, layer -> the plan's candidates.
LIBRARY_PAIRS = {
    (dispatcher, payload, moe): found
    for dispatcher in INSTALL
    for payload in (None, "nvfp4", "fp8_block")
    for moe in CONFIGS
    if (found := [c for c in ours(moe, payload) if c.dispatcher == dispatcher])
}


@pytest.mark.parametrize(
    ("dispatcher", "payload", "moe"),
    LIBRARY_PAIRS,
    ids=[f"{name(moe)}-{dispatcher}-{payload or 'bf16'}" for dispatcher, payload, moe in LIBRARY_PAIRS],
)
def test_layer_behind_the_libraries(monkeypatch, dispatcher, payload, moe):
    install(monkeypatch, dispatcher)
    # Packed tokens reach the kernels as the oracle sees them; what is packed after the journey is rounded.
    most = 1e-2 if payload else BOUND.get(moe.weight_format, 1e-2)
    pairs = LIBRARY_PAIRS[dispatcher, payload, moe]
    assert [problem for pair in pairs for problem in wrong_cases(pair, moe, payload, most)] == []


def test_the_pairs_behind_the_libraries():
    """A dispatcher carries bf16 to every pair and packed tokens to kernels of their format."""
    found = {
        (dispatcher, payload, moe.weight_format, pair.executor)
        for (dispatcher, payload, moe), pairs in LIBRARY_PAIRS.items()
        for pair in pairs
    }
    executors_of = {(moe.weight_format, executor) for moe in CONFIGS for executor in executors(moe)}
    nvfp4 = {(d, "nvfp4", "nvfp4", e) for d in ("symm", "flashinfer") for e in ("cutedsl_nvfp4", "trtllm_gen")}
    fp8_block = {(d, "fp8_block", "fp8_block", "trtllm_gen") for d in INSTALL}
    assert found == {(d, None, w, e) for d in INSTALL for w, e in executors_of} | nvfp4 | fp8_block


@pytest.mark.parametrize("moe", CONFIGS, ids=name)
def test_plans_for_b200_reach_nothing_that_is_not_run_here(moe):
    """Each pair the plan calls possible is run on gloo ranks or behind a stand-in for its library."""
    found = ours(moe)
    assert {c.executor for c in found} == set(executors(moe))
    on_gloo = {c.dispatcher for c in found} - set(INSTALL)
    assert {(c.dispatcher, c.token_format) for c in found if c.dispatcher in on_gloo} <= set(WAYS)
    assert {c.dispatcher for c in found} == {dispatcher for dispatcher, _ in WAYS} | set(INSTALL)
    for c in found:
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

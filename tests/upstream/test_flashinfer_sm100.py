"""What the Blackwell executors take from the installed FlashInfer: signatures, numbers, layouts, and its own torch
references of the kernels reading our prepared tensors. No GPU is needed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.cases.expert_cases import RELU2, RUNTIME, SILU, make_flat, rows_with_expert
from support.cases.sm100_cases import as_slabs, build, case, packed, witness
from support.libraries import folder, needs
from support.stand_ins.cutedsl_kernels import FakeCuteDsl, FakeMoEWrapper
from support.stand_ins.trtllm_kernels import ENUMS, FakeTrtllm

from eprt.config import ParallelConfig, Routing
from eprt.conformance.oracle import relative_error
from eprt.experts import executor_spec, rules
from eprt.experts.blackwell import cutedsl, swizzle, trtllm
from eprt.experts.blackwell.cutedsl import CuteDslExecutor
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.experts.padding import interleave_halves
from eprt.support import Device
from eprt.tokens import Payload

pytestmark = needs("flashinfer", "cutlass")  # without nvidia-cutlass-dsl FlashInfer hides its CuteDSL kernels
ROOT = folder("flashinfer")
EXACT = 1e-2  # bf16 outputs
FORMATS = ["nvfp4", "fp8_tensor", "fp8_block", "mxfp8"]


class Bound:
    """Calls a stand-in only if the real entry point accepts exactly these arguments."""

    def __init__(self, real, stand_in, seen: list[str]) -> None:
        self.signature, self.stand_in, self.seen = inspect.signature(real), stand_in, seen

    def __call__(self, *args, **keywords):
        self.signature.bind(*args, **keywords)
        self.seen.append(str(self.signature)[:20])
        return self.stand_in(*args, **keywords)


class BoundWrapper:
    """`CuteDslMoEWrapper` in front of its stand-in."""

    def __init__(self, real, seen: list[str]) -> None:
        self.real, self.seen = real, seen

    def __call__(self, **geometry):
        inspect.signature(self.real).bind(**geometry)
        stand_in = FakeMoEWrapper(FakeCuteDsl(), **geometry)
        run = inspect.signature(self.real.run)

        def bound(**keywords):
            run.bind(None, **keywords)
            self.seen.append("run")
            return FakeMoEWrapper.run(stand_in, **keywords)

        stand_in.run = bound
        return stand_in


@pytest.mark.parametrize("activation", [SILU, RELU2], ids=["silu", "relu2"])
def test_every_argument_of_the_cutedsl_executor_exists(activation):
    real, fake, seen = cutedsl.load_kernels(), FakeCuteDsl().kernels(), []
    both = {
        name: Bound(getattr(real, name), getattr(fake, name), seen)
        for name in vars(real)
        if name not in ("moe_wrapper", "relu2", "swiglu", "autotune")
    }
    kernels = SimpleNamespace(**vars(fake) | both | {"moe_wrapper": BoundWrapper(real.moe_wrapper, seen)})
    config, shard, weights = case("nvfp4", (128, 64), activation)
    executor = type("Built", (CuteDslExecutor,), {"kernels": kernels})(
        config, shard, weights, torch.device("cpu"), RUNTIME
    )
    flat = make_flat(config, dtype=torch.bfloat16)
    for tokens in (flat, packed(flat, weights)):
        executor(tokens)
        executor(as_slabs(tokens, shard))
    assert len(seen) >= 2 + 1 + 4 + 3
    assert (real.swiglu, real.relu2) == (fake.swiglu, fake.relu2)
    inspect.signature(real.autotune).bind(True)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_argument_of_the_trtllm_executor_exists(weight_format):
    real, fake, seen = trtllm.load_kernels(), FakeTrtllm().kernels(), []
    both = {name: Bound(getattr(real, name), getattr(fake, name), seen) for name in ("fp4_quantize", "mxfp8_quantize")}
    for name in ("routed", "logits"):
        pairs = {entry: (getattr(real, name)[entry], kernel) for entry, kernel in getattr(fake, name).items()}
        both[name] = {entry: Bound(*pair, seen) for entry, pair in pairs.items()}
    kernels = SimpleNamespace(**vars(fake) | both)
    config, shard, weights = case(weight_format, (128, 128))
    for routing in (Routing(), Routing("grouped_sigmoid", num_groups=4, topk_groups=2, scaling_factor=2.5)):
        config = replace(config, routing=routing)
        kind = type("Built", (TrtllmGenExecutor,), {"kernels": kernels})
        executor = kind(config, shard, weights, torch.device("cpu"), RUNTIME)
        flat = make_flat(config, dtype=torch.bfloat16)
        executor(flat)
        executor.run_logits(Payload.plain(flat.hidden.data.nan_to_num()), torch.randn(flat.num_rows, 8))
    assert len(seen) >= 4


def test_the_masked_gemm_can_signal_finished_tiles():
    """Its half of an overlap with the combine; `test_deepep.py` says why DeepEP's half is missing."""
    assert {"dst_signals", "sm_count"} <= set(
        inspect.signature(cutedsl.load_kernels().grouped_gemm_nt_masked).parameters
    )


def test_enum_values():
    enums = trtllm.load_kernels().enums
    for name in ("SfLayout", "Fp8QuantizationType", "ActivationType", "RoutingMethodType"):
        for member, value in vars(getattr(ENUMS, name)).items():
            assert int(getattr(getattr(enums, name), member)) == value, (name, member)


def test_limits_are_the_librarys():
    policy = (ROOT / "data/include/flashinfer/trtllm/fused_moe/RoutingCustomPolicy.cuh").read_text()
    assert f"int MaxSupportedTopExperts = {rules.TRTLLM_MAX_TOP_K};" in policy
    assert f"int MaxSupportedExperts = {rules.TRTLLM_MAX_EXPERTS};" in policy
    gemm = (ROOT / "fused_moe/cute_dsl/blockscaled_contiguous_gather_grouped_gemm_act_fusion.py").read_text()
    assert "if n % 128 != 0:" in gemm, "GEMM1 rows are still a multiple of 128"


def test_the_fused_activation_is_the_documented_one():
    """`trtllm_formats` divides beta and the limit by the factor of the raw sums because of this text."""
    header = (ROOT / "data/include/flashinfer/trtllm/batched_gemm/KernelRunner.h").read_text()
    text = re.sub(r"\s*\n\s*//\s*", " ", header)
    assert "gatedAct = scaleC' * (x0 + beta') * ((x1 * scaleGate) * sigmoid(alpha * x1 * scaleGate))" in text
    assert "beta' = beta / scaleAb, scaleC' = scaleC * scaleAb" in text


def test_ids_that_are_nobodys_are_skipped_by_the_routing_kernels():
    """E marks slots without an expert; the kernels bound ids by the number of experts or by the local range."""
    kernels = (ROOT / "data/csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_custom.cuh").read_text()
    assert kernels.count("if (expertIdx > -1 && expertIdx < params.mNumExperts)") >= 2
    shared = (ROOT / "data/include/flashinfer/trtllm/fused_moe/RoutingKernel.cuh").read_text()
    assert shared.count("localExpertIdx >= 0 && localExpertIdx < localExpertExtent") >= 4


def test_scales_of_the_masked_quantisers_are_one_an_expert():
    """Their docstrings say [1]; the launcher takes the number of experts from this tensor."""
    launcher = (ROOT / "data/csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp").read_text()
    assert "auto n_experts = input_global_scale.shape()[0];" in launcher


@pytest.mark.parametrize("name", ["cutedsl_nvfp4", "trtllm_gen"])
@pytest.mark.parametrize(("version", "fits"), [("0.6.18", False), ("0.7.1", False), ("0.7.2.post1", True)])
def test_an_older_flashinfer_is_a_reason(name, version, fits, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: version)
    config, *_ = case("nvfp4", (128, 64))
    verdict = executor_spec(name).supports(
        config, ParallelConfig(), RUNTIME, Device.parse("sm100", installed=True), "bf16"
    )
    assert verdict.ok is fits
    assert fits or f"flashinfer {version} is older than 0.7.2" in verdict.reason


@pytest.mark.parametrize("rows", [128, 256, 3712])
def test_row_orders_are_the_librarys(rows):
    from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices, get_w2_permute_indices_with_cache

    matrix = torch.zeros(rows, 16, dtype=torch.uint8)
    up_gate = torch.arange(rows).roll(rows // 2)  # the library starts from [up; gate]
    for sizes in ({}, {"num_elts_per_sf": 16}, {"num_elts_per_sf": 32}):
        gated = _maybe_get_cached_w3_w1_permute_indices({}, matrix, 128, is_gated_act_gemm=True, **sizes)
        assert torch.equal(up_gate[gated], swizzle.trtllm_row_order(rows, True))
        plain = _maybe_get_cached_w3_w1_permute_indices({}, matrix, 128, is_gated_act_gemm=False, **sizes)
        assert torch.equal(plain, swizzle.trtllm_row_order(rows, False))
        assert torch.equal(get_w2_permute_indices_with_cache({}, matrix, 128, **sizes), plain)


@pytest.mark.parametrize(("rows", "cols"), [(40, 6), (256, 8), (2944, 184)])
def test_scale_tiles_are_the_librarys(rows, cols):
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
    from flashinfer.trace.templates.gemm import _unswizzle_batched_sf_128x4

    scales = torch.randint(0, 256, (3, rows, cols), dtype=torch.uint8)
    swizzled = swizzle.swizzle_scales(scales)
    assert torch.equal(_unswizzle_batched_sf_128x4(swizzled, 3, rows, cols), scales)
    theirs = convert_sf_to_mma_layout(swizzled.reshape(-1), m=rows, k=16 * cols, num_groups=3)
    ours = swizzle.mma_scale_view(swizzled)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("half", [64, 1856])
def test_gated_rows_take_turns_as_in_the_library(half):
    from flashinfer.fused_moe.prepare import _interleave_linear_and_gate

    matrix = torch.arange(2 * 2 * half).view(2, 2 * half, 1)
    up_gate = matrix.roll(half, 1)
    assert torch.equal(interleave_halves(up_gate, 64), _interleave_linear_and_gate(up_gate, 64, dim=1))


# Their SwiGLU-step activation clamps what a large enough limit leaves alone, and is the one whose references undo the
# shuffle and the swizzle.
STEP, NO_LIMIT = 7, 1e30


def references():
    from flashinfer.trace.templates import moe

    return {
        "nvfp4": moe._fp4_moe_run_experts,
        "fp8_tensor": moe._trtllm_fp8_per_tensor_step_run_experts,
        "fp8_block": moe._fp8_moe_run_experts,
        "mxfp8": moe._fp8_moe_run_experts,
    }


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("size", [(96, 64), (288, 160)], ids=str)
def test_the_librarys_references_read_our_tensors(weight_format, size):
    """FlashInfer's text on one side, eprt's witness on the other; tokens as the executor quantised them."""
    config, shard, weights = case(weight_format, size)
    executor = build(TrtllmGenExecutor, FakeTrtllm(rounding=False), config, shard, weights)
    tokens = make_flat(config, dtype=torch.bfloat16)
    data = tokens.hidden.data.nan_to_num()
    tokens = replace(tokens, hidden=Payload.plain(data), weights=tokens.weights.nan_to_num())
    tokens = packed(tokens, weights) if weight_format == "nvfp4" else tokens
    arguments = executor._format.arguments(tokens.hidden)
    wanted = inspect.signature(references()[weight_format]).parameters
    given = {name: value for name, value in arguments.items() if name in wanted}
    if weight_format != "fp8_block":
        given["gemm1_clamp_limit"] = torch.full((4,), NO_LIMIT)
    if weight_format in ("nvfp4", "mxfp8"):
        given["activation_type"] = STEP
    if weight_format == "nvfp4":
        given |= {"gemm1_bias": None, "gemm2_bias": None}
    count = {"num_experts" if "num_experts" in wanted else "E_global": config.num_experts}
    theirs = references()[weight_format](
        **given, **count, weights=tokens.weights, topk_idx=tokens.ids.long(), local_expert_offset=shard.first_expert
    )[:, : config.hidden_size]
    local = rows_with_expert(tokens, shard)
    bound = 0.05 if weight_format in ("mxfp8", "fp8_block", "fp8_tensor") else EXACT  # tokens rounded to FP8
    assert relative_error(theirs[local], witness(config, shard, weights, tokens)[local]) <= bound
    assert relative_error(theirs[local], executor(tokens)[local]) <= EXACT

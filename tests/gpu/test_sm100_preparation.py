"""Blackwell layouts made on a GPU: the same bytes as on a CPU, without a second copy of the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from support.builders import recorded
from support.cases.expert_cases import CPU, RELU2, RUNTIME, SILU, SM100_ACTIVATIONS, make_flat
from support.cases.sm100_cases import as_slabs, case, packed
from support.stand_ins.cutedsl_kernels import FakeCuteDsl
from support.stand_ins.trtllm_kernels import FakeTrtllm

from eprt.config import MoEConfig
from eprt.experts.blackwell.cutedsl import CuteDslExecutor
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.placement import ExpertShard
from eprt.weights import ExpertWeights, Nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
KINDS = {
    "cutedsl": type("Built", (CuteDslExecutor,), {"kernels": FakeCuteDsl().kernels()}),
    "trtllm": type("Built", (TrtllmGenExecutor,), {"kernels": FakeTrtllm().kernels()}),
}


def tensors(thing: object) -> list[torch.Tensor]:
    """Every tensor that an executor keeps, in a fixed order."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, list | tuple):
        return [tensor for value in thing for tensor in tensors(value)]
    if is_dataclass(thing) and not isinstance(thing, type):
        return [tensor for field in fields(thing) for tensor in tensors(getattr(thing, field.name))]
    if type(thing).__module__.startswith("eprt.experts"):
        return tensors(vars(thing))
    return []


@pytest.mark.parametrize(
    ("kind", "weight_format", "activation"),
    [("cutedsl", "nvfp4", a) for a in SM100_ACTIVATIONS]
    + [("trtllm", "nvfp4", a) for a in SM100_ACTIVATIONS]
    + [("trtllm", "fp8_tensor", a) for a in ("silu", "relu2")]
    + [("trtllm", "fp8_block", a) for a in ("silu", "gpt_oss")]
    + [("trtllm", "mxfp8", a) for a in SM100_ACTIVATIONS],
)
def test_the_same_bytes_as_on_a_cpu(kind, weight_format, activation):
    config, shard, weights = case(weight_format, (160, 96), SM100_ACTIVATIONS[activation])
    here, there = (
        tensors(vars(KINDS[kind](config, shard, weights.to(place), place, RUNTIME))) for place in (CPU, CUDA)
    )
    assert len(here) == len(there) >= 4
    for ours, theirs in zip(here, there, strict=True):
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        if ours.dtype == torch.float32:  # factors: division may round differently
            assert torch.allclose(theirs.cpu(), ours, rtol=1e-6)
        else:
            assert torch.equal(theirs.cpu().view(torch.uint8), ours.view(torch.uint8))


@pytest.mark.parametrize("activation", [SILU, RELU2], ids=["silu", "relu2"])
@pytest.mark.parametrize("kind", KINDS)
def test_preparation_holds_one_expert_beside_the_layer(kind, activation):
    L, H, I, parts = 32, 2048, 1024, activation.parts
    config = MoEConfig(L, 4, H, I, activation, weight_format="nvfp4")

    def matrix(rows: int, cols: int, parts: int) -> Nvfp4:
        codes = torch.zeros(L, rows, cols // 2, dtype=torch.uint8)
        scales = torch.ones(L, rows, cols // 16).to(torch.float8_e4m3fn)
        return Nvfp4(codes, scales, torch.ones(L, parts), torch.ones(L, parts))

    weights = ExpertWeights(matrix(parts * I, H, parts), matrix(H, I, 1))
    runtime = type(RUNTIME)(token_format="flat")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    executor = KINDS[kind](config, ExpertShard(L, 0, L), weights, CUDA, runtime)
    kept = torch.cuda.memory_allocated() - before
    extra = torch.cuda.max_memory_allocated() - before - kept
    assert executor.config is config
    assert kept <= 1.01 * weights.nbytes
    assert extra <= weights.nbytes / 8


def silent(*shapes: Callable[[torch.Tensor], tuple[int, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A quantiser that only allocates its outputs."""
    return lambda x, *args, **keywords: tuple(x.new_zeros(shape(x), dtype=torch.uint8) for shape in shapes)


def silent_masked(columns: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def quantise(x: torch.Tensor, *args: object, **keywords: object) -> tuple[torch.Tensor, torch.Tensor]:
        codes = x.new_zeros((*x.shape[:2], x.shape[2] // columns // 2), dtype=torch.uint8)
        return codes.permute(1, 2, 0), x.new_zeros(1, dtype=torch.uint8)

    return quantise


class SilentWrapper:
    def __init__(self, *, hidden_size: int, **geometry: object) -> None:
        self.hidden_size = hidden_size

    def run(self, *, x: torch.Tensor, **keywords: object) -> torch.Tensor:
        return x.new_zeros((x.shape[0], self.hidden_size), dtype=torch.bfloat16)


def silent_kernels(kind: str) -> SimpleNamespace:
    """Entry points that launch nothing but their outputs' allocation."""
    linear = silent(lambda x: (x.shape[0], x.shape[1] // 2), lambda x: (x.shape[0], x.shape[1] // 16))
    if kind == "cutedsl":
        kernels = {
            "fp4_quantize": linear,
            "scaled_fp4_grouped_quantize": silent_masked(1),
            "silu_and_mul_scaled_nvfp4_experts_quantize": silent_masked(2),
            "grouped_gemm_nt_masked": lambda *args, **keywords: None,
            "moe_wrapper": SilentWrapper,
        }
        return SimpleNamespace(**vars(FakeCuteDsl().kernels()) | kernels)
    entries = dict.fromkeys(("fp4", "fp8_block", "fp8_tensor"), lambda **keywords: None)
    mxfp8 = silent(lambda x: x.shape, lambda x: (x.shape[0] * x.shape[1] // 32,))
    kernels = {"routed": entries, "logits": entries, "fp4_quantize": linear, "mxfp8_quantize": mxfp8}
    return SimpleNamespace(**vars(FakeTrtllm().kernels()) | kernels)


@pytest.mark.parametrize("travelled", [False, True])
@pytest.mark.parametrize("activation", SM100_ACTIVATIONS)
@pytest.mark.parametrize(
    ("kind", "weight_format", "token_format"),
    [
        ("cutedsl", "nvfp4", "flat"),
        ("cutedsl", "nvfp4", "expert_major"),
        ("trtllm", "nvfp4", "flat"),
        ("trtllm", "fp8_tensor", "flat"),
        ("trtllm", "fp8_block", "flat"),
        ("trtllm", "mxfp8", "flat"),
    ],
)
def test_nothing_around_the_kernels_stops_a_capture(kind, weight_format, token_format, activation, travelled):
    """A CUDA graph refuses any host sync and any copy from pageable memory."""
    no_kernel = {"fp8_tensor": ("gpt_oss", "deepseek_v4"), "fp8_block": ("relu2",)}
    if activation in no_kernel.get(weight_format, ()):
        pytest.skip("no such kernel")
    if travelled and weight_format != "nvfp4":
        pytest.skip("travels as bf16")
    config, shard, weights = case(weight_format, (160, 96), SM100_ACTIVATIONS[activation])
    base = CuteDslExecutor if kind == "cutedsl" else TrtllmGenExecutor
    runtime = replace(RUNTIME, token_format=token_format)
    executor = type("Built", (base,), {"kernels": silent_kernels(kind)})(config, shard, weights, CUDA, runtime)
    flat = make_flat(config, dtype=torch.bfloat16)
    flat = packed(flat, weights) if travelled else flat
    tokens = moved(as_slabs(flat, shard) if token_format == "expert_major" else flat)
    executor(tokens)
    _, replay = recorded(lambda: executor(tokens), CUDA)
    replay()
    torch.cuda.synchronize()


def moved(thing):
    """Tokens on the GPU."""
    if isinstance(thing, torch.Tensor):
        return thing.to(CUDA)
    if is_dataclass(thing):
        return replace(thing, **{field.name: moved(getattr(thing, field.name)) for field in fields(thing)})
    return thing

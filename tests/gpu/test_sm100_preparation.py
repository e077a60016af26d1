"""Blackwell layouts made on a GPU: the same bytes as on a CPU, without a second copy of the layer."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch
from expert_cases import ACTIVATIONS, CPU, RELU2, RUNTIME, SILU
from sm100_cases import case
from sm100_kernels import FakeCuteDsl, FakeTrtllm

from eprt.config import MoEConfig
from eprt.experts.cutedsl_nvfp4 import CuteDslExecutor
from eprt.experts.trtllm_gen import TrtllmGenExecutor
from eprt.placement import ExpertShard
from eprt.weights import ExpertWeights, Nvfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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
        return [tensor for value in thing.values() for tensor in tensors(value)]
    if is_dataclass(thing) and not isinstance(thing, type):
        return [tensor for field in fields(thing) for tensor in tensors(getattr(thing, field.name))]
    if type(thing).__module__.startswith("eprt.experts"):
        return tensors(vars(thing))
    return []


@pytest.mark.parametrize(
    ("kind", "weight_format", "activation"),
    [("cutedsl", "nvfp4", a) for a in ACTIVATIONS]
    + [("trtllm", "nvfp4", a) for a in ACTIVATIONS]
    + [("trtllm", "fp8_tensor", a) for a in ("silu", "relu2")]
    + [("trtllm", "fp8_block", a) for a in ("silu", "gpt_oss")]
    + [("trtllm", "mxfp8", a) for a in ACTIVATIONS],
)
def test_the_same_bytes_as_on_a_cpu(kind, weight_format, activation):
    config, shard, weights = case(weight_format, (160, 96), ACTIVATIONS[activation])
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

"""What an eager layer's call costs the host: counted, not timed, so that a gain isn't lost unseen.

A call of one token inside a step, on one rank of two: its peer answers at once, and launches do nothing
(`support/stand_ins/pretended_gpu.py`). `eprt bench step` has the time on real GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install triton")

from support.stand_ins import pretended_gpu
from support.stand_ins.humming import Launches, described_h200
from support.stand_ins.pretended_gpu import DEVICE, Operators, counted_calls
from support.stand_ins.pretended_gpu import pretended_gpu as pretended

import eprt
from eprt import compile_ahead
from eprt.bench.experts import random_experts
from eprt.config import ParallelConfig, RuntimeConfig
from eprt.conformance.cases import CONFIGS
from eprt.dispatch.symm.memory import SymmetricMemory
from eprt.layer import ExpertParallelMoE
from eprt.placement import EMPTY, ExpertPlacement
from eprt.routing import Router
from eprt.support import Requirement, Support
from eprt.world import World
from eprt.world.collectives import Membership

SIZE = 2


@dataclass(frozen=True)
class Cost:
    """The most that one call may cost.

    Attributes:
        launches: Triton kernels, all prepared, in their order.  library: launches of other libraries' kernels.
        operators: torch's.  calls: of Python functions of ours.  files: of ours that those calls enter.
    """

    launches: tuple[str, ...]
    library: tuple[str, ...]
    operators: int
    calls: int
    files: int = 26


ROUTER, PUSH, PULL = ("logits_kernel", "choice_kernel"), ("dispatch_kernel",), ("combine_kernel",)
COSTS = {
    ("symm", "humming", "mxfp4"): Cost(
        (*ROUTER, *PUSH, "_group_small", "_weighted_sum", *PULL), ("gemm", "rows", "gemm"), 11, 117
    ),
    ("symm", "triton_grouped", "bf16"): Cost(
        (*ROUTER, *PUSH, "few_gemm", "few_gemm", "few_sum", *PULL), (), 12, 136, 22
    ),
    ("none", "cutlass_mxfp4", "mxfp4"): Cost(ROUTER, ("cutlass",), 21, 78),
    ("symm", "humming", "mxfp4", "replicas"): Cost(
        (*ROUTER, "_slots_kernel", *PUSH, "_group_small", "_weighted_sum", *PULL), ("gemm", "rows", "gemm"), 12, 124
    ),
}


@contextmanager
def humming(patch: pytest.MonkeyPatch, launches: pretended_gpu.Launches, folder) -> Iterator[None]:
    from humming.device import DeviceInfo

    with described_h200(folder):
        Launches().install(patch)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setitem(DeviceInfo._instances, DEVICE.index, DeviceInfo._instances[0])
        gemm, rows = launches.operator("gemm"), launches.operator("rows")
        patch.setattr(torch.ops.humming, "launch_kernel", SimpleNamespace(out=gemm))
        patch.setattr(torch.ops.humming, "launch_process_input", SimpleNamespace(default=rows))
        yield


@contextmanager
def cutlass(patch: pytest.MonkeyPatch, launches: pretended_gpu.Launches) -> Iterator[None]:
    fused_moe = pytest.importorskip("flashinfer.fused_moe", reason="FlashInfer isn't installed")
    kernel = launches.operator("cutlass")
    kernel.__signature__ = signature(lambda *, workspace_buffer: None)  # asked which keywords this version has
    patch.setattr(fused_moe, "cutlass_fused_moe", kernel)
    patch.setattr(fused_moe, "cutlass_fused_moe_workspace_size", lambda *_, **__: 256)
    for name in ("weights", "scales"):
        patch.setattr(fused_moe, f"interleave_moe_{name}_for_sm90_mixed_gemm", lambda x, *_, **__: x)
    patch.setattr("flashinfer.autotuner.autotune", lambda _: nullcontext())
    yield


def make_world() -> World:
    """A rank of two whose peer says the same at once."""
    world = World(Membership(0, SIZE, DEVICE, ParallelConfig(SIZE)), timeout_s=20.0)
    world.gather_words = lambda words: [tuple(words)] * SIZE
    world.gather_control = lambda x: torch.stack([x] * SIZE)
    world.barrier = lambda: None
    world.all_gather = world.reduce_scatter = lambda out, x, **_: None
    return world


def make_layer(world: World, dispatcher: str, executor: str, weight_format: str, placed: str = "") -> ExpertParallelMoE:
    """`placed`: "replicas" where expert 0 lies on both ranks, so that ids become slots."""
    config = replace(CONFIGS["gpt_oss"], weight_format=weight_format, hidden_size=256, intermediate_size=256)
    E, H = config.num_experts, config.hidden_size
    placement = ExpertPlacement(E, world.parallel, (*range(E), EMPTY, 0) if placed else ())
    layer = ExpertParallelMoE(
        config,
        world,
        random_experts(config, placement.num_local_experts, torch.device("cpu")),
        placement=placement,
        runtime=RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=32),
        router=Router(torch.randn(E, H).bfloat16(), config.routing, config.top_k, bias=torch.randn(E).bfloat16()),
    )
    world.warmup(layer)
    return layer


def allocate(world: World, geometry) -> SymmetricMemory:
    memory = torch.zeros(geometry.num_bytes, dtype=torch.uint8)
    return SymmetricMemory(geometry, world.rank, memory, [memory.data_ptr()] * SIZE)


@pytest.mark.parametrize("pair", COSTS, ids="+".join)
def test_a_call_costs_no_more(pair, tmp_path, monkeypatch):
    executor = pair[1]
    monkeypatch.setattr(Requirement, "check", lambda _: Support(True))
    monkeypatch.setattr(SymmetricMemory, "allocate", allocate)
    monkeypatch.setenv(compile_ahead.PROCESSES, "0")  # nothing is launched
    with pretended() as launches:
        library = {"humming": lambda: humming(monkeypatch, launches, tmp_path)}
        library["cutlass_mxfp4"] = lambda: cutlass(monkeypatch, launches)
        with library.get(executor, lambda: pytest.MonkeyPatch.context())(), make_world() as world, torch.no_grad():
            layer = make_layer(world, *pair)
            x = torch.randn(1, layer.config.hidden_size).bfloat16()
            with world.step(1):
                layer(x)
                launches.clear()
                layer(x)
                launched = tuple(launches.triton)
                found = tuple(launches.library.elements())
                with Operators() as operators:
                    layer(x)
                with counted_calls(str(Path(eprt.__file__).parent)) as calls:
                    layer(x)
            layer.close()
    cost = COSTS[pair]
    assert launched == cost.launches
    assert sorted(found) == sorted(cost.library)
    assert sum(operators.found.values()) <= cost.operators, operators.found
    assert sum(calls.values()) <= cost.calls, calls
    files = {name.partition(":")[0] for name in calls}
    assert len(files) <= cost.files, sorted(files)

"""Whole layers under CUDA graphs, and whole models, on every dispatcher: one process a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import whole_layer_jobs as jobs

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.conformance.cases import CONFIGS
from eprt.conformance.harness import WorldPool
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.models.tiny import write_tiny_checkpoint
from eprt.plan import make_plan
from eprt.support import Device

SIZE = min(4, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(SIZE < 2, reason=f"needs 2 CUDA devices: this machine has {SIZE}"),
]


@pytest.fixture(scope="module")
def pool():
    with WorldPool(SIZE, device="cuda", timeout_s=300, grace_s=2) as held:
        yield held


def refusal(dispatcher: str, executor: str) -> str:
    """Why the plan turns a pair down on this machine, or nothing."""
    runtime = RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=jobs.ROWS)
    device = Device.of(torch.device("cuda", 0))
    spec = DISPATCHERS[dispatcher]
    config, parallel = CONFIGS["gpt_oss"], ParallelConfig(SIZE)
    carries = spec.supports(config, parallel, runtime, device)
    computes = EXECUTORS[executor].supports(config, parallel, runtime, device, "bf16")
    if not carries:
        return carries.reason
    return "" if computes else computes.reason


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4", "torch_grouped"])
@pytest.mark.parametrize("dispatcher", [name for name, spec in DISPATCHERS.items() if spec.graph_safe])
def test_whole_layer_in_a_graph_with_idle_ranks(pool, dispatcher: str, executor: str) -> None:
    if reason := refusal(dispatcher, executor):
        pytest.skip(f"the plan refuses {dispatcher} + {executor}: {reason}")
    R = jobs.ROWS
    rounds = [[R] * SIZE, [3, 0, R, 1][:SIZE], [0] * SIZE, [0, 7, 0, 0][:SIZE]]
    for errors in pool.run(jobs.graph_layer, dispatcher=dispatcher, executor=executor, rounds=rounds):
        assert max(errors) <= 1e-2, errors  # bf16 tokens and outputs


@pytest.mark.parametrize("dispatcher", list(DISPATCHERS))
def test_gpt_oss_gives_the_dequantized_models_logits(pool, tmp_path: Path, dispatcher: str) -> None:
    """MXFP4 checkpoint through the planned executor, against transformers' own bf16 forward."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
    import integration_jobs

    if reason := refusal(dispatcher, "torch_grouped"):
        pytest.skip(f"the plan refuses {dispatcher}: {reason}")
    # DeepEP's hidden sizes start at 2048; the plan pads, and so does this tiny model's.
    directory = write_tiny_checkpoint(tmp_path / "tiny", hidden_size=256, intermediate_size=256)
    runtime = RuntimeConfig(dispatcher=dispatcher, max_tokens_per_rank=64)
    chosen = make_plan(CONFIGS["gpt_oss"], ParallelConfig(SIZE), runtime, Device.of(torch.device("cuda", 0)))
    errors = pool.run(
        integration_jobs.compare_checkpoint_logits,
        directory=str(directory),
        dispatcher=dispatcher,
        executor=chosen.executor,
        dtype=torch.bfloat16,
    )
    assert max(errors) <= 2e-2, errors  # two layers of bf16 against bf16, summed in another order

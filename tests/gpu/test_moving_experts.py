"""Experts that change places under a captured graph, on every graph-safe pair whose layout can move: the replays go on
with the addresses that they were captured with. The same job on gloo: tests/conformance/test_gpu_layers_on_gloo.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.gpu_cases import GRAPHS, ROUNDS, GpuCase, turned_placements
from support.cases.gpu_limits import JOB_S
from support.jobs import whole_layer_jobs as jobs

from eprt.support import Device

SIZE = min(4, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(JOB_S + 60),
    pytest.mark.skipif(SIZE < 2, reason=f"needs 2 CUDA devices: this machine has {SIZE}"),
]


def errors_of(pool, case: GpuCase, **options) -> list[list[float]]:
    if reason := case.refusal(Device.of(torch.device("cuda", 0)), SIZE):
        pytest.skip(reason)
    rounds = [counts[:SIZE] for counts in (*ROUNDS, *ROUNDS)]
    slots = turned_placements(case.config.num_experts, SIZE)
    settings = {"runtime": case.runtime, "rounds": rounds, "placements": slots, **options}
    return pool.run(jobs.replayed_layer, config=case.config, **settings)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
def test_experts_move_under_a_graph_with_idle_ranks(pool, case: GpuCase, phase: str) -> None:
    case = replace(case, runtime=replace(case.runtime, phase=phase))
    for errors in errors_of(pool, case):
        assert max(errors) <= 1e-2, errors  # bf16 tokens and outputs


def test_weights_in_another_slot_than_the_ids_say_are_seen(pool) -> None:
    case = next(case for case in GRAPHS if case.name == "symm-torch_grouped-mxfp4")
    assert max(max(errors) for errors in errors_of(pool, case, wrong_slots=True)) > 0.1

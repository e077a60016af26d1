"""Experts that change places under a captured graph, on every graph-safe pair whose layout can move: the replays go on
with the addresses that they were captured with. The same job on gloo: tests/conformance/test_gpu_layers_on_gloo.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cases.gpu_cases import GRAPHS, ROUNDS, GpuCase, turned_placements
from support.cases.gpu_ranks import SIZE, several_gpus, skip_if_refused
from support.jobs import whole_layer_jobs as jobs

pytestmark = several_gpus


def errors_of(pool, case: GpuCase, **options) -> list[list[float]]:
    skip_if_refused(case.config, case.runtime)
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

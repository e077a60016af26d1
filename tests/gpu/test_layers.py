"""Whole layers under CUDA graphs, whole models, and a second start: one process a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.builders import JOB_S
from support.cases.gpu_cases import GRAPHS, HIDDEN, INTERMEDIATE, ROUNDS, ROWS, GpuCase, graph_layer
from support.cases.gpu_ranks import SIZE, launch_here, several_gpus, skip_if_refused
from support.cases.model_checkpoints import WRITERS
from support.jobs import whole_layer_jobs as jobs

from eprt.config import RuntimeConfig
from eprt.dispatch import DISPATCHERS

pytestmark = several_gpus


@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
def test_whole_layer_in_a_graph_with_idle_ranks(pool, case: GpuCase) -> None:
    skip_if_refused(case.config, case.runtime)
    rounds = [counts[:SIZE] for counts in ROUNDS]
    for errors in pool.run(jobs.replayed_layer, config=case.config, runtime=case.runtime, rounds=rounds):
        assert max(errors) <= 1e-2, errors  # bf16 tokens and outputs


def test_int4_columns_in_activation_order(pool) -> None:
    runtime = RuntimeConfig(dispatcher="symm", executor="triton_grouped", max_tokens_per_rank=ROWS)
    rounds = [counts[:SIZE] for counts in ROUNDS]
    settings = {"config": graph_layer("int4"), "runtime": runtime, "rounds": rounds}
    for errors in pool.run(jobs.replayed_layer, **settings, another_order=True):
        assert max(errors) <= 1e-2, errors  # bf16 tokens and outputs


@pytest.mark.parametrize("dispatcher", list(DISPATCHERS))
@pytest.mark.parametrize("model", WRITERS)
def test_a_published_checkpoint_gives_the_plain_models_logits(
    pool, tmp_path: Path, record_property, model: str, dispatcher: str
) -> None:
    """MXFP4 checkpoint through the executor that the plan chooses, against transformers' own bf16 forward."""
    runtime = RuntimeConfig(dispatcher=dispatcher, max_tokens_per_rank=ROWS)
    skip_if_refused(graph_layer("mxfp4"), runtime)
    integration_jobs = pytest.importorskip("support.jobs.integration_jobs", reason="pip install 'eprt[transformers]'")
    WRITERS[model](tmp_path, hidden=HIDDEN, intermediate=INTERMEDIATE)
    found = pool.run(
        integration_jobs.compare_checkpoint_logits, folder=str(tmp_path), runtime=runtime, dtype=torch.bfloat16
    )
    errors = [error for error, *_ in found]
    record_property("executor", found[0][2])
    assert max(errors) <= 2e-2, errors  # two layers of bf16 against bf16, summed in another order
    counts = integration_jobs.PROMPTS[:SIZE]
    assert min(error for error, count in zip(errors, counts, strict=True) if count) > 0.0, "nothing compared"


@pytest.mark.timeout(2 * JOB_S + 60)
def test_a_second_start_is_quick(record_property) -> None:
    """Fresh processes; the first fills humming's cache of kernels on disk unless an earlier run has."""
    case = next(c for c in GRAPHS if (c.runtime.dispatcher, c.runtime.executor) == ("symm", "humming"))
    skip_if_refused(case.config, case.runtime)
    for start in ("first", "second"):
        found = launch_here(jobs.seconds_to_start, config=case.config, runtime=case.runtime)
        build, warm_up = (max(seconds) for seconds in zip(*found, strict=True))
        record_property(f"{start}_build_s", build)
        record_property(f"{start}_warmup_s", warm_up)
    assert warm_up < 10

"""Step graphs and layer graphs on the GPUs of one host: captured, replayed with changing counts, idle ranks and
buckets, on every dispatcher that can be captured. The jobs also run on gloo:
tests/conformance/test_step_graphs_on_gloo.py."""

from __future__ import annotations

import pytest
import torch
from support.cases.gpu_ranks import SIZE, launch_here, several_gpus, skip_if_refused
from support.jobs import lost_rank_jobs
from support.jobs import step_graph_jobs as jobs
from support.jobs.step_graph_jobs import BUCKETS, LAYERS, SCHEDULE, TOLERANCE

from eprt.config import RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.ranks.launcher import WorldFailed

GRAPH_SAFE = [name for name, spec in DISPATCHERS.items() if spec.graph_safe]
BF16 = torch.bfloat16

pytestmark = several_gpus


def runtime_or_skip(dispatcher: str, **options) -> RuntimeConfig:
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="torch_grouped", max_tokens_per_rank=32, **options)
    skip_if_refused(jobs.config_of(BF16), runtime)
    return runtime


def check(found: list[tuple[list[list[float]], list[int], int]]) -> None:
    for rank, (errors, *_) in enumerate(found):
        assert max(max(each, default=0.0) for each in errors) <= TOLERANCE[BF16], errors
        assert [bool(each) for each in errors] == [counts[rank] > 0 for counts in SCHEDULE], "nothing compared"


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("dispatcher", GRAPH_SAFE)
def test_replays_give_what_the_eager_loop_gives(pool, dispatcher: str, idle: bool) -> None:
    """Only steps over the largest bucket are walked by the host."""
    found = pool.run(jobs.decode, runtime=runtime_or_skip(dispatcher), dtype=BF16, idle=idle)
    check(found)
    for rank, (_, rows, _) in enumerate(found):
        large = [counts[rank] for counts in SCHEDULE if max(counts[:SIZE]) > BUCKETS[-1]]
        assert rows == [count or BUCKETS[0] for count in large if count or not idle], "the host walked a captured step"


def test_a_second_capture_leaves_the_caches_alone(pool) -> None:
    check(pool.run(jobs.decode, runtime=runtime_or_skip("symm"), dtype=BF16, captured_again=2))


@pytest.mark.parametrize("dispatcher", GRAPH_SAFE)
def test_a_rank_that_runs_eagerly_understands_ranks_that_replay(pool, dispatcher: str) -> None:
    found = pool.run(jobs.decode, runtime=runtime_or_skip(dispatcher), dtype=BF16, eager_rank=SIZE - 1)
    check(found)
    assert found[SIZE - 1][1] == [count for counts in SCHEDULE if (count := counts[SIZE - 1])]


@pytest.mark.parametrize("in_steps", [True, False])
@pytest.mark.parametrize("own_rank", [-1, 1])
@pytest.mark.parametrize("dispatcher", GRAPH_SAFE)
def test_layers_with_graphs_of_their_own(pool, dispatcher: str, own_rank: int, in_steps: bool) -> None:
    runtime = runtime_or_skip(dispatcher, layer_graphs=True)
    found = pool.run(jobs.decode_by_layers, runtime=runtime, dtype=BF16, in_steps=in_steps, own_rank=own_rank)
    for errors, own_errors, replays in found:
        assert max(errors + own_errors) <= 1e-2, "one layer, bf16 on both sides, rounded in another order"
        assert replays == LAYERS * len(SCHEDULE) - len(own_errors)


@pytest.mark.parametrize("dispatcher", [name for name in GRAPH_SAFE if DISPATCHERS[name].shrink])
def test_graphs_are_captured_again_by_the_ranks_that_are_left(dispatcher: str) -> None:
    """In ranks of its own: no World of theirs is whole afterwards."""
    runtime = runtime_or_skip(dispatcher, on_rank_lost="continue")
    assert launch_here(jobs.alive_changes, runtime=runtime) == [[]] * SIZE


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("dispatcher", GRAPH_SAFE)
def test_a_rank_lost_inside_a_replay_is_named(dispatcher: str, waits: bool) -> None:
    """A loop that waits by `StepGraphs.wait` raises; one that sits in torch's synchronize is taken away by the guard,
    unless a kernel of symm gave up before."""
    limit_s = lost_rank_jobs.LIMIT_S
    settings = {"runtime": runtime_or_skip(dispatcher), "victim": lost_rank_jobs.VICTIM, "waits": waits}
    with pytest.raises(WorldFailed) as failure:
        launch_here(jobs.lost_in_replay, grace_s=limit_s + 7, limit_s=limit_s, **settings)
    assert lost_rank_jobs.unheard(failure.value, may_exit=not waits) == []


@pytest.mark.parametrize("dispatcher", GRAPH_SAFE)
def test_a_world_closes_while_graphs_of_its_steps_live(dispatcher: str) -> None:
    assert launch_here(jobs.closes_before_its_graphs, runtime=runtime_or_skip(dispatcher)) == ["UsageError"] * SIZE

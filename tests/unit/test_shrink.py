"""Ranks are lost, and the others go on without them: every output afterwards is held to the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.builders import NOTHING
from support.jobs import shrink_jobs as jobs
from support.ports import free_port
from support.processes import environment, run_python

from eprt.ranks.launcher import WorldFailed, WorldPool, launch

OUT = "can't go on after ranks"


def survivors(size: int, lost: set[int], job: Any, **kwargs: Any) -> dict[int, Any]:
    """What the ranks that aren't lost returned."""
    with WorldPool(size, timeout_s=60.0, grace_s=25.0) as pool:
        try:
            pool.run(job, **kwargs)
        except WorldFailed as failed:
            found = {report.rank: report for report in failed.reports if report.rank not in lost}
            if any(report.outcome != "ok" for report in found.values()):
                raise
            return {rank: report.result for rank, report in found.items()}
    raise AssertionError("nobody died")


@pytest.mark.parametrize(
    ("dispatcher", "then", "order"),
    [("none", "continue", [2, 0, 3]), ("torch", "renormalize", [3, 1]), ("none", "renormalize", [1])],
)
def test_several_losses_one_after_another(dispatcher: str, then: str, order: list[int]) -> None:
    size = 2 if len(order) == 1 else 4
    found = survivors(size, set(order), jobs.one_after_another, dispatcher=dispatcher, then=then, order=order)
    so_far = [tuple(sorted(order[: turn + 1])) for turn in range(len(order))]
    expected = [((victim,), lost, True) for victim, lost in zip(order, so_far, strict=True)]
    assert found == dict.fromkeys(set(range(size)) - set(order), expected)


@pytest.mark.parametrize(("attention_tp", "moe_tp", "lost"), [(2, 1, (2, 3)), (1, 2, (2,)), (2, 2, (2, 3))])
def test_ranks_that_share_tokens_go_together_and_experts_need_all_their_slices(
    attention_tp: int, moe_tp: int, lost: tuple[int, ...]
) -> None:
    found = survivors(4, {2}, jobs.shared_experts_and_tokens, attention_tp=attention_tp, moe_tp=moe_tp, victim=2)
    for rank, (gone, text) in found.items():
        if rank in lost:
            assert f"rank {rank} {OUT} {list(lost)} were lost: the others go on without it" in text
        else:
            assert (gone, text) == (lost, NOTHING)


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
def test_replicas_take_over_and_nothing_is_missing(dispatcher: str) -> None:
    found = survivors(4, {1}, jobs.replicas_take_over, dispatcher=dispatcher, victim=1)
    assert found == dict.fromkeys((0, 2, 3), True)


def test_a_rank_that_wakes_up_hears_that_it_is_out() -> None:
    *rest, (heard, refused) = launch(jobs.wakes_up_too_late, 4, timeout_s=60.0, victim=3)
    assert rest == [["None"]] * 3
    assert heard.startswith("RankLost: rank 3 silent")
    assert f"RankLost: rank 3 {OUT} [3] were lost: the others go on without it" in refused


def test_the_control_store_is_not_needed() -> None:
    for found in survivors(3, {0}, jobs.without_the_store, port=free_port()).values():
        assert found == ((0,), (False, True, True))


@pytest.mark.parametrize(
    "where",
    [
        "eprt.world.board.Board.vote",
        "eprt.world.shrink.Shrinking._join_survivors",  # all others know its vote
        "eprt.world.lifecycle.control_group",
        "eprt.world.shrink.payload_group",
    ],
)
def test_a_rank_that_dies_while_the_others_find_together_is_left_out_too(where: str) -> None:
    found = survivors(4, {1, 3}, jobs.dies_while_others_shrink, where=where)
    assert found == dict.fromkeys((0, 2), ((1, 3), (True, False, True, False)))


def test_what_is_refused() -> None:
    for found in survivors(3, {1}, jobs.refusals, victim=1).values():
        nobody, inside, handle, plain, balance = found
        assert nobody.startswith("UsageError: shrink, but no rank is lost")
        assert inside.startswith("UsageError: shrink inside step 1")
        assert "combine on a handle of a step that was discarded with a lost rank" in handle
        assert "built with on_rank_lost='restart'" in plain
        assert "rebalance needs all ranks, and ranks [1] are lost" in balance


def test_graphs_new_layers_and_agreement_among_those_that_are_left() -> None:
    found = survivors(3, {1}, jobs.new_layers_graphs_and_counts, victim=1)
    for stale, values, scale, told in found.values():
        assert "StepGraphs.capture()" in stale
        assert values == [0, None, 2]
        assert scale == 0.25
        assert told == found[0][3]
        assert "(fingerprint, validate)" in told[0]
        assert [line.split()[0] for line in told[0].splitlines()[1:]] == ["rank", "0", "2"]
        assert told[1].startswith("ConfigError: dispatcher 'nothing' doesn't exist")


SCRIPT = """
import os, signal, sys
from eprt.conformance.faults.job import CheckedLayer
from eprt.errors import RankLost
from eprt.world import World
ranks = []
for rank in range(3):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": sys.argv[2]}
        os.dup2(os.open(f"{rank}", os.O_CREAT | os.O_WRONLY), 1)
        break
else:
    sys.stdout.write(str([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]))
    sys.exit()
with World.from_env("cpu", timeout_s=20) as world:
    job, step = CheckedLayer(world, "torch", "continue"), 0
    while step < 12:
        if (world.rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            job.step(step)
            step += 1
        except RankLost:
            step = world.shrink().next_step
    sys.stdout.write(f"went on as {world.alive}")
    if sys.argv[1] == "fails" and world.rank == 2:
        raise ArithmeticError("of its own")
    if sys.argv[1] == "fails":
        world.barrier()
"""


@pytest.mark.parametrize(("how", "codes"), [("ends", [0, -9, 0]), ("fails", [75, -9, 1])])
def test_a_process_that_went_on_ends_by_itself_with_its_own_code(tmp_path: Path, how: str, codes: list[int]) -> None:
    done = run_python("-c", SCRIPT, how, free_port(), cwd=tmp_path, env=environment())
    assert done.stdout == str(codes), done.stderr
    assert all("went on as (True, False, True)" in (tmp_path / rank).read_text() for rank in "02"), done.stderr


def test_who_completed_the_step_is_known_to_all() -> None:
    found = survivors(3, {2}, jobs.apart_by_a_step, victim=2)
    assert found == dict.fromkeys((0, 1), ((7, 6, -1), 8, (1, 1, 0)))


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
@pytest.mark.parametrize(("leaving", "serves"), [([2, 1], False), ([0, 3], True)])
def test_ranks_leave_on_purpose(dispatcher: str, leaving: list[int], serves: bool) -> None:
    """Rank 0, too, while it serves the control store: it stays up until the others have met."""
    port = free_port() if serves else 0
    found = launch(jobs.leave_on_purpose, 4, timeout_s=60.0, dispatcher=dispatcher, leaving=leaving, port=port)
    for rank, told in enumerate(found):
        if rank in leaving:
            assert told[-1].startswith("RankLost:")
            assert " left: went on without this rank" in told[-1]
        else:
            assert told == [((leaving[0],), 4), (tuple(sorted(leaving)), 4)]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([[2, 3], [2, 3], [0, 1], [0, 1]], "0     [2, 3] 1     [2, 3] 2     [0, 1] 3     [0, 1]"),
        ([[1], [0]], "0     [1] 1     [0]"),
        ([[3], [2, 3], [3], []], "0     [3] 1     [2, 3] 2     [3]"),
    ],
)
def test_ranks_that_name_different_leavers_all_say_so(lists: list[list[int]], said: str) -> None:
    found = launch(jobs.told_lists, len(lists), timeout_s=60.0, lists=lists)
    assert [alive for _, alive in found] == [(True,) * len(lists)] * len(lists)
    (told,) = {text for (text, _), leaving in zip(found, lists, strict=True) if leaving}
    assert told.startswith("WorldMismatch: the ranks name different `leaving`")
    assert " ".join(told.splitlines()[2:]) == said


def test_a_rank_that_the_others_went_on_without_cannot_go_on_without_them() -> None:
    *stay, (heard, _), (also, _) = launch(
        jobs.told_lists, 4, timeout_s=60.0, lists=[[2, 3], [2, 3], [0, 1], [0, 1]], later=2
    )
    assert [alive for _, alive in stay] == [(True, True, False, False)] * 2
    assert f"RankLost: rank 2 {OUT} [2, 3] were lost: the others go on without it" in heard
    assert f"RankLost: rank 3 {OUT} [2, 3] were lost: the others go on without it" in also


def test_a_rank_that_waits_for_others_to_name_leavers_is_not_stuck() -> None:
    found = survivors(4, {2}, jobs.loses_one_while_leavers_are_named)
    assert found == {0: (True, True, False, False), 1: (True, True, False, False), 3: (True,) * 4}


def test_leavers_that_are_refused() -> None:
    for rank, found in enumerate(launch(jobs.refused_leavers, 4, timeout_s=60.0)):
        unknown, flag, number, itself, half, nobody, inside = found
        assert all(text.startswith("InputError: leaving is [") for text in (unknown, flag, itself, half))
        assert "expected ranks of this World, 0 to 3" in unknown
        assert "expected ranks of this World" in flag
        assert number == "InputError: leaving is 2: expected a sequence of ranks of this World"
        assert f"on rank {rank} itself" in itself
        assert "an attention-TP group gathers" in half
        assert nobody.startswith("UsageError: shrink, but no rank is lost")
        assert rank > 1 or inside.startswith("UsageError: shrink inside step 1")


def test_generation_goes_on_and_ends() -> None:
    """Ranks that are left wait for no word of the lost one, and graphs are captured again."""
    ((heard, graphed, eager, before),) = survivors(2, {1}, jobs.generation_goes_on).values()
    assert heard.startswith("RankLost: rank 1 ")
    assert len(graphed[0]) == 6
    assert graphed == eager
    assert graphed != before, "half of the experts are gone"

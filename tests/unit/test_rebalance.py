"""Experts that change places between steps: no row is wrong, whatever moves, and what fails moves nothing."""

from __future__ import annotations

import random
import re

import pytest
from support.jobs import balance_jobs as jobs

from eprt.balance.moving import transfers
from eprt.config import ParallelConfig
from eprt.placement import EMPTY, ExpertPlacement
from eprt.ranks.launcher import WorldFailed, WorldPool

E = jobs.E


def random_slots(seed: int, num_slots: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    slots = [*range(E), *(draw.choice([EMPTY, *range(E)]) for _ in range(num_slots - E))]
    draw.shuffle(slots)
    return tuple(slots)


@pytest.mark.parametrize("executor", ["reference", "torch_grouped"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_any_placement_to_any_other(pools, executor: str, phase: str) -> None:
    for seed in range(3):
        before, after = random_slots(seed, 12), random_slots(seed + 50, 12)
        found = pools(4).run(jobs.one_move, before=before, after=after, executor=executor, phase=phase)
        assert all(all(rows) for rows, _ in found), (before, after, found)
        assert {slots for _, slots in found} == {
            sum(new not in (EMPTY, old) for old, new in zip(before, after, strict=True))
        }


def test_weights_in_another_slot_than_the_ids_say_are_seen(pools) -> None:
    found = pools(2).run(jobs.one_move, before=(*range(E), 0, 1), after=(*reversed(range(E)), 0, 1), wrong_slot=True)
    assert all(rows[0] for rows, _ in found)
    assert not all(all(rows) for rows, _ in found)


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
def test_a_world_of_one_moves_too(pools, dispatcher: str) -> None:
    found = pools(1).run(jobs.one_move, before=(*range(E), 0), after=(5, *reversed(range(E))), dispatcher=dispatcher)
    assert all(all(rows) for rows, _ in found)


def test_a_loop_of_1000_steps_with_idle_ranks(pools) -> None:
    """One layer: that several move together is seen below."""
    placements = [random_slots(seed, 12) for seed in range(5)]
    found = pools(3).run(
        jobs.running_loop,
        placements=placements,
        steps=1000,
        every=50,
        executor="torch_grouped",
        num_layers=1,
        timeout_s=110,
    )
    for wrong, rebalances, pause, slots, stayed in found:
        assert wrong == 0
        assert rebalances == 20
        assert 0 < pause < 1.0
        assert slots > 100
        assert stayed, "addresses are in captured graphs"
    assert len(set(found)) == 1


def test_with_moe_tp_each_slice_goes_to_its_own_rank(pools) -> None:
    placements = [random_slots(seed, 10) for seed in range(3)]
    found = pools(4).run(
        jobs.running_loop, placements=placements, steps=20, every=5, executor="reference", moe_tp_size=2
    )
    assert all((wrong, moves, stayed) == (0, 4, True) for wrong, moves, _, _, stayed in found)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("others", "WorldMismatch: .*layer 0"),
        ("sizes", "ConfigError: layer 0 has 10 slots, its new placement 12"),
        ("count", "ConfigError: 0 placements for 1 layers"),
        ("bytes", "CapacityError: rank 0 would stage .* bytes, most_bytes is 100"),
        ("layout", "WorldMismatch: ranks \\[1\\] hold prepared experts in other dtypes"),
        ("executor", "UnsupportedError: reference can't move experts"),
        ("plain", "UsageError: layer 0 was built with its experts in order"),
        ("step", "UsageError: rebalance inside step"),
        ("transport", "ArithmeticError: the transport broke"),
    ],
)
def test_what_fails_leaves_the_old_placement(pools, what: str, says: str) -> None:
    found = pools(2).run(jobs.refusals, what=what)
    told = {text for text, _ in found}
    assert len(told) == 1, told
    assert re.match(says, told.pop(), re.DOTALL), found
    assert all(still for _, still in found)


def test_a_rank_killed_half_way_leaves_the_old_placement_on_the_others(tmp_path) -> None:
    with WorldPool(3, grace_s=10) as pool, pytest.raises(WorldFailed, match="rank 1 was killed"):
        pool.run(jobs.killed_half_way, folder=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "RankLost True", "2": "RankLost True"}


def test_weights_come_from_the_nearest_replica() -> None:
    parallel = ParallelConfig(4, ranks_per_host=2)
    old = ExpertPlacement(4, parallel, (0, 1, 2, EMPTY, 0, 3, EMPTY, EMPTY))
    new = ExpertPlacement(4, parallel, (0, 1, 2, 0, 0, 3, 3, 0))
    # Slot 3 is on host 0 as slot 0 is; slots 6 and 7 are on rank 3, on the host of slots 4 and 5.
    assert [(t.source, t.target) for t in transfers(old, new)] == [(0, 3), (5, 6), (4, 7)]
    shared = ExpertPlacement(2, ParallelConfig(4), (0, 0, 1, 1))
    turned = ExpertPlacement(2, ParallelConfig(4), (1, 1, 0, 0))
    assert [t.source for t in transfers(shared, turned)] == [2, 3, 0, 1], "both holders send once"

"""Logical experts become slots: any placement computes what the plain one does, bit for bit."""

from __future__ import annotations

import random
import re
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builders import told_alike
from support.jobs import balance_jobs as jobs

from eprt.balance.moving import transfers
from eprt.config import MAX_RANKS, MoEConfig, ParallelConfig, Routing
from eprt.errors import ConfigError
from eprt.placement import EMPTY, ExpertPlacement, ExpertShard, SlotTable
from eprt.ranks.launcher import WorldFailed, WorldPool

E = jobs.E
CPU = torch.device("cpu")


def random_slots(seed: int, num_slots: int) -> tuple[int, ...]:
    """Every expert once, then replicas and empty slots, shuffled."""
    draw = random.Random(seed)
    slots = [*range(E), *(draw.choice([EMPTY, *range(E)]) for _ in range(num_slots - E))]
    draw.shuffle(slots)
    return tuple(slots)


PLACEMENTS = {
    "plain": (),
    "reversed": tuple(reversed(range(E))),
    "replicas of one expert on one rank": (0, 0, 1, 2, 3, 4, 5, 6, 7, EMPTY, EMPTY, EMPTY),
    **{f"random {seed}": random_slots(seed, 12) for seed in range(4)},
    "twice each": random_slots(9, 16),
}


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_any_placement_gives_the_same_bits(pools, name: str, dispatcher: str, phase: str) -> None:
    assert all(pools(4).run(jobs.placed, slots=PLACEMENTS[name], dispatcher=dispatcher, phase=phase))


@pytest.mark.parametrize("shared_words", [True, False])
def test_the_device_that_torch_makes_tensors_on_by_default_changes_nothing(pools, shared_words: bool) -> None:
    """Programs set it to "cuda"; what ranks agree through, and what a placement is computed from, stays on the host."""
    slots = (*range(E), 3, 0)
    assert pools(2).run(jobs.elsewhere_by_default, slots=slots, shared_words=shared_words) == [True] * 2


def test_an_expert_in_the_wrong_slot_is_seen(pools) -> None:
    slots = PLACEMENTS["reversed"]
    assert not all(pools(4).run(jobs.placed, slots=slots, held=(slots[1], slots[0], *slots[2:])))


def test_ranks_with_different_placements_are_told_so(pools) -> None:
    told = pools(2).run(jobs.different_placements)
    assert len(set(told)) == 1
    assert told[0].startswith("WorldMismatch")
    assert "placement" in told[0]


def test_uneven_experts_fill_the_first_ranks() -> None:
    placement = ExpertPlacement(8, ParallelConfig(3))
    assert placement.slots == (0, 1, 2, 3, 4, 5, 6, 7, EMPTY)
    assert [tuple(placement.shard(rank).experts) for rank in range(3)] == [(0, 1, 2), (3, 4, 5), (6, 7, 7)]
    config = MoEConfig(8, 2, 16, 8, routing=Routing("grouped_sigmoid", num_groups=4, topk_groups=2))
    assert placement.in_slots(config).num_experts == 9
    assert ExpertPlacement(8, ParallelConfig(4)).in_slots(config) is config
    few = ExpertPlacement(2, ParallelConfig(4))
    assert few.slots == (0, 1, EMPTY, EMPTY)
    assert few.shard(3).experts == (0,)
    started = time.process_time()
    assert ExpertPlacement(2, ParallelConfig(MAX_RANKS)).slots == (0, 1, *[EMPTY] * (MAX_RANKS - 2))
    assert time.process_time() - started < 2, "summing those before each rank took half a minute"


def test_a_plain_shard_is_the_same_value_however_it_is_made() -> None:
    assert ExpertPlacement(8, ParallelConfig(4)).shard(1) == ExpertShard(8, 2, 2)
    assert str(ExpertShard(8, 2, 2)) == "experts 2 to 3 of 8"
    assert str(ExpertPlacement(4, ParallelConfig(2), (3, 2, 1, 0)).shard(0)) == "slots 0 to 1 of 4 (experts 3, 2)"


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ((0, 1, 2, 3, 0), "5 slots can't be split evenly over 2"),
        ((0, 1, 2, 4), "slots name experts \\[4\\]: expected 0 to 3, or -1"),
        ((0, 1, 2, 2), "experts \\[3\\] have no slot"),
    ],
)
def test_what_is_no_placement(slots: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExpertPlacement(4, ParallelConfig(2), slots)
    with pytest.raises(ConfigError, match="for 4 experts, the layer has 8"):
        ExpertPlacement(4, ParallelConfig(2)).in_slots(MoEConfig(8, 2, 16, 8))


@given(
    ranks=st.sampled_from([1, 2, 4]),
    more=st.integers(0, 12),
    seed=st.integers(0, 99),
    one=st.booleans(),
    rank=st.integers(0, 3),
)
def test_ids_become_slots_of_their_own_expert(ranks: int, more: int, seed: int, one: bool, rank: int) -> None:
    num_slots = -(-(E + more) // ranks) * ranks
    placement = ExpertPlacement(E, ParallelConfig(ranks), random_slots(seed, num_slots))
    table = SlotTable(placement, CPU, one_replica=one, rank=rank)
    ids = torch.randint(-2, E + 3, (65, 4), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    slots = table.slots_of(ids)
    assert slots.dtype == torch.int32
    experts = torch.tensor([*placement.slots, E])[slots.long()]
    assert torch.equal(experts, torch.where((ids < 0) | (ids > E), E, ids).long())
    if one:
        assert all(len(set(slots[ids == e].tolist())) <= 1 for e in range(E))


def test_tokens_are_dealt_out_to_replicas_evenly_and_ranks_start_apart() -> None:
    placement = ExpertPlacement(2, ParallelConfig(2), (0, 1, 0, 1, 0, EMPTY))
    ids = torch.zeros(60, 1, dtype=torch.int32)
    dealt = [SlotTable(placement, CPU, one_replica=False, rank=rank).slots_of(ids)[:, 0] for rank in range(2)]
    assert torch.bincount(dealt[0], minlength=6).tolist() == [20, 0, 20, 0, 20, 0]
    assert dealt[0][0] != dealt[1][0]


def test_one_replica_each_spreads_the_active_experts() -> None:
    # Experts 0 and 1 live on rank 0 alone; the replicated ones go to rank 1.
    placement = ExpertPlacement(4, ParallelConfig(2), (0, 1, 2, 3, 2, 3, EMPTY, EMPTY))
    table = SlotTable(placement, CPU, one_replica=True, rank=0)
    assert table.slots_of(torch.arange(4, dtype=torch.int32)[:, None])[:, 0].tolist() == [0, 1, 4, 5]


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


def test_a_loop_of_200_steps_with_idle_ranks(pools) -> None:
    """One layer: that several move together is seen below."""
    placements = [random_slots(seed, 12) for seed in range(5)]
    found = pools(3).run(
        jobs.running_loop,
        placements=placements,
        steps=200,
        every=10,
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
        ("kind", "ConfigError: rank 1: placements \\[None\\]: expected a sequence of ExpertPlacement"),
        ("alone", "ConfigError: rank 1: layers is .*ExpertParallelMoE: expected a sequence of ExpertParallelMoE"),
        ("bytes", "CapacityError: rank 0 would stage .* bytes, most_bytes is 100"),
        ("text", "ConfigError: most_bytes '1 GB': expected int or None"),
        ("negative", "ConfigError: most_bytes -10: expected bytes from 0 on, or None"),
        ("layout", "WorldMismatch: ranks \\[1\\] hold prepared experts in other dtypes"),
        ("executor", "UnsupportedError: reference can't move experts"),
        ("plain", "UsageError: layer 0 was built with its experts in order"),
        ("single", "UnsupportedError: .*batch_invariant with replicated experts"),
        ("step", "UsageError: rebalance inside step"),
        ("transport", "ArithmeticError: the transport broke"),
    ],
)
def test_what_fails_leaves_the_old_placement(pools, what: str, says: str) -> None:
    told = told_alike(pools(2).run(jobs.refusals, what=what))
    assert re.match(says, told, re.DOTALL), told


def test_a_rank_killed_half_way_leaves_the_old_placement_on_the_others(tmp_path) -> None:
    with WorldPool(3, grace_s=10) as pool, pytest.raises(WorldFailed, match="rank 1 was killed"):
        pool.run(jobs.killed_half_way, folder=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "RankLost True", "2": "RankLost True"}


def test_weights_come_from_the_nearest_replica() -> None:
    parallel = ParallelConfig(4, ranks_per_host=2)
    old = ExpertPlacement(4, parallel, (0, 1, 2, EMPTY, 0, 3, EMPTY, EMPTY))
    new = ExpertPlacement(4, parallel, (0, 1, 2, 0, 0, 3, 3, 0))
    # Slot 3 is on host 0 as slot 0 is; slots 6 and 7 are on rank 3, on the host of slots 4 and 5.
    assert transfers(old, new) == [(0, 3), (5, 6), (4, 7)]
    shared = ExpertPlacement(2, ParallelConfig(4), (0, 0, 1, 1))
    turned = ExpertPlacement(2, ParallelConfig(4), (1, 1, 0, 0))
    assert [source for source, _ in transfers(shared, turned)] == [2, 3, 0, 1], "both holders send once"

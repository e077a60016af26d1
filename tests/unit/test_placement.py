"""Logical experts become slots: any placement computes what the plain one does, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import balance_jobs as jobs

from eprt.config import MoEConfig, ParallelConfig, Routing
from eprt.errors import ConfigError
from eprt.placement import EMPTY, ExpertPlacement, ExpertShard, SlotTable

E = jobs.E
CPU = torch.device("cpu")


def random_slots(seed: int, ranks: int, num_slots: int) -> tuple[int, ...]:
    """Every expert once, then replicas and empty slots, shuffled."""
    draw = random.Random(seed)
    slots = [*range(E), *(draw.choice([EMPTY, *range(E)]) for _ in range(num_slots - E))]
    draw.shuffle(slots)
    return tuple(slots)


PLACEMENTS = {
    "plain": (),
    "reversed": tuple(reversed(range(E))),
    "replicas of one expert on one rank": (0, 0, 1, 2, 3, 4, 5, 6, 7, EMPTY, EMPTY, EMPTY),
    **{f"random {seed}": random_slots(seed, 4, 12) for seed in range(4)},
    "twice each": random_slots(9, 4, 16),
}


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_any_placement_gives_the_same_bits(pools, name: str, dispatcher: str, phase: str) -> None:
    assert all(pools(4).run(jobs.placed, slots=PLACEMENTS[name], dispatcher=dispatcher, phase=phase))


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
def test_experts_need_not_divide_over_the_ranks(pools, dispatcher: str) -> None:
    assert all(pools(3).run(jobs.placed, slots=(), dispatcher=dispatcher))


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
    assert [placement.shard(rank).experts for rank in range(3)] == [(0, 1, 2), (3, 4, 5), (6, 7, 7)]
    config = MoEConfig(8, 2, 16, 8, routing=Routing("grouped_sigmoid", num_groups=4, topk_groups=2))
    assert placement.in_slots(config).num_experts == 9
    assert ExpertPlacement(8, ParallelConfig(4)).in_slots(config) is config
    few = ExpertPlacement(2, ParallelConfig(4))
    assert few.slots == (0, 1, EMPTY, EMPTY)
    assert few.shard(3).experts == (0,)


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
    placement = ExpertPlacement(E, ParallelConfig(ranks), random_slots(seed, ranks, num_slots))
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

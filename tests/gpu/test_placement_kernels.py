"""The kernels that make ids of experts ids of slots, and count them, on one device, against torch on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from support.builders import recorded
from support.stand_ins.kernel_device import DEVICE, cuda_only, runs_kernels, synchronize

from eprt.config import ParallelConfig
from eprt.placement import EMPTY, ExpertPlacement, SlotTable
from eprt.placement.ids_triton import count_ids, slots_of

pytestmark = [pytest.mark.gpu, runs_kernels]

CPU = torch.device("cpu")
SHAPES = [(0, 4), (1, 1), (7, 3), (300, 8)]


def placed(E: int, ranks: int, more: int, seed: int) -> ExpertPlacement:
    """Every expert once, then replicas, some experts many and some none, and empty slots, shuffled."""
    draw = random.Random(seed)
    slots = [*range(E), *(draw.choice([EMPTY, 0, 0, *range(E)]) for _ in range(-(-(E + more) // ranks) * ranks - E))]
    draw.shuffle(slots)
    return ExpertPlacement(E, ParallelConfig(ranks), tuple(slots))


class Both:
    """One table for the kernel and one for torch, which see the same changes."""

    def __init__(self, placement: ExpertPlacement, *, one_replica: bool, rank: int = 0) -> None:
        self.tables = [SlotTable(placement, d, one_replica=one_replica, rank=rank) for d in (DEVICE, CPU)]

    def agree(self, ids: torch.Tensor) -> bool:
        ours, torchs = self.tables
        found = slots_of(ids.to(DEVICE), ours._slots, ours._replicas, ours._first)
        synchronize()
        wanted = torchs.slots_of(ids)
        return found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted)


def drawn(E: int, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randint(-2, E + 3, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("E", "ranks", "more"), [(1, 2, 1), (8, 4, 0), (8, 1, 5), (127, 2, 17), (384, 4, 32)])
@pytest.mark.parametrize("one_replica", [True, False])
def test_slots_are_those_of_torch(one_replica, E, ranks, more, shape):
    for rank in range(min(ranks, 2)):
        both = Both(placed(E, ranks, more, seed=E), one_replica=one_replica, rank=rank)
        assert both.agree(drawn(E, shape))


@pytest.mark.parametrize("one_replica", [True, False])
def test_any_ids_that_torch_takes(one_replica):
    both = Both(placed(8, 4, 9, seed=3), one_replica=one_replica)
    ids = drawn(8, (40, 6))
    assert both.agree(ids[:, 1:5])
    assert both.agree(ids[3:])
    assert both.agree(ids.flatten()[1:].view(-1, 1))  # starts where no kernel would
    far = ids.long()
    far[::3, 0] += 1 << 40
    assert both.agree(far)


@pytest.mark.parametrize("one_replica", [True, False])
def test_a_table_that_changes_is_read_as_it_is_now(one_replica):
    both, ids = Both(placed(8, 4, 9, seed=0), one_replica=one_replica), drawn(8, (65, 4))
    assert both.agree(ids)
    for change in (
        lambda table: table.update(placed(8, 4, 9, seed=1)),
        lambda table: table.follow((True, True, True, False)),
        lambda table: table.update(placed(8, 4, 9, seed=2)),
        lambda table: table.follow((True,) * 4),
    ):
        before = both.tables[1].slots_of(ids)
        for table in both.tables:
            change(table)
        assert both.agree(ids)
        assert not torch.equal(both.tables[1].slots_of(ids), before)


@pytest.mark.parametrize("one_replica", [True, False])
def test_a_wrong_slot_is_seen(one_replica):
    both, ids = Both(placed(8, 4, 9, seed=0), one_replica=one_replica), drawn(8, (65, 4))
    both.tables[0]._slots[5, 0] += 1
    assert not both.agree(ids)
    if not one_replica:
        both = Both(placed(8, 4, 9, seed=0), one_replica=False)
        both.tables[0]._first += 1
        assert not both.agree(ids)


@cuda_only
@pytest.mark.parametrize("one_replica", [True, False])
def test_a_captured_graph_follows_the_table(one_replica):
    both, ids = Both(placed(8, 4, 9, seed=0), one_replica=one_replica), drawn(8, (65, 4))
    ours, torchs = both.tables
    given = ids.to(DEVICE)
    assert torch.equal(slots_of(given, ours._slots, ours._replicas, ours._first), ours.slots_of(given))
    found, replay = recorded(lambda: ours.slots_of(given), DEVICE)
    for seed in range(3):
        for table in both.tables:
            table.update(placed(8, 4, 9, seed=seed))
            table.follow((True, True, True, seed != 1))
        replay()
        assert torch.equal(found.cpu(), torchs.slots_of(ids))


@pytest.mark.parametrize("E", [1, 8, 127, 128, 384])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 4), (600, 8)])
def test_every_id_of_an_expert_counts_once(E, shape):
    draw = torch.Generator().manual_seed(E)
    ids = torch.randint(-2, E + 3, shape, generator=draw).to(torch.int32)
    before = torch.randint(1 << 40, (E,), generator=draw)
    counts = before.to(DEVICE, copy=True)
    for times in (1, 2):
        count_ids(ids.to(DEVICE), counts)
        synchronize()
        expected = before + times * (ids.flatten()[:, None] == torch.arange(E)).sum(0)
        assert torch.equal(counts.cpu(), expected)


def test_a_view_is_read_as_it_looks():
    ids = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)[:, :2]
    counts = torch.zeros(12, dtype=torch.int64, device=DEVICE)
    count_ids(ids, counts)
    synchronize()
    assert counts.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]

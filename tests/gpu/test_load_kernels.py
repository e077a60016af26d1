"""The kernel that counts how often each expert is chosen, on one device."""

from __future__ import annotations

import pytest
import torch
from support.stand_ins.kernel_device import DEVICE, runs_kernels, synchronize

from eprt.load.count_triton import count_ids

pytestmark = [pytest.mark.gpu, runs_kernels]


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

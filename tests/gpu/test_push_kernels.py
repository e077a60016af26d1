"""The kernel that measures the link, on one device: every word arrives at every place."""

from __future__ import annotations

import pytest
import torch
from support.stand_ins.kernel_device import DEVICE, runs_kernels, synchronize

from eprt.bench.push_triton import push

pytestmark = [pytest.mark.gpu, runs_kernels]


@pytest.mark.parametrize(("words", "peers", "ctas"), [(1, 1, 1), (5000, 3, 1), (5000, 3, 2), (4096, 2, 8)])
def test_every_word_arrives(words, peers, ctas):
    source = torch.randint(1 << 62, (words,), device=DEVICE)
    targets = [torch.full((words + 2,), -1, device=DEVICE) for _ in range(peers)]
    push(source, torch.tensor([target.data_ptr() for target in targets], device=DEVICE), ctas)
    synchronize()
    for target in targets:
        assert torch.equal(target[:words], source)
        assert target[words:].eq(-1).all()

"""The permute kernels against the plain torch code of `eprt.experts.permute`, on one GPU or interpreted on the CPU.

Nothing that isn't local may be read: hidden rows without a local expert are NaN, and so are weights of foreign slots
and sorted rows past the last.
"""

from __future__ import annotations

import pytest
import torch
from support.stand_ins.kernel_device import DEVICE, runs_kernels, sized

from eprt.experts import permute, permute_triton, sort_by_expert_triton

pytestmark = [pytest.mark.gpu, runs_kernels]

SMALL = [(1, 1, 4, 0, 4, 24), (5, 3, 6, 2, 2, 2880), (6, 6, 40, 13, 5, 77), (3, 5, 11, 0, 11, 1100)]
LARGE = sized(
    [(1500, 4, 128, 96, 32, 40), (3000, 8, 256, 0, 256, 136), (700, 6, 24, 7, 5, 77)],
    [(40, 10, 128, 96, 32, 40), (20, 12, 256, 0, 256, 136), (50, 6, 24, 7, 5, 77)],
)
# A GPU fuses the multiplication and the addition of a sum of at most 12 terms; bf16 keeps 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def routing(N, E, K):
    """ids [N, K]: different experts, E (no expert), and rows that are all padding or hold an id below 0."""
    ids = torch.rand(N, E + 1, generator=torch.Generator().manual_seed(N)).argsort(1)[:, :K].to(torch.int32)
    ids[3::4] = E
    ids[4::5, 0] = -1
    return ids


def check(N, K, first, L, H, ids, out_dtype=torch.float32, x_dtype=torch.float32):
    generator = torch.Generator().manual_seed(H)
    local = (ids >= first) & (ids < first + L)
    hidden = torch.randn(N, H, generator=generator).to(x_dtype)
    hidden[~local.any(1)] = float("nan")
    weights = torch.rand(N, K, generator=generator)
    weights[~local] = float("nan")

    wanted_rows, wanted = permute.group_rows(hidden, ids, first, L, torch.bfloat16)
    rows, offsets, place = permute_triton.group_rows(hidden.to(DEVICE), ids.to(DEVICE), first, L, torch.bfloat16)
    count = int(local.sum())
    assert int(wanted.offsets[-1]) == count
    for found in ((offsets, place), sort_by_expert_triton.sort_by_expert(ids.to(DEVICE), first, L)):
        assert torch.equal(found[0].cpu(), wanted.offsets)
        assert torch.equal(found[1].cpu(), wanted.place)
    assert torch.equal(rows[:count].cpu(), wanted_rows[:count])

    results = torch.randn(N * K, H, generator=generator).bfloat16()
    results[count:] = float("nan")
    for every_row in (True, False):
        out, expected = torch.full((N, H), 7.0, dtype=out_dtype, device=DEVICE), torch.full((N, H), 7.0).to(out_dtype)
        permute_triton.weighted_unpermute(results.to(DEVICE), place, weights.to(DEVICE), out, every_row)
        permute.weighted_unpermute(results, wanted, weights, expected, every_row=every_row)
        tolerance = TOLERANCE[out_dtype]
        torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("N", "K", "E", "first", "L", "H"), SMALL)
def test_one_launch_sorts_few_slots(N, K, E, first, L, H):
    check(N, K, first, L, H, routing(N, E, K))


@pytest.mark.parametrize(("N", "K", "E", "first", "L", "H"), LARGE)
def test_histograms_sort_many_slots(N, K, E, first, L, H, monkeypatch):
    monkeypatch.setattr(permute_triton, "SMALL_IDS", sized(permute_triton.SMALL_IDS, 16))
    check(N, K, first, L, H, routing(N, E, K))


@pytest.mark.parametrize("small_slots", [0, 4096])
@pytest.mark.parametrize("expert", [7, 8, -1, 3], ids=["foreign", "no expert", "below 0", "one expert gets all"])
def test_all_slots_alike(expert, small_slots, monkeypatch):
    monkeypatch.setattr(permute_triton, "SMALL_IDS", small_slots)
    check(6, 3, 2, 3, 40, torch.full((6, 3), expert, dtype=torch.int32))


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_dtypes(x_dtype, out_dtype):
    check(9, 4, 4, 4, 1030, routing(9, 8, 4), out_dtype, x_dtype)


@pytest.mark.parametrize("weight", [1e6, float("inf"), float("nan")])
def test_a_slot_without_an_expert_adds_nothing_whatever_its_weight(weight):
    """By hand: row 0 is 0.5 * 8 + 2 * 3, row 1 has no local slot, row 2 is -1 * 4."""
    ids = torch.tensor([[1, 9, 0], [9, 9, 9], [5, 1, 9]], dtype=torch.int32, device=DEVICE)
    offsets, place = sort_by_expert_triton.sort_by_expert(ids, 0, 2)
    assert offsets.tolist() == [0, 1, 3]
    assert place.tolist() == [[1, -1, 0], [-1, -1, -1], [-1, 2, -1]]
    rows = torch.tensor([3.0, 8.0, 4.0] + [float("nan")] * 6, device=DEVICE)[:, None].expand(9, 24).contiguous()
    weights = torch.tensor([[0.5, weight, 2.0], [weight] * 3, [weight, -1.0, weight]], device=DEVICE)
    out = torch.full((3, 24), 7.0, device=DEVICE)
    permute_triton.weighted_unpermute(rows, place, weights, out, every_row=False)
    assert out[:, 5].tolist() == [10.0, 7.0, -4.0]
    permute_triton.weighted_unpermute(rows, place, weights, out, every_row=True)
    assert out[:, 23].tolist() == [10.0, 0.0, -4.0]

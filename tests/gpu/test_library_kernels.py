"""Our own kernels around FlashInfer's and DeepEP's, against plain torch, on one GPU or interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.stand_ins.kernel_device import DEVICE, INTERPRETED, generator, runs_kernels, sized

from eprt.dispatch.library_triton import mask_foreign_ids, pack_tokens

pytestmark = [pytest.mark.gpu, runs_kernels]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Comparable whatever the dtype, NaN included."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("W", "R", "K"), [(1, 1, 1), (4, 1, 4), (4, 33, 8), (3, 64, 6), (8, 512, 22)])
@pytest.mark.parametrize("pdl", [True, False])
def test_ids_of_absent_rows_and_of_other_ranks_become_invalid(W, R, K, pdl):
    if pdl and (INTERPRETED or torch.cuda.get_device_capability()[0] < 9):
        pytest.skip("programmatic dependent launch needs compute capability 9: its instructions are inline PTX")
    E, first, end = 64, 16, 32
    ids = torch.randint(0, E + 1, (W, R, K), device=DEVICE, dtype=torch.int32, generator=generator(W * R))
    counts = torch.randint(0, R + 1, (W,), device=DEVICE, dtype=torch.int32, generator=generator(K))
    filled = torch.arange(R, device=DEVICE)[None, :, None] < counts[:, None, None]
    stale = torch.randint_like(ids, -(2**31), 2**31 - 1)  # bytes of another step may say anything, a local id too
    ids = torch.where(filled | (stale % 2 == 0), ids, stale)
    expected = torch.where(filled & (ids >= first) & (ids < end), ids, E)
    mask_foreign_ids(ids, counts, first, end, E, pdl)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize(("H", "width"), [(128, 2048), (2880, 3072), (4100, 5120), (7168, 7168)])
@pytest.mark.parametrize(("T", "K"), [(0, 4), (1, 1), (5, 3), (sized(1024, 30), 11)])
def test_rows_are_padded_with_zeros_and_ids_widened(T, K, H, width):
    E = 128
    x = torch.randn(T, H, device=DEVICE, generator=generator(T)).bfloat16()
    ids = torch.randint(0, E + 1, (T, K), device=DEVICE, dtype=torch.int32, generator=generator(K))
    rows, wide_ids = pack_tokens(x, ids, width, E)
    assert rows.shape == (T, width)
    assert torch.equal(rows[:, :H], x)
    assert int(rows[:, H:].count_nonzero()) == 0
    assert torch.equal(wide_ids, torch.where(ids < E, ids.long(), -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize(
    ("L", "M", "columns", "width", "ctas"),
    [
        (1, 1, 23, 24, 1024),
        (3, 7, 128, 2048, 1024),
        (4, sized(96, 11), 2880, 3072, 16),  # a CTA has several rows
        sized((1200, 2, 24, 24, 1024), (5, 3, 24, 24, 4)),  # more slabs than CTAs
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_valid_rows_alone_are_copied(L, M, columns, width, ctas, dtype, swapped, monkeypatch):
    from eprt import expert_major_triton

    monkeypatch.setattr(expert_major_triton, "COPY_CTAS", ctas)
    values = torch.randn(L, M, width, device=DEVICE, generator=generator(L)).to(dtype)
    source = values.mT.contiguous().mT[..., :columns] if swapped else values[..., :columns]
    counts = torch.randint(0, M + 1, (L,), device=DEVICE, dtype=torch.int32, generator=generator(M))
    counts[0], counts[-1] = M, min(M, L - 1)
    valid = torch.arange(M, device=DEVICE)[None, :, None] < counts[:, None, None]
    for target in (
        torch.ones(L, M, columns, device=DEVICE).to(dtype),
        torch.ones(L, M, width, device=DEVICE).to(dtype)[..., :columns],
        torch.ones(L, columns, M, device=DEVICE).to(dtype).mT,
    ):
        words = torch.uint8 if dtype.itemsize == 1 else dtype
        expert_major_triton.copy_valid_rows(source.view(words), target.view(words), counts)
        expected = torch.where(valid, source.float(), torch.ones((), device=DEVICE)).to(dtype)
        assert torch.equal(as_bytes(target), as_bytes(expected))

"""Expert-major rows that lie further apart than they are wide: read and written in place, or copied where valid."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from support.cases.expert_cases import (
    CPU,
    GPT_OSS,
    NAN,
    RUNTIME,
    make_config,
    make_dense,
    make_expert_major,
    make_flat,
    shard_of,
    valid_rows,
)

from eprt import expert_major
from eprt.conformance.oracle import relative_error
from eprt.experts.reference import ReferenceExecutor
from eprt.experts.torch_grouped import GroupedExecutor
from eprt.quant import encode_payload
from eprt.tokens import ExpertMajorTokens

H, WIDTH = 96, 128


class DenseOnly(ReferenceExecutor):
    strided: ClassVar = False

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        assert tokens.hidden.data.is_contiguous()
        assert out.is_contiguous()
        super()._expert_major(tokens, out)


def spread(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, NaN behind each."""
    wide = torch.full((*rows.shape[:2], WIDTH), NAN).to(rows.dtype)
    wide[..., : rows.shape[2]] = rows
    return wide[..., : rows.shape[2]]


@pytest.mark.parametrize("kind", [ReferenceExecutor, GroupedExecutor, DenseOnly])
@pytest.mark.parametrize("payload", ["bf16", "fp8_block"])
@pytest.mark.parametrize("apart", ["tokens", "outputs", "both"])
def test_rows_far_apart_give_what_dense_rows_give(kind, payload: str, apart: str):
    config = make_config(activation=GPT_OSS, bias=True)
    shard = shard_of(config)
    executor = kind(config, shard, make_dense(config), CPU, RUNTIME)
    tokens = make_expert_major(make_flat(config, dtype=torch.bfloat16), shard)
    tokens = replace(tokens, hidden=encode_payload(tokens.hidden.data, payload))
    expected, valid = executor(tokens), valid_rows(tokens)
    out = torch.full_like(expected, NAN)
    if apart != "outputs":
        tokens = replace(tokens, hidden=replace(tokens.hidden, data=spread(tokens.hidden.data)))
    if apart != "tokens":
        out = spread(out)
    assert executor(tokens, out) is out
    assert relative_error(out[valid], expected[valid]) < 1e-6
    if apart != "tokens":
        assert out.as_strided((*out.shape[:2], WIDTH - H), out.stride(), H).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_valid_rows_alone_are_copied(dtype: torch.dtype):
    source = spread(torch.randn(3, 5, H)).to(dtype)
    counts = torch.tensor([5, 0, 2], dtype=torch.int32)
    target = torch.zeros(3, 5, WIDTH).to(dtype)
    expert_major.copy_valid_rows(source, target[..., :H], counts)
    valid = (torch.arange(5) < counts[:, None])[..., None]
    assert torch.equal(target[..., :H].float(), torch.where(valid, source.float(), 0.0))
    assert not target[..., H:].float().any()
    swapped = torch.zeros(3, H, 5).to(dtype).mT
    expert_major.copy_valid_rows(source, swapped, counts)
    assert torch.equal(swapped.float(), target[..., :H].float())


def test_dense_slabs_stay_where_they_are():
    rows, counts = torch.randn(2, 4, H), torch.tensor([4, 1], dtype=torch.int32)
    assert expert_major.dense(rows, counts) is rows
    dense = expert_major.dense(spread(rows), counts)
    assert dense.is_contiguous()
    assert torch.equal(dense[0], rows[0])
    assert torch.equal(dense[1, :1], rows[1, :1])

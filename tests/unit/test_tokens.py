"""The shared language: what `check` refuses, the way between the two formats, and adapters around executors."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import expert_cases as cases

from eprt import expert_major
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.errors import ConfigError, InputError
from eprt.expert_major import expert_major_from_flat, flat_from_expert_major, weighted_sum
from eprt.experts import EXECUTORS, executor_spec, make_executor
from eprt.experts.base import AdaptedExecutor, unsupported_format
from eprt.experts.reference import ReferenceExecutor
from eprt.experts.torch_grouped import GroupedExecutor
from eprt.placement import ExpertShard
from eprt.quant import decode_payload, encode_payload
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, TopK, merge_repeats


def topk(**changes) -> TopK:
    return replace(TopK(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)), **changes)


def test_topk_values():
    good = topk(ids=torch.tensor([[0, 3], [4, 4], [1, 2]], dtype=torch.int32))
    good.check_ids(4)
    good.check_weights()
    for low_or_high in (-1, 5):
        bad = good.ids.clone()
        bad[1, 1] = low_or_high
        with pytest.raises(InputError, match=r"topk_ids spans .*expected \[0, 4\)"):
            TopK(bad, good.weights).check_ids(4)
    with pytest.raises(InputError, match="2 non-finite values of 6"):
        topk(weights=torch.tensor([[0.0, cases.NAN], [1.0, float("inf")], [0.0, 1.0]])).check_weights()
    empty = good.narrow(0, 0)
    empty.check(2)
    empty.check_ids(4)
    empty.check_weights()


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Payload(torch.zeros(3, 32), "bf16"), r"bf16 payload is \(3, 32\) float32"),
        (Payload(torch.zeros(3, 32), "f32", torch.zeros(3, 1)), "carries a scale"),
        (Payload(torch.zeros(3, 200).to(E4M3), "fp8_block"), r"shape \(3, 2\), got None"),
        (Payload(torch.zeros(3, 200).to(E4M3), "fp8_block", torch.zeros(3, 1)), r"shape \(3, 2\)"),
        (Payload(torch.zeros(3, 16, dtype=torch.uint8), "nvfp4", torch.zeros(3, 1).to(E4M3)), r"shape \(3, 2\)"),
    ],
)
def test_payload_check_refuses(bad: Payload, message: str):
    with pytest.raises(InputError, match=message):
        bad.check()


def test_flat_check():
    good = cases.make_flat(cases.make_config())
    good.check()
    cases.make_flat(cases.make_config(), 0).check()
    for bad, message in [
        (replace(good, ids=good.ids.long()), r"flat ids .*int64.*expected \[13, K\] int32"),
        (replace(good, ids=good.ids[1:]), r"flat ids are \(12, 2\)"),
        (replace(good, weights=good.weights.double()), r"flat weights .*float64"),
        (replace(good, weights=good.weights[:, :1]), r"flat weights are \(13, 1\)"),
        (replace(good, weights=good.weights.to("meta")), "span devices"),
        (replace(good, hidden=replace(good.hidden, format="bf16")), "bf16 payload"),
    ]:
        with pytest.raises(InputError, match=message):
            bad.check()


def test_expert_major_check():
    config = cases.make_config()
    good = cases.make_expert_major(cases.make_flat(config), cases.shard_of(config))
    good.check()
    for bad, message in [
        (replace(good, counts=good.counts.long()), r"counts are \(4,\) int64"),
        (replace(good, counts=good.counts[:3]), r"counts are \(3,\).*expected \[4\]"),
        (replace(good, hidden=Payload.plain(torch.zeros(4, 96))), r"expected \[L, M, H\]"),
    ]:
        with pytest.raises(InputError, match=message):
            bad.check()


@st.composite
def routed(draw, payload: str = "f32") -> tuple[FlatTokens, ExpertShard]:
    """Any routing: empty, idle rows, experts of other ranks, an expert named twice; garbage where nothing is valid."""
    num_local = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 3))
    E, K, N = num_local * ranks, draw(st.integers(1, 4)), draw(st.integers(0, 8))
    shard = ExpertShard(E, draw(st.integers(0, ranks - 1)) * num_local, num_local)
    rows = draw(st.lists(st.lists(st.integers(0, E), min_size=K, max_size=K), min_size=N, max_size=N))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ids = torch.tensor(rows, dtype=torch.int32).view(N, K)
    weights = torch.rand(N, K, generator=generator) + 0.5
    weights[ids == E] = cases.NAN
    hidden = torch.randn(N, 32, generator=generator)
    hidden[(ids == E).all(1)] = cases.NAN
    return FlatTokens(encode_payload(hidden, payload), ids, weights, E), shard


def local_weights(flat: FlatTokens, shard: ExpertShard) -> torch.Tensor:
    local = (flat.ids >= shard.first_expert) & (flat.ids < shard.end_expert)
    return torch.where(local, flat.weights, 0.0)


def by_expert(flat: FlatTokens, shard: ExpertShard) -> torch.Tensor:
    """Expert e multiplies by 1 + e: through slabs and back, with garbage where no row is."""
    slabs, place = expert_major_from_flat(flat, shard, flat.ids.numel())
    slabs.hidden.data[~cases.valid_rows(slabs)] = cases.NAN
    expert = torch.arange(shard.first_expert, shard.end_expert)[:, None, None]
    return weighted_sum(slabs.hidden.data * (1 + expert), place, flat.weights)


@settings(deadline=None)
@given(routed())
def test_every_row_meets_its_own_expert(case: tuple[FlatTokens, ExpertShard]):
    flat, shard = case
    factor = (local_weights(flat, shard) * (1 + flat.ids)).sum(1, keepdim=True)
    expected = torch.where(factor > 0, flat.hidden.data * factor, 0.0)
    found = by_expert(flat, shard)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    # The mutant: ids shifted by one inside the shard.
    local = local_weights(flat, shard) > 0
    shifted = torch.where(
        local, (flat.ids - shard.first_expert + 1) % shard.num_local_experts + shard.first_expert, flat.ids
    )
    wrong = torch.where(local, (shifted - flat.ids) * flat.weights, 0.0).sum(1)
    moved = by_expert(replace(flat, ids=shifted), shard)
    assert ((moved - found).norm(dim=1) > 1e-3)[wrong.abs() > 0.05].all()


@settings(deadline=None)
@pytest.mark.parametrize("payload", ["bf16", "fp8_block", "nvfp4"])
@given(data=st.data())
def test_slabs_hold_the_rows_bytes(payload: str, data: st.DataObject):
    flat, shard = data.draw(routed(payload))
    slabs, place = expert_major_from_flat(flat, shard, flat.ids.numel())
    slabs.check()
    assert slabs.hidden.format == payload
    assert slabs.hidden.global_scale is flat.hidden.global_scale
    seen = torch.zeros(shard.num_local_experts, dtype=torch.int32)
    for row, slot in torch.cartesian_prod(torch.arange(flat.num_rows), torch.arange(flat.ids.shape[1])).tolist():
        there = int(place[row, slot])
        expert = int(flat.ids[row, slot]) - shard.first_expert
        if not 0 <= expert < shard.num_local_experts:
            assert there == -1
            continue
        assert divmod(there, flat.ids.numel()) == (expert, int(seen[expert])), "row order within an expert"
        seen[expert] += 1
        for source, target in [(flat.hidden.data, slabs.hidden.data), (flat.hidden.scale, slabs.hidden.scale)]:
            if source is not None:
                assert torch.equal(source[row].view(torch.uint8), target.flatten(0, 1)[there].view(torch.uint8))
    assert torch.equal(seen, slabs.counts)


@settings(deadline=None)
@given(routed())
def test_slabs_as_flat_rows(case: tuple[FlatTokens, ExpertShard]):
    flat, shard = case
    slabs, _ = expert_major_from_flat(flat, shard, 5 + flat.ids.numel())
    rows = flat_from_expert_major(slabs, shard)
    rows.check()
    L, M = slabs.hidden.data.shape[:2]
    assert rows.ids.shape == (L * M, 1)
    for e, count in enumerate(slabs.counts.tolist()):
        ids = rows.ids.view(L, M)[e]
        assert (ids[:count] == shard.first_expert + e).all()
        assert (ids[count:] == shard.num_experts).all()
    assert (rows.weights == 1).all()
    assert rows.hidden.data.data_ptr() == slabs.hidden.data.data_ptr(), "a view"


class FlatOnly(ReferenceExecutor):
    spec: ClassVar = replace(executor_spec("reference"), name="flat_only", formats=("flat",))

    def _expert_major(self, tokens, out):
        raise unsupported_format("flat_only", "expert_major")


class ExpertMajorOnly(ReferenceExecutor):
    spec: ClassVar = replace(executor_spec("reference"), name="expert_major_only", formats=("expert_major",))

    def _flat(self, tokens, out):
        raise unsupported_format("expert_major_only", "flat")


def test_an_unadapted_executor_refuses_the_other_format():
    config = cases.make_config()
    flat = cases.make_flat(config)
    weights, shard = cases.make_dense(config), cases.shard_of(config)
    with pytest.raises(ConfigError, match="no native flat path"):
        ExpertMajorOnly(config, shard, weights, cases.CPU, cases.RUNTIME)(flat)
    with pytest.raises(ConfigError, match="no native expert_major path"):
        FlatOnly(config, shard, weights, cases.CPU, cases.RUNTIME)(cases.make_expert_major(flat, shard))


@pytest.mark.parametrize("kind", [FlatOnly, ExpertMajorOnly])
@pytest.mark.parametrize("payload", ["f32", "bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_adapted_executor_equals_a_native_one(kind, payload: str, world_size: int):
    config = cases.make_config(activation=cases.GPT_OSS, bias=True)
    # bf16 results are rounded once more, before the weighted sum, by an expert-major executor.
    tolerance = 1e-6 if payload == "f32" else 2**-8
    for rank in range(world_size):
        shard = cases.shard_of(config, rank, world_size)
        weights = shard_weights(cases.make_dense(config), config, shard)
        native = ReferenceExecutor(config, shard, weights, cases.CPU, cases.RUNTIME)
        adapted = AdaptedExecutor(kind(config, shard, weights, cases.CPU, cases.RUNTIME))
        flat = cases.make_flat(config)
        slabs = cases.make_expert_major(flat, shard)
        flat = replace(flat, hidden=encode_payload(flat.hidden.data, payload), every_row_read=True)
        slabs = replace(slabs, hidden=encode_payload(slabs.hidden.data, payload))
        out = torch.full_like(decode_payload(flat.hidden), cases.NAN)
        assert relative_error(adapted(flat, out), native(flat)) < tolerance
        assert (out[~cases.rows_with_expert(flat, shard)] == 0).all()
        valid = cases.valid_rows(slabs)
        wide = torch.full((*decode_payload(slabs.hidden).shape[:2], 2 * 96), cases.NAN, dtype=out.dtype)
        adapted(slabs, wide[..., :96])  # not contiguous
        assert relative_error(wide[..., :96][valid], native(slabs)[valid]) < tolerance
        assert wide[..., 96:].isnan().all()


@pytest.mark.parametrize("kind", [FlatOnly, ExpertMajorOnly])
def test_adapted_executor_takes_zero_rows_and_says_what_it_is(kind):
    config = cases.make_config()
    shard = cases.shard_of(config)
    adapted = AdaptedExecutor(kind(config, shard, cases.make_dense(config), cases.CPU, cases.RUNTIME))
    assert adapted.spec.formats == ("flat", "expert_major")
    assert adapted.spec.name == kind.spec.name
    assert len(kind.spec.formats) == 1, "the inner executor's own spec is left alone"
    assert adapted(cases.make_flat(config, 0)).shape == (0, 96)
    empty = ExpertMajorTokens(Payload.plain(torch.empty(4, 3, 96).fill_(cases.NAN)), torch.zeros(4, dtype=torch.int32))
    assert adapted(empty).shape == (4, 3, 96)


@settings(deadline=None)
@given(routed())
def test_merging_repeats_keeps_the_weighted_sum(case: tuple[FlatTokens, ExpertShard]):
    flat, shard = case
    merged = merge_repeats(flat)
    merged.check()
    for row in merged.ids.tolist():
        valid = [e for e in row if e < flat.num_experts]
        assert len(valid) == len(set(valid))
    torch.testing.assert_close(by_expert(merged, shard), by_expert(flat, shard), rtol=1e-6, atol=1e-5)


def test_adapter_holds_rows_that_name_one_expert_in_every_slot():
    config = cases.make_config(top_k=4)
    shard, weights = cases.shard_of(config), cases.make_dense(config)
    ids = torch.tensor([[1, 1, 1, 1], [1, 3, 1, 3], [1, 1, 0, 1]], dtype=torch.int32)
    flat = FlatTokens(Payload.plain(torch.randn(3, 96)), ids, torch.rand(3, 4), config.num_experts)
    adapted = AdaptedExecutor(ExpertMajorOnly(config, shard, weights, cases.CPU, cases.RUNTIME))
    native = ReferenceExecutor(config, shard, weights, cases.CPU, cases.RUNTIME)
    assert relative_error(adapted(flat), native(flat)) < 1e-6


@pytest.mark.parametrize("native", ["flat", "expert_major"])
def test_make_executor_adapts_only_what_is_lacking(native: str, monkeypatch):
    monkeypatch.setitem(EXECUTORS, "reference", replace(executor_spec("reference"), formats=(native,)))
    config = cases.make_config("bf16")
    shard, flat = cases.shard_of(config), replace(cases.make_flat(config, dtype=torch.bfloat16), every_row_read=True)
    arguments = ("reference", config, shard, cases.make_weights(config), cases.CPU, cases.RUNTIME)
    other = "flat" if native == "expert_major" else "expert_major"
    assert type(make_executor(*arguments)) is ReferenceExecutor
    assert type(make_executor(*arguments, token_format=native)) is ReferenceExecutor
    adapted = make_executor(*arguments, token_format=other)
    assert type(adapted) is AdaptedExecutor
    assert relative_error(adapted(flat), make_executor(*arguments)(flat)) < 2**-8
    monkeypatch.undo()
    assert type(make_executor(*arguments, token_format=other)) is ReferenceExecutor


# ---- expert-major rows that lie further apart than they are wide: in place, or copied where valid --------------------

H, WIDTH = 96, 128


class DenseOnly(ReferenceExecutor):
    strided: ClassVar = False

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        assert tokens.hidden.data.is_contiguous()
        assert out.is_contiguous()
        super()._expert_major(tokens, out)


def spread(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, NaN behind each."""
    wide = torch.full((*rows.shape[:2], WIDTH), cases.NAN).to(rows.dtype)
    wide[..., : rows.shape[2]] = rows
    return wide[..., : rows.shape[2]]


@pytest.mark.parametrize("kind", [ReferenceExecutor, GroupedExecutor, DenseOnly])
@pytest.mark.parametrize("payload", ["bf16", "fp8_block"])
@pytest.mark.parametrize("apart", ["tokens", "outputs", "both"])
def test_rows_far_apart_give_what_dense_rows_give(kind, payload: str, apart: str):
    config = cases.make_config(activation=cases.GPT_OSS, bias=True)
    shard = cases.shard_of(config)
    executor = kind(config, shard, cases.make_dense(config), cases.CPU, cases.RUNTIME)
    tokens = cases.make_expert_major(cases.make_flat(config, dtype=torch.bfloat16), shard)
    tokens = replace(tokens, hidden=encode_payload(tokens.hidden.data, payload))
    expected, valid = executor(tokens), cases.valid_rows(tokens)
    out = torch.full_like(expected, cases.NAN)
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

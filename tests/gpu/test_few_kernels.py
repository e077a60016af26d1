"""The experts of a few tokens against the float32 witness, on one GPU or interpreted on the CPU.

What isn't to be read is NaN: tokens and weights without a local expert.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import NAN
from support.cases.four_bit_cases import int4_experts
from support.cases.grouped_cases import (
    ACTIVATIONS,
    BOUND,
    all_experts,
    build,
    check_replays,
    layer,
    make_tokens,
    witness,
)
from support.stand_ins.kernel_device import DEVICE, INTERPRETED, cuda_only, runs_kernels, sized

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.experts.grouped import TritonGroupedExecutor, schedules
from eprt.experts.grouped.schedules import FEW, FewTile, FewTokens
from eprt.experts.sort_by_expert_triton import sort_and_schedule
from eprt.placement import ExpertPlacement
from eprt.tokens import Payload

pytestmark = [pytest.mark.gpu, runs_kernels]

FORMS = ["bf16", "mxfp4", "nvfp4", "int4"]
# K of no whole blocks, halves of unequal length.
FOUR_BITS = FewTokens(8, FewTile(64, 128, halves=2), FewTile(64, 64, halves=2, splits=2))
EAGER = FewTokens(8, FewTile(64, 128, halves=2, eager=True), FewTile(64, 64, halves=2, splits=2, eager=True))
ONE_HALF = FewTokens(16, FewTile(64, 128, ahead=2), FewTile(64, 64, splits=2, ahead=2))
PLAIN = FewTokens(16, FewTile(64, 32, 2), FewTile(64, 64, 3))
TILES = {"bf16": [PLAIN], "mxfp4": [EAGER, ONE_HALF], "nvfp4": [FOUR_BITS, ONE_HALF], "int4": [FOUR_BITS, ONE_HALF]}
CASES = [(form, few) for form in FORMS for few in TILES[form]]
FEWER = sized(FORMS, ["mxfp4"])  # interpreted, a program takes milliseconds


@pytest.fixture(autouse=True)
def few_on_any_device(monkeypatch):
    """Takes few tokens on the interpreter's CPU, too."""
    prepare = TritonGroupedExecutor._prepare

    def prepare_as_hopper(executor, weights):
        prepare(executor, weights)
        executor._hopper = True

    monkeypatch.setattr(TritonGroupedExecutor, "_prepare", prepare_as_hopper)
    monkeypatch.setattr(schedules, "SHORT", 0)  # tiles are the tests'
    # What would be too many goes wrong visibly.
    monkeypatch.setattr("eprt.experts.sort_by_expert_triton.sort_and_schedule", None)


def config_of(form, **changes):
    sizes = {"H": 96, "I": 48} if form == "bf16" else {"H": 224, "I": 160}
    return layer(form, **sizes, **changes)


def on_local_experts(tokens, ids):
    """The same tokens, which all have experts here."""
    hidden = Payload.plain(tokens.hidden.data.nan_to_num(nan=1.0))
    return replace(tokens, hidden=hidden, ids=ids.to(torch.int32), weights=tokens.weights.nan_to_num(nan=0.5))


def use(monkeypatch, few):
    for pair in FEW:
        monkeypatch.setitem(FEW, pair, (few,))


@pytest.mark.parametrize(("form", "few"), CASES)
def test_every_number_of_tokens(form, few, monkeypatch):
    """All tokens of one expert, all entries of different ones, and what lies between."""
    use(monkeypatch, few)
    config = config_of(form)
    weights = all_experts(config)
    executor = build(TritonGroupedExecutor, config, weights)
    for count in (3,) if INTERPRETED else (1, 2, few.tokens):
        tokens = make_tokens(config, count)
        same = on_local_experts(tokens, torch.tensor([2, 0, 5], device=DEVICE).expand_as(tokens.ids))
        for given in (tokens, same):
            out = torch.full((count, config.hidden_size), NAN, dtype=torch.bfloat16, device=DEVICE)
            executor(given, out)
            assert relative_error(out, witness(config, weights, given)) < BOUND
            assert INTERPRETED or torch.equal(out, executor(given)), "sums have one order"


@pytest.mark.parametrize("form", FEWER)
def test_entries_that_repeat_an_expert_add_their_weights(form, monkeypatch):
    use(monkeypatch, TILES[form][0])
    config = config_of(form)
    ids = torch.tensor([[1, 0, 1], [3, 3, 3], [4, 4, 0], [0, 5, 5], [2, 3, 1]], device=DEVICE)
    weights, tokens = all_experts(config), on_local_experts(make_tokens(config, 5), ids)
    out = build(TritonGroupedExecutor, config, weights)(tokens)
    assert relative_error(out, witness(config, weights, tokens)) < BOUND


@pytest.mark.parametrize("form", FEWER)
def test_tokens_without_a_local_expert(form, monkeypatch):
    """Zeros where they are read, else untouched; so is memory beside a result that isn't dense."""
    use(monkeypatch, TILES[form][0])
    config = config_of(form)
    weights, shard = all_experts(config), ExpertPlacement(6, ParallelConfig(3)).shard(1)
    executor, tokens = build(TritonGroupedExecutor, config, weights, shard), make_tokens(config, 8)
    tokens.ids[6] = torch.tensor([0, 5, config.num_experts], device=DEVICE)
    local = ((tokens.ids >= shard.first_expert) & (tokens.ids < shard.end_expert)).any(1)
    assert 0 < int(local.sum()) < 8
    expected = witness(config, weights, tokens, shard)
    for every_row, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        wide = torch.full((8, config.hidden_size + 3), 7.0, dtype=dtype, device=DEVICE)
        out = wide[:, : config.hidden_size]
        hidden = Payload.plain(tokens.hidden.data.to(dtype))
        executor(replace(tokens, hidden=hidden, every_row_read=every_row), out)
        assert (out[~local] == (0 if every_row else 7)).all()
        assert relative_error(out[local], expected[local]) < BOUND
        assert (wide[:, config.hidden_size :] == 7).all()
    nobody = replace(tokens, ids=torch.full_like(tokens.ids, config.num_experts))
    assert not executor(nobody).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["bf16"])
def test_activations_and_no_bias(form, activation, monkeypatch):
    use(monkeypatch, TILES[form][0])
    config = config_of(form, activation=ACTIVATIONS[activation], bias=False)
    weights, tokens = all_experts(config), make_tokens(config, 3)
    out = build(TritonGroupedExecutor, config, weights)(tokens)
    assert relative_error(out, witness(config, weights, tokens)) < BOUND


@pytest.mark.parametrize(
    ("group", "zeros", "H", "I"), [(32, True, 160, 96), (128, False, 256, 128), (0, True, 104, 72)]
)
def test_scales_and_zero_points_of_int4(group, zeros, H, I):
    config = layer("int4", H=H, I=I, E=3, K=2)
    weights, tokens = int4_experts(config, group, zeros=zeros), make_tokens(config, 2)
    out = build(TritonGroupedExecutor, config, weights)(tokens)
    assert 0 < relative_error(out, witness(config, weights, tokens)) < BOUND


def test_few_programs_share_long_sums():
    config = layer("int4", H=128, I=4096, E=2, K=1)
    weights, tokens = int4_experts(config, 128, zeros=False), make_tokens(config, 1)
    executor = build(TritonGroupedExecutor, config, weights)
    assert relative_error(executor(tokens), witness(config, weights, tokens)) < BOUND
    assert [tile.splits for tile in executor._few_experts._seconds.values()] == [2]


def test_short_sums_have_blocks_of_their_own(monkeypatch):
    monkeypatch.setattr(schedules, "SHORT", 48)
    config = config_of("bf16")
    weights, tokens = all_experts(config), make_tokens(config, 3)
    executor = build(TritonGroupedExecutor, config, weights)
    assert relative_error(executor(tokens), witness(config, weights, tokens)) < BOUND
    assert list(executor._few_experts._seconds.values()) == [schedules.SHORT_TILE]


def test_each_number_of_tokens_has_the_kernels_that_are_quickest_for_it():
    config = config_of("mxfp4")
    executor = build(TritonGroupedExecutor, config, all_experts(config))
    for_one, for_two, for_four = FEW["w4a16"]
    chosen = [executor._few(count) for count in range(1, 6)]
    assert chosen == [for_one, for_two, for_four, for_four, None]


@pytest.mark.parametrize("form", sized(["bf16", "mxfp4"], ["mxfp4"]))
@pytest.mark.parametrize("rank", [None, 1])
def test_a_batch_invariant_layer_adds_as_for_many_tokens(form, rank, monkeypatch):
    """Also where entries repeat an expert, name none, or where a rank holds no expert of a token."""
    config = config_of(form)
    weights, shard = all_experts(config), rank and ExpertPlacement(6, ParallelConfig(3)).shard(rank)
    executor = build(TritonGroupedExecutor, config, weights, shard, RuntimeConfig(batch_invariant=True))
    few = executor._few_tiles[-1].tokens
    ids = torch.tensor([[1, 0, 1], [3, 3, 3], [0, 5, 4], [2, 6, 3]], device=DEVICE)
    tokens = on_local_experts(make_tokens(config, 4), ids)
    found = executor(tokens)
    assert relative_error(found, witness(config, weights, tokens, shard)) < BOUND
    monkeypatch.setattr("eprt.experts.sort_by_expert_triton.sort_and_schedule", sort_and_schedule)
    monkeypatch.setattr(executor, "_few", lambda count: None)
    many = executor(tokens)
    assert few >= 4
    assert relative_error(found, many) < 1e-4 if INTERPRETED else torch.equal(found, many)


@cuda_only
@pytest.mark.parametrize("form", FORMS)
def test_replays(form):
    config = config_of(form, E=8)
    weights, shard = all_experts(config), ExpertPlacement(8, ParallelConfig(1)).shard(0)
    executor = build(TritonGroupedExecutor, config, weights)
    static = make_tokens(config, executor._few_tiles[-1].tokens)
    check_replays(lambda: executor(static), config, weights, shard, static)

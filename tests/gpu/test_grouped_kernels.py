"""The grouped GEMM of our own against the float32 witness, on one GPU or interpreted on the CPU.

What may be garbage is NaN: rows and weights without a local expert, rows past the counts of a slab, outputs before they
are written. Gate and up, experts and scale blocks differ beyond mistaking.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import NAN, RUNTIME, shard_of
from support.cases.grouped_cases import (
    ACTIVATIONS,
    BOUND,
    FP8_BOUND,
    FP8_RUNTIME,
    all_experts,
    build,
    check_replays,
    check_slabs,
    error_of_shares,
    error_on_flat,
    errors_against_the_right_one,
    layer,
    make_slabs,
    make_tokens,
    random,
    witness,
)
from support.stand_ins.kernel_device import DEVICE, cuda_only, runs_kernels, sized

from eprt.config import ParallelConfig
from eprt.conformance.oracle import relative_error
from eprt.expert_major import expert_major_from_flat, sort_by_expert
from eprt.experts import activation_triton, sort_by_expert_triton
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.grouped.schedules import Schedule, Tile
from eprt.placement import ExpertPlacement
from eprt.quant import encode_payload
from eprt.tokens import ExpertMajorTokens, Payload

pytestmark = [pytest.mark.gpu, runs_kernels]

SCHEDULES = {
    "plain": Schedule(16, Tile(64, 32, 2, 4, 1), Tile(64, 32, 2, 4, 1, tma=True)),
    "swap": Schedule(16, Tile(64, 32, 2, 4, 1, swap=True), Tile(64, 64, 3, 4, 2, swap=True)),
    "halvings": Schedule(64, Tile(128, 64, 2, 4, 1, halvings=1), Tile(64, 32, 2, 4, 1, True, halvings=2), group=2),
    "tail": Schedule(16, Tile(64, 32, 2, 4, 1, swap=True), Tile(64, 64, 3, 4, 2, True, tma=True), tail=16),
    "flat": Schedule(64, Tile(64, 32, 2, 4, 1, flatten=True), Tile(64, 32, 2, 4, 1, flatten=True, tma=True)),
}
FORMS = ["bf16", "fp8_block", "mxfp4"]
FP8_SCHEDULES = {
    "plain": Schedule(32, Tile(64, 128, 2, 4, 1, halvings=1), Tile(128, 128, 2, 4, 1)),
    "swap": Schedule(16, Tile(128, 128, 2, 4, 1, swap=True), Tile(64, 128, 2, 4, 2, swap=True)),
}


def interpreted_part(rows, kept):
    """All rows on a GPU; interpreted, where each takes seconds, those whose places in their factors are `kept`."""
    places = itertools.product(*(range(len(factor)) for factor in rows))
    return [row for row, place in zip(itertools.product(*rows), places, strict=True) if sized(True, kept(*place))]


# Sizes that no 16-byte row and no tile holds. The part has every pair of size, activation and schedule.
BF16_ROWS = interpreted_part(
    (((96, 48), (100, 20), (33, 7)), ACTIVATIONS, SCHEDULES), lambda size, act, name: act == (size + name) % 4
)
# The part has every three of the four factors.
FP8_ROWS = interpreted_part(
    (((256, 136), (144, 40)), ("fp8_block", "fp8_tensor", "fp8_channel"), (False, True), FP8_SCHEDULES),
    lambda *places: sum(places) % 2 == 0,
)


@pytest.mark.parametrize(("size", "activation", "name"), BF16_ROWS, ids=str)
def test_bf16(size, activation, name, schedule):
    schedule(SCHEDULES[name])
    config = layer(H=size[0], I=size[1], activation=ACTIVATIONS[activation])
    assert error_on_flat(config, all_experts(config), make_tokens(config, sized(70, 40))) < BOUND


@pytest.mark.parametrize(("size", "form", "low_precision", "name"), FP8_ROWS, ids=str)
def test_fp8(size, form, low_precision, name, schedule):
    H, I = size
    schedule(FP8_SCHEDULES[name])
    config = layer(form, H=H, I=I)
    tokens = make_tokens(config, 40)
    runtime, bound = (FP8_RUNTIME, FP8_BOUND) if low_precision else (RUNTIME, BOUND)
    found = error_on_flat(config, all_experts(config), tokens, runtime=runtime)
    assert (BOUND if low_precision else 0) < found < bound


@pytest.mark.parametrize("name", ["swap", "tail"])
def test_slabs_lie_apart_and_hold_garbage_past_their_counts(name, schedule):
    schedule(SCHEDULES[name])
    check_slabs(layer(), 40, spare=5, empty=2, dtypes=(torch.bfloat16, torch.float32))


@pytest.mark.parametrize(
    ("form", "low_precision"),
    [("fp8_block", False), ("fp8_block", True), ("fp8_channel", True)],
    ids=["w8a16", "w8a8", "c8a8"],
)
def test_slabs_of_fp8_weights_and_tokens(form, low_precision, schedule):
    schedule(FP8_SCHEDULES["swap"])
    config = layer(form, H=144, I=40)
    weights, shard = all_experts(config), shard_of(config)
    slabs, past = make_slabs(make_tokens(config, 20), shard, 24)
    data = slabs.hidden.data
    executor = build(TritonGroupedExecutor, config, weights, runtime=FP8_RUNTIME if low_precision else RUNTIME)
    expected = witness(config, weights, slabs)
    bound = FP8_BOUND if low_precision else BOUND
    assert relative_error(executor(slabs)[~past], expected[~past]) < bound
    packed = replace(slabs, hidden=encode_payload(data.nan_to_num(), "fp8_block"))
    expected = witness(config, weights, packed)
    assert relative_error(executor(packed)[~past], expected[~past]) < bound


@pytest.mark.parametrize("ep_size", [1, 2, 3])
@pytest.mark.parametrize("moe_tp_size", [1, 2])
def test_shares_add_up_to_the_layer(ep_size, moe_tp_size, schedule):
    schedule(SCHEDULES["swap"])
    assert error_of_shares(layer(), ep_size, moe_tp_size) < BOUND


def test_rows_without_a_local_expert(schedule):
    """Zeros if they are read, else untouched; no slot at all and no row at all."""
    schedule(SCHEDULES["plain"])
    config = layer()
    weights, shard = all_experts(config), ExpertPlacement(6, ParallelConfig(3)).shard(1)
    executor, tokens = build(TritonGroupedExecutor, config, weights, shard), make_tokens(config, 30)
    local = ((tokens.ids >= shard.first_expert) & (tokens.ids < shard.end_expert)).any(1)
    assert 0 < int(local.sum()) < 30
    for every_row_read in (True, False):
        out = torch.full((30, 96), 7.0, dtype=torch.bfloat16, device=DEVICE)
        executor(replace(tokens, every_row_read=every_row_read), out)
        assert (out[~local] == (0 if every_row_read else 7)).all()
        assert out.isfinite().all()
    nothing = replace(tokens, ids=torch.full_like(tokens.ids, 6))
    assert not executor(nothing).any()
    assert executor(make_tokens(config, 0)).shape == (0, 96)


def _roll(tensor, rows):
    """Along dimension 1; torch can't roll FP8 on a GPU."""
    return torch.cat([tensor[:, -rows:].view(torch.uint8), tensor[:, :-rows].view(torch.uint8)], 1).view(tensor.dtype)


@pytest.mark.parametrize("form", ["bf16", "fp8_block", "fp8_channel"])
def test_swapped_halves_and_scales_would_be_seen(form, schedule):
    schedule(SCHEDULES["swap"] if form == "bf16" else FP8_SCHEDULES["swap"])
    config = layer(form, H=144, I=48)
    weights, tokens = all_experts(config), make_tokens(config, 20)
    half = weights.gate_up.shape[1] // 2
    by = {"data": half, "scale": half if form == "fp8_channel" else 1}
    roll = {name: _roll(t, by[name]) for name, t in weights.gate_up.tensors().items()}
    assert weights.gate_up_bias is not None
    wrong = [
        replace(weights, gate_up=replace(weights.gate_up, **roll), gate_up_bias=weights.gate_up_bias.roll(half, 1))
    ]
    if form == "fp8_channel":
        wrong.append(replace(weights, gate_up=replace(weights.gate_up, scale=weights.gate_up.scale.roll(half, 1))))
    if form == "fp8_block":
        scale = weights.gate_up.scale
        wrong.append(replace(weights, gate_up=replace(weights.gate_up, scale=scale.roll(1, 1).contiguous())))
        wrong.append(replace(weights, gate_up=replace(weights.gate_up, scale=scale.roll(1, 2).contiguous())))
    right, *errors = errors_against_the_right_one(config, weights, tokens, wrong)
    assert right < BOUND
    assert all(each > 5 * BOUND for each in errors)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize(("L", "M", "I"), [(3, 5, 40), (2, 9, 1100)])
def test_slabs_are_activated_up_to_their_counts(L, M, I, activation):
    """By the formula in float64; rows past the counts are NaN and stay unread."""
    wide = random(L, M, activation.parts * I, seed=I).to(torch.bfloat16) * 4
    counts = torch.tensor([M, 0, 2][:L], dtype=torch.int32, device=DEVICE)
    valid = torch.arange(M, device=DEVICE)[None] < counts[:, None]
    wide[~valid] = NAN
    narrow = torch.full((L, M, I), NAN, dtype=torch.bfloat16, device=DEVICE)
    activation_triton.activate_rows(activation, wide, counts, narrow)
    gate, up = wide.double()[..., :I], wide.double()[..., -I:]
    if activation.kind == "geglu":
        wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    elif activation.gated:
        limit = activation.limit or float("inf")
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        wanted = gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.beta)
    else:
        wanted = gate.clamp(min=0) ** 2
    torch.testing.assert_close(narrow[valid].double(), wanted[valid], rtol=2**-8, atol=1e-6)
    assert narrow[~valid].isnan().all()


@pytest.mark.parametrize(
    ("small_slots", "programs", "tail", "high_first"),
    [(1 << 30, 128, 0, True), (0, 128, 0, False), (0, 2, 16, True)],
    ids=["one launch", "counted first", "several blocks a program"],
)
@pytest.mark.parametrize(
    ("N", "K", "E", "first", "L"),
    [(5, 3, 6, 2, 2), (70, 6, 24, 7, 5), (90, 4, 300, 0, 300), (300, 6, 24, 7, 5), (1100, 4, 300, 0, 300)],
)
def test_slots_are_placed_and_listed(N, K, E, first, L, small_slots, programs, tail, high_first, monkeypatch):
    """Against torch's stable sort, and the list written out by hand."""
    monkeypatch.setattr(sort_by_expert_triton, "SMALL_IDS", small_slots)
    monkeypatch.setattr(sort_by_expert_triton, "MOST_PROGRAMS", programs)
    ids = torch.rand(N, E + 1, generator=torch.Generator().manual_seed(N)).argsort(1)[:, :K].to(torch.int32)
    ids[3::4], ids[4::5, 0] = E, -1
    ids[N // 2 :, 1] = first + 1
    wanted = sort_by_expert(ids, first, L)
    offsets, place = sort_by_expert_triton.sort_by_expert(ids.to(DEVICE), first, L)
    assert torch.equal(offsets.cpu(), wanted.offsets)
    assert torch.equal(place.cpu(), wanted.place)
    place, source, work = sort_by_expert_triton.sort_and_schedule(
        ids.to(DEVICE), first, L, sort_by_expert_triton.RowTiles(16, tail, high_first)
    )
    assert torch.equal(place.cpu(), wanted.place)
    rows = torch.arange(N)[:, None].expand(N, K)
    assert torch.equal(source.cpu()[wanted.place[wanted.place >= 0].long()], rows[wanted.place >= 0].int())
    entries, bounds = [], wanted.offsets.tolist()
    counts = wanted.offsets.diff()
    low = (counts <= counts[counts > 0].double().mean()).tolist()
    for expert in sorted(range(L), key=low.__getitem__) if high_first else range(L):
        begin, end = bounds[expert : expert + 2]
        first_entry, rows = len(entries), end - begin
        entries += [[expert, begin, end, first_entry]] * (max(-(-(rows - tail) // 16), 1) if rows else 0)
    assert work.num_entries.tolist() == [len(entries)]
    assert work.tile_counter.tolist() == [0]
    assert work.entries.view(-1, 4)[: len(entries)].tolist() == entries
    assert len(entries) <= work.bound


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "fp8_block"])
def test_rows_around_a_tile_and_its_tail(form, schedule):
    """One row, a tile less and more than full, a full tail, and one row more than that; every one of them computed."""
    counts = torch.tensor([1, 15, 16, 17, 31, 32, 33, 48, 49, 0], dtype=torch.int32, device=DEVICE)
    config = layer(form, H=96, I=64, E=10, K=2)
    fp8 = form == "fp8_block"
    tile = Tile(64, 128 if fp8 else 64, 2, 4, 1, swap=True)
    schedule(Schedule(16, tile, tile, tail=16))
    weights = all_experts(config)
    tokens = ExpertMajorTokens(Payload.plain(random(10, 50, 96, seed=3).to(torch.bfloat16)), counts)
    runtime, bound = (FP8_RUNTIME, FP8_BOUND) if fp8 else (RUNTIME, BOUND)
    found = build(TritonGroupedExecutor, config, weights, runtime=runtime)(tokens)
    wanted = witness(config, weights, tokens)
    rows = torch.arange(50, device=DEVICE)[None] < counts[:, None]
    assert all(relative_error(found[e][rows[e]], wanted[e][rows[e]]) < bound for e in range(9))


def test_the_product_of_two_schedules_is_the_same(schedule):
    """How tiles are cut changes no sum: each element's products are added along K in the same order."""
    config = layer(H=sized(256, 136), I=sized(128, 72))  # more than one step along either, also interpreted
    weights, tokens = all_experts(config), make_tokens(config, sized(40, 20))
    found = []
    for name in SCHEDULES:
        schedule(SCHEDULES[name])
        found.append(build(TritonGroupedExecutor, config, weights)(tokens))
    assert all(relative_error(each, found[0]) < 1e-3 for each in found[1:])


@cuda_only
@pytest.mark.parametrize("form", FORMS)
def test_graph_replays_with_other_counts(form):
    """Captured once after a warm-up; replayed with other routing, one expert alone, and no slot at all."""
    config = layer(form, H=256, I=128, E=8)
    weights, shard = all_experts(config), ExpertPlacement(8, ParallelConfig(2)).shard(1)
    runner = build(TritonGroupedExecutor, config, weights, shard)
    runner.warmup(64)
    static = make_tokens(config, 64)
    check_replays(lambda: runner(static), config, weights, shard, static)


@cuda_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [4, 100, 900, 4000])
def test_measured_schedules(form, rows):
    """Those of the table, as they are."""
    config = layer(form, H=512, I=256, E=8, K=2)
    weights, tokens = all_experts(config), make_tokens(config, rows)
    assert error_on_flat(config, weights, tokens) < BOUND
    if form == "fp8_block":
        assert BOUND < error_on_flat(config, weights, tokens, runtime=FP8_RUNTIME) < FP8_BOUND


def test_all_ranks_warm_up_the_same(monkeypatch):
    """Which of them compiles what first is `compile_ahead`'s business."""
    asked = []
    monkeypatch.setattr(TritonGroupedExecutor, "_try_flat", lambda self, rows, choices, expert: asked.append(rows))
    monkeypatch.setattr(TritonGroupedExecutor, "_try_expert_major", lambda self, rows, valid: None)
    monkeypatch.setenv("EPRT_COMPILE_PROCESSES", "0")
    config = layer(E=8)
    weights, placement = all_experts(config), ExpertPlacement(8, ParallelConfig(2))
    for rank in range(2):
        build(TritonGroupedExecutor, config, weights, placement.shard(rank)).warmup(3000)
    half = len(asked) // 2
    assert asked[:half] == sorted(set(asked))
    assert asked[half:] == asked[:half]


@cuda_only
@pytest.mark.parametrize("form", FORMS)
def test_nothing_compiles_after_warmup(form):
    config = layer(form, H=512, I=256, E=8, K=2)
    runner = build(TritonGroupedExecutor, config, all_experts(config))
    runner.warmup(3000)
    from eprt.experts.grouped.gemm_gluon import grouped_gemm_warp_specialized
    from eprt.experts.grouped.gemm_triton import grouped_gemm

    def compiled():
        kernels = grouped_gemm, grouped_gemm_warp_specialized
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    before = compiled()
    assert before > 0
    for rows in (1, 7, 33, 500, 2999, 3000):
        for every_row in (True, False):
            runner(make_tokens(config, rows, every_row_read=every_row))
    slabs, _ = expert_major_from_flat(make_tokens(config, 50), shard_of(config), 61)
    runner(slabs)
    assert compiled() == before

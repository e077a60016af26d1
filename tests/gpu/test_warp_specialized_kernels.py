"""The warp-specialized grouped GEMM, bit by bit against the one where all do the same, and against the float32
witness. On a CPU its lines run in `support.stand_ins.gluon_interpreter`, which also holds each access to shared memory
to the barriers that must order it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import NAN, RUNTIME
from support.cases.grouped_cases import (
    ACTIVATIONS,
    BOUND,
    FP8_BOUND,
    FP8_RUNTIME,
    all_experts,
    build,
    error_on_flat,
    layer,
    make_tokens,
    random,
    witness,
)
from support.stand_ins.kernel_device import DEVICE, INTERPRETED, cuda_only, interpreted_only, runs_kernels, sized

from eprt.conformance.oracle import relative_error
from eprt.experts.grouped import TritonGroupedExecutor, schedules
from eprt.experts.grouped.schedules import (
    BF16_WS,
    FP8_16,
    FP8_128_WIDE,
    FP8_DOWN_16,
    FP8_WS,
    MXFP4_32,
    MXFP4_64,
    MXFP4_128,
    MXFP4_256,
    MXFP4_LOW,
    W4A8_16,
    W4A8_32,
    W4A8_64,
    W4A8_128,
    Schedule,
)
from eprt.tokens import ExpertMajorTokens, Payload

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = [pytest.mark.gpu, runs_kernels]


BF16_NARROW, FP8_NARROW = replace(BF16_WS, n=128), replace(FP8_WS, n=128)  # as tiles of 256 tokens need
FOUR_BIT_TILES = {16: MXFP4_LOW, 32: MXFP4_32, 64: MXFP4_64, 128: MXFP4_128, 256: MXFP4_256}
W4A8_TILES = {16: W4A8_16, 32: W4A8_32, 64: W4A8_64, 128: W4A8_128}
W4A8_TILES[256] = replace(W4A8_128, n=128, stages=4, halvings=2)
W4A8 = "mxfp4, fp8 tokens"
WIDE = "fp8_block, 256 rows"


def weights_of(form):
    return {W4A8: "mxfp4", WIDE: "fp8_block"}.get(form, form)


def specialized(m, tail, form="mxfp4"):
    """As the tables', with as many halvings as there can be."""
    wide, narrow = {
        "bf16": (BF16_WS, BF16_NARROW),
        "fp8_channel": (FP8_WS, FP8_NARROW),
        "fp8_block": (FP8_NARROW, FP8_NARROW),
        WIDE: (FP8_128_WIDE, FP8_128_WIDE),
    }.get(form, (None, None))
    four_bit = W4A8_TILES if form == W4A8 else FOUR_BIT_TILES
    known = four_bit[m] if wide is None else narrow if m == 256 else wide
    tile = replace(known, halvings=min(2, m.bit_length() - 5))
    return Schedule(m, tile, tile, group=2, tail=tail)


@pytest.fixture
def launched(monkeypatch):
    """Which matrices went through the warp-specialized kernel, by their rows."""
    from eprt.experts.grouped.launch import Chip, Gemm

    monkeypatch.setattr(schedules, "DEEP", {})  # tiles are the tests'
    if INTERPRETED:
        monkeypatch.setattr(Chip, "of", lambda _: Chip(multiprocessors=3, hopper=False, warp_specialized=True))
    seen, call, arguments = [], Gemm.__call__, Gemm._arguments

    def noted_call(self, rows, work, *more):
        call(self, rows, work, *more)
        assert work.tile_counter.tolist() == [0]  # as the second GEMM wants it

    def noted_arguments(self, rows, weights, work, schedule, tile, *more):
        if tile.warp_specialized:
            seen.append(self.matrix.rows)
        return arguments(self, rows, weights, work, schedule, tile, *more)

    monkeypatch.setattr(Gemm, "__call__", noted_call)
    monkeypatch.setattr(Gemm, "_arguments", noted_arguments)
    return seen


def plain(each):
    """Tiles of the plain kernel, no lower than 16 tokens: E4M3 of 8 it multiplies as float16, more exactly."""
    low = each.first.halvings
    first, second = (replace(tile.plain, halvings=min(low, tile.plain.halvings)) for tile in (each.first, each.second))
    return replace(each, first=first, second=second)


FP8_FORMS = ["fp8_channel", "fp8_block", WIDE, W4A8]
FORMS = ["bf16", "mxfp4", "nvfp4", "int4", *FP8_FORMS]
RUNTIMES = dict.fromkeys(FP8_FORMS, FP8_RUNTIME)
BOUNDS = dict.fromkeys(FORMS, BOUND) | dict.fromkeys(FP8_FORMS, FP8_BOUND)
SLABS = [(16, 0, BF16), (32, 16, F32), (64, 0, BF16), (64, 16, F32), (128, 32, BF16), (256, 0, F32), (256, 32, BF16)]
SLABS += [(32, 0, BF16), (128, 0, BF16)]


def of_each_form(params, on_a_cpu):
    """Decoding takes the interpreter seconds: of each form those that a CPU runs, too. A tile has at most 128 tokens
    with block scales."""
    return [
        pytest.param(form, *each, marks=[] if index in on_a_cpu[form] else [cuda_only])
        for form in FORMS
        for index, each in enumerate(params)
        if weights_of(form) != "fp8_block" or each[0] != 256
    ]


@pytest.mark.parametrize(
    ("form", "m", "tail", "dtype"),
    of_each_form(
        SLABS,
        {"bf16": (4, 6), "mxfp4": (0, 3, 6), "nvfp4": (2,), "int4": (), "fp8_channel": (4,), "fp8_block": (4,)}
        | {WIDE: (3, 8), W4A8: (3,)},
    ),
)
def test_slabs_have_the_bits_of_the_plain_kernel(form, m, tail, dtype, schedule, launched):
    """Rows around every height; blocks of K even and odd in number; the last rows of weights part of a tile."""
    heights = [1, 15, 16, 17, m // 4, m // 4 + 1, m // 2, m // 2 + 1, m - 1, m, m + 1, m + tail, m + tail + 1, 2 * m, 0]
    heights = sized(heights, [m // 4, m // 2 + 1, m + tail, m + tail + 1, 0])
    H, I = (640, 512) if form in FP8_FORMS else (320, 256)
    config = layer(weights_of(form), H=H, I=I, E=len(heights), K=2)
    weights, counts = all_experts(config), torch.tensor(heights, dtype=torch.int32, device=DEVICE)
    data = random(len(heights), 2 * m + 3, H, seed=3).to(dtype)
    there = torch.arange(2 * m + 3, device=DEVICE)[None] < counts[:, None]
    data[~there] = NAN
    tokens, found = ExpertMajorTokens(Payload.plain(data), counts), []
    each_form = specialized(m, tail, form)
    for each in sized((each_form, plain(each_form)), (each_form,)):  # the interpreter adds up in another order
        schedule(each)
        out = torch.full((len(heights), 2 * m + 4, H + 16), NAN, dtype=dtype, device=DEVICE)
        executor = build(TritonGroupedExecutor, config, weights, runtime=RUNTIMES.get(form, RUNTIME))
        executor(tokens, out[:, : 2 * m + 3, :H])
        found.append(out)
    assert launched == [2 * I, H]
    assert torch.equal(found[0].nan_to_num(7e7), found[-1].nan_to_num(7e7))
    written = torch.zeros_like(found[0], dtype=torch.bool)
    written[:, : 2 * m + 3, :H] = there[:, :, None]
    assert torch.equal(found[0].isnan(), ~written)
    wanted = witness(config, weights, tokens)
    assert relative_error(found[0][:, : 2 * m + 3, :H][there], wanted[there]) < BOUNDS[form]


@pytest.mark.parametrize("activation", ["gpt_oss", "relu2"])
def test_wide_tiles_have_the_bits_of_narrow_ones(activation, schedule, launched):
    """With block scales, gated and not; the last rows of weights half of a wide tile."""
    config = layer("fp8_block", H=640, I=640, E=3, K=2, activation=ACTIVATIONS[activation])
    weights, tokens, found = all_experts(config), make_tokens(config, sized(900, 140)), []
    for form in ("fp8_block", WIDE):
        schedule(specialized(128, 16, form))
        found.append(build(TritonGroupedExecutor, config, weights, runtime=FP8_RUNTIME)(tokens))
    assert torch.equal(*found)
    assert len(launched) == 4


@pytest.mark.parametrize(
    ("form", "activation"),
    of_each_form(
        [("gpt_oss",), ("silu",), ("relu2",), ("geglu",)],
        {"bf16": (0, 1, 2, 3), "mxfp4": (0,), "nvfp4": (), "int4": (1,), "fp8_channel": (0,), "fp8_block": (0,)}
        | {WIDE: (0,), W4A8: (0,)},
    ),
)
def test_rows_equal_the_witness(form, activation, schedule, launched):
    """Gathered for the first matrix, by the copy engine for the second."""
    schedule(specialized(*sized((128, 32), (64, 16)), form))
    H, I = (sized(768, 640), 512) if form in FP8_FORMS else (sized(576, 320), 320)
    config = layer(weights_of(form), H=H, I=I, E=5, K=3, activation=ACTIVATIONS[activation], bias=activation != "silu")
    weights, tokens = all_experts(config), make_tokens(config, sized(900, 140))
    found = error_on_flat(config, weights, tokens, runtime=RUNTIMES.get(form, RUNTIME))
    assert 0 < found < BOUNDS[form]
    assert len(launched) == 2


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("form", ["bf16", "mxfp4", "fp8_channel", "fp8_block", WIDE, W4A8])
def test_sums_may_be_shorter_than_the_pipeline(form, blocks, schedule, launched):
    """As tensor parallelism makes those of the second matrix: several tiles are in the pipeline at once."""
    schedule(specialized(*sized((128, 16), (64, 16)), form))
    H, I = (sized(640, 256), 128 * blocks) if form in FP8_FORMS else (sized(576, 192), 64 * blocks)
    config = layer(weights_of(form), H=H, I=I, E=4, K=3)
    weights, tokens = all_experts(config), make_tokens(config, sized(900, 100))
    found = error_on_flat(config, weights, tokens, runtime=RUNTIMES.get(form, RUNTIME))
    assert 0 < found < BOUNDS[form]
    assert launched == [2 * I, H]


@pytest.mark.parametrize(("experts", "tokens", "specialized_rows"), [(2, 1, [256]), (264, 264, [256, 384])])
def test_tiles_of_few_rows_go_by_their_number(experts, tokens, specialized_rows, schedule, launched, monkeypatch):
    """As many as SMs, of a long sum; so few that an SM has them at once, of a short one; and more."""
    monkeypatch.setattr(schedules, "DEEP", {"w8a8": 256})
    experts, tokens = sized((experts, tokens), (min(experts, 8), min(tokens, 16)))
    schedule(Schedule(16, FP8_16, FP8_DOWN_16))
    config = layer("fp8_block", H=384, I=128, E=experts, K=1)
    weights, given = all_experts(config), make_tokens(config, tokens)
    assert 0 < error_on_flat(config, weights, given, runtime=FP8_RUNTIME) < FP8_BOUND
    assert launched == specialized_rows


PARTIAL = [("bf16", 88), ("mxfp4", 352), ("nvfp4", 80), ("int4", 96), ("fp8_channel", 88), ("fp8_block", 192)]


@pytest.mark.parametrize(("form", "intermediate"), [*PARTIAL, (WIDE, 320), (W4A8, 96)])
def test_sums_may_end_within_a_block(form, intermediate, schedule, launched):
    """As tensor parallelism cuts gpt-oss and GLM-4.5: zeros fill the rest of what comes by TMA."""
    schedule(specialized(*sized((128, 16), (64, 16)), form))
    config = layer(weights_of(form), H=384, I=intermediate, E=3, K=2)
    weights, tokens = all_experts(config), make_tokens(config, sized(600, 60))
    found = error_on_flat(config, weights, tokens, runtime=RUNTIMES.get(form, RUNTIME))
    assert 0 < found < BOUNDS[form]
    assert launched == [2 * intermediate, 384]


def test_slabs_of_partial_blocks_take_the_plain_kernel(schedule, launched):
    """Threads that copy mask whole parts of a row alone."""
    schedule(specialized(64, 16))
    config = layer("mxfp4", H=384, I=352, E=3, K=2)
    weights, counts = all_experts(config), torch.tensor([5, 0, 3], dtype=torch.int32, device=DEVICE)
    tokens = ExpertMajorTokens(Payload.plain(random(3, 8, 384, seed=3)), counts)
    out = torch.zeros(3, 8, 384, device=DEVICE)
    build(TritonGroupedExecutor, config, weights)(tokens, out)
    there = torch.arange(8, device=DEVICE)[None] < counts[:, None]
    assert relative_error(out[there], witness(config, weights, tokens)[there]) < BOUND
    assert launched == [704]


@cuda_only
@pytest.mark.parametrize(
    ("form", "m", "tail"),
    [
        *((form, m, tail) for form in ("mxfp4", W4A8) for m, tail in ((16, 0), (64, 16), (128, 16), (256, 32))),
        *(("bf16", m, 32) for m in (256, 128)),
    ],
)
def test_results_do_not_depend_on_timing(form, m, tail, schedule, launched):
    """Long sums, again and again: registers written too early, or stages read too early, would show."""
    schedule(specialized(m, tail, form))
    config = layer(weights_of(form), H=4096, I=1024, E=8, K=2)
    executor = build(TritonGroupedExecutor, config, all_experts(config), runtime=RUNTIMES.get(form, RUNTIME))
    tokens = make_tokens(config, 2400)
    first = executor(tokens)
    assert all(torch.equal(executor(tokens), first) for _ in range(50))
    assert set(launched) == {2048, 4096}


HANDED_BACK = "        mbarrier.arrive(stages.empty.index(stage))\n"
FULL = """        mbarrier.wait(stages.full.index(stage), phase)
        if not C.X_TMA:
            fence_async_shared()  # what threads have copied, for the tensor cores
"""
READ = "        weights, held = _weights(stages, stage, 0, WHICH, C, _fragment_layout(TOKENS, C.PART_K // 4))\n"
ROWS = "        total, more = _promote_rows((stages.x, stages.x_scale), stages, stage, phase, WHICH, total, more, C)\n"
TOKENS = "        half, factors = 2 * stage + WHICH, _factors(stages, stage, 0, C)\n"
DONE = "        total, tail = _done(total, tail, held, others_held, C.FOUR_BIT, TAIL)\n"
MISTAKES = {
    "a stage is handed back while products still read it": ("consumer", DONE + HANDED_BACK, HANDED_BACK + DONE),
    "a stage is filled before it is handed back": (
        "pipeline",
        "    for index in range(C.NUM_K):\n        mbarrier.wait(stages.empty.index(stage), phase ^ 1)\n",
        "    for index in range(C.NUM_K):\n",
    ),
    "a stage is multiplied before it is full": ("consumer", FULL + READ, READ),
    "a tile is published before the last one was read": (
        "pipeline",
        "    mbarrier.wait(stages.empty.index(stage), phase ^ 1)\n    for i in",
        "    for i in",
    ),
    "a tile is read before it is published": (
        "pipeline",
        "    mbarrier.wait(stages.full.index(stage), phase)\n    info,",
        "    info,",
    ),
    "fewer bytes are expected than come": ("pipeline", "EXPECTED: gl.constexpr = ", "EXPECTED: gl.constexpr = -16 + "),
    "threads that copy aren't waited for": (
        "pipeline",
        "1 + 32 * producer_warps(C) if C.COPIES else 1",
        "1",
    ),
    "scaled rows are handed back before they are read": ("scaled", ROWS, HANDED_BACK + ROWS),
    "scaled rows are multiplied before they are there": ("scaled", FULL + ROWS, ROWS),
    "scaled tokens are handed back before they are read": ("scaled", TOKENS, HANDED_BACK + TOKENS),
    "scaled tokens are multiplied before they are there": ("scaled", FULL + TOKENS, TOKENS),
}
# Block scales have lines of their own, and are copied where tokens come by TMA. From 65 tokens on consumers share those
# of a tile, below its weight rows.
OF_SCALES = [each for each in MISTAKES if "scaled" in each]
MISTAKEN = [
    *((each, form, 64) for each in MISTAKES if each not in OF_SCALES for form in ("bf16", "mxfp4")),
    *((each, form, 128 if "tokens" in each else 64) for each in OF_SCALES for form in ("fp8_block", WIDE)),
    ("threads that copy aren't waited for", "fp8_block", 64),
]


@pytest.fixture
def once_around(schedule, launched):
    """The error of a layer whose tiles go through all stages once, so that each begins at the same one."""

    def run(form, m):  # about m * 3 / 4 rows for each expert
        k = 128 if weights_of(form) == "fp8_block" else 64
        tile = replace(specialized(m, 16, form).first, stages=4, k=k)
        schedule(Schedule(m, tile, tile, group=2, tail=16))
        config = layer(weights_of(form), H=4 * k, I=4 * k, E=3, K=2)
        tokens, runtime = make_tokens(config, m * 7 // 4), RUNTIMES.get(form, RUNTIME)
        found = error_on_flat(config, all_experts(config), tokens, runtime=runtime)
        assert len(launched) == 2
        return found

    return run


@interpreted_only
@pytest.mark.parametrize(
    ("form", "m"), [("bf16", 64), ("mxfp4", 64), ("fp8_block", 64), ("fp8_block", 128), (WIDE, 64), (WIDE, 128)]
)
def test_barriers_suffice(form, m, once_around):
    assert 0 < once_around(form, m) < BOUNDS[form]


@interpreted_only
@pytest.mark.parametrize(("mistake", "form", "m"), MISTAKEN)
def test_barriers_that_are_missing_would_be_seen(mistake, form, m, once_around, monkeypatch):
    from support.stand_ins.gluon_interpreter import Jit
    from support.stand_ins.gluon_order import Race, Stuck

    from eprt.experts.grouped import consumer_gluon, pipeline_gluon, scaled_gluon

    part, old, new = MISTAKES[mistake]
    module = {"pipeline": pipeline_gluon, "consumer": consumer_gluon, "scaled": scaled_gluon}[part]
    source = inspect.getsource(module)
    assert source.count(old) == 1
    changed = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed)
    for name, member in vars(module).items():
        if isinstance(member, Jit) and member.fn.__module__ == module.__name__:
            monkeypatch.setattr(member, "fn", changed[name].fn)
    with pytest.raises((Race, Stuck)):
        once_around(form, m)

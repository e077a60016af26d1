"""What Triton and ptxas make of the 4-bit and FP8 kernels, plain and warp-specialized, for sm_90a and without a GPU.

Triton before 3.7 waits too late for products whose left operand is in registers (triton-lang/triton#9433), ptxas before
CUDA 13.3 gives those registers away too early (#11781): results are then wrong now and then. `settled` is our remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from eprt.config import Activation
from eprt.weights import Dense, Fp8Block, Fp8Channel, Int4, Mxfp4, Nvfp4

pytest.importorskip("triton", reason="triton isn't installed")

from support.sass import Machine, accesses_to_barriers, count, in_place_of_prepared, overwritten_operands

from eprt.experts.grouped import launch, schedules
from eprt.experts.grouped.schedules import ANY, HOPPER, Schedule, Tile
from eprt.experts.grouped.weights import GroupedMatrix
from eprt.experts.sort_by_expert_triton import RowTiles, TileSchedule

CPU = torch.device("cpu")
WARP_SPECIALIZED = launch.Chip(132, True, True)
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
TAILED = {
    "64 + 16": Schedule(64, Tile(128, 64, 4, 4, 3, True, 1), Tile(128, 64, 4, 4, 3, True, 1, tma=True), tail=16),
    "128 + 32": Schedule(128, Tile(128, 64, 3, 8, 1, True), Tile(128, 64, 3, 4, 2, True, tma=True), tail=32),
}
PAIRS = {"bf16": "bf16", "mxfp4": "w4a16", "nvfp4": "nv4a16", "int4": "i4a16"}
W4A8 = "mxfp4 fp8 tokens"
PAIRS |= {"fp8_channel": "c8a8", "fp8_block": "w8a8", W4A8: "w4a8"}
# Two values an instruction: how INT4 is decoded, without and with zero points, and the others. Of W4A8 four values, and
# one for each word of exponent fields.
DECODES = {"int4": "HFMA2", "int4 with zeros": "HADD2", W4A8: "PRMT"}
SCHEDULES = {f"up to {limit} rows": schedule for limit, schedule in HOPPER["w4a16"]} | TAILED
SPECIALIZED = {
    f"up to {limit} rows, {form}": (form, schedule)
    for form in PAIRS
    for limit, schedule in HOPPER[PAIRS[form]]
    if schedule.first.warp_specialized or schedule.second.warp_specialized
}

# Bytes of values that are kept in memory outside of loops; inside nothing is.
SPILLED = {
    ("up to 21 rows", "slabs", "mxfp4"): 16,
    ("up to 5.5 rows", "gathering", "nvfp4"): 8,
    ("up to 5.5 rows", "rows", "nvfp4"): 8,
    ("up to 1073741824 rows", "gathering", "mxfp4"): 8,  # 0 in most processes: ptxas is at its last register
}
# The same of warp-specialized kernels, by Triton 3.9; 3.6 keeps less. Beside four consumers the producer warp has 24
# registers a thread.
BETWEEN_TILES = {"rows": 40, "gathering": 64, "slabs": 96}
# FP8's epilogue has the tokens' scales beside 128 results a thread. 3.6 keeps 8 bytes.
FP8_BETWEEN_TILES = {"rows": 160, "gathering": 200, "slabs": 296}
# W4A8's has the rows' factors, too. 3.6 keeps 8 bytes.
W4A8_BETWEEN_TILES = {"rows": 208, "gathering": 248, "slabs": 360}


def machine(
    monkeypatch: pytest.MonkeyPatch,
    schedule: Schedule,
    what: str,
    form: str,
    before: Callable[[str], None] | None = None,
    specialized_cols: int = 768,
) -> Machine:
    """The kernel that the launcher launches, for a matrix of no whole units (warp-specialized: of no whole tiles)."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    found: dict[str, Machine] = {}
    monkeypatch.setattr(launch, "CachedKernel", in_place_of_prepared(found, before))
    monkeypatch.setattr(schedules, "DEEP", {})  # the tile as it is, however few there are
    first = what == "gathering"
    cols = specialized_cols if (schedule.first if first else schedule.second).warp_specialized else 736
    codes = torch.zeros(1, 832, cols // 2, dtype=torch.uint8)
    if form == "bf16":
        matrix = Dense(torch.zeros(1, 832, cols, dtype=torch.bfloat16))
    elif form == "fp8_channel":
        matrix = Fp8Channel(torch.zeros(1, 832, cols, dtype=torch.float8_e4m3fn), torch.zeros(1, 832))
    elif form == "fp8_block":
        blocks = torch.zeros(1, 8 if first else 7, cols // 128)
        matrix = Fp8Block(torch.zeros(1, 832, cols, dtype=torch.float8_e4m3fn), blocks)
    elif form.startswith("int4"):
        zeros = torch.zeros(1, 832, cols // 32, dtype=torch.uint8)
        matrix = Int4(codes, torch.zeros(1, 832, cols // 32, dtype=torch.bfloat16), zeros if "zeros" in form else None)
    elif form.startswith("mxfp4"):
        matrix = Mxfp4(codes, torch.zeros(1, 832, cols // 32, dtype=torch.uint8))
    else:
        matrix = Nvfp4(codes, torch.zeros(1, 832, cols // 16, dtype=torch.float8_e4m3fn), torch.ones(1, 2))
    shape = (1, 64) if what == "slabs" else (64,)
    activation, parts = (GPT_OSS, 2) if first else (None, 1)
    pair = PAIRS[form if form in PAIRS else form.split()[0]]
    prepared = GroupedMatrix.prepare(matrix, torch.zeros(1, 832), parts, CPU, e4m3=pair == "w4a8")
    gemm = launch.Gemm(prepared, activation, pair, WARP_SPECIALIZED)
    source = torch.zeros(64, dtype=torch.int32) if first else None
    scales = {"c8a8": torch.zeros(64, 1), "w8a8": torch.zeros(64, cols // 128), "w4a8": torch.zeros(64, 1)}
    dtype, scale = (torch.float8_e4m3fn, scales[pair]) if pair in scales else (torch.bfloat16, None)
    rows = launch.Rows(torch.zeros(*shape, prepared.cols, dtype=dtype), scale, source)
    out = torch.zeros(*shape, 832, dtype=torch.bfloat16)
    work = TileSchedule.empty(4, RowTiles(schedule.m), CPU)
    gemm(rows, work, schedule, schedule.first if first else schedule.second, out)
    (made,) = found.values()
    return made


@pytest.mark.parametrize(
    ("name", "what", "form"),
    [
        *product(SCHEDULES, ("gathering", "rows"), ("mxfp4",)),
        *product(("up to 5.5 rows", "up to 21 rows"), ("slabs",), ("mxfp4",)),
        *product(("up to 5.5 rows", "up to 90 rows"), ("gathering", "rows"), ("nvfp4", "int4", "int4 with zeros")),
    ],
)
def test_every_schedule_keeps_to_registers(name, what, form, monkeypatch, unless_kept):
    schedule = SCHEDULES[name]
    tile = schedule.first if what == "gathering" else schedule.second
    if tile.warp_specialized:
        schedule, tile = replace(schedule, first=tile.plain, second=tile.plain), tile.plain  # where they don't fit
    made = machine(monkeypatch, schedule, what, form, unless_kept)
    assert made.local == 0
    assert made.stack <= SPILLED.get((name, what, form), 0)
    # Programs of a multiprocessor: 65,536 registers, 227 KiB of shared memory, 1 KiB of it for each program itself.
    assert tile.ctas * tile.warps * 32 * -(-made.registers // 8) * 8 <= 65536
    assert tile.ctas * (made.shared + 1024) <= 227 * 1024
    assert len(made.loops) == 1 + tile.halvings + (schedule.tail > 0)
    assert sum(count(loop)["HGMMA"] for loop in made.loops) == count(made.code)["HGMMA"], "none outside of a loop"
    products = tile.n // 64 * tile.k // 16 * 4 // tile.warps
    assert sum(count(loop)["HGMMA"] == 2 * products for loop in made.loops) == (schedule.tail > 0)
    for loop in made.loops:
        steps = count(loop)
        assert steps["HGMMA"] in (products, 2 * products)
        assert steps[DECODES.get(form, "HMUL2")] == 4 * products, "two values an instruction, each decoded once"
        assert not steps.keys() & {"SHFL", "PRMT", "STS", "STSM", "LDSM", "LDL", "STL"}, "nothing changes threads"
        # Codes; with zero points of every 32 columns as many words for those and their scales.
        read = tile.n * tile.k // 8 * (2 if "zeros" in form else 1)
        assert sum(line.startswith("LDS.128") for line in loop) * 4 * tile.warps * 32 == read
        assert overwritten_operands(loop) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name, (_, schedule) in SPECIALIZED.items()
        for what, tile in (("gathering", schedule.first), ("rows", schedule.second), ("slabs", schedule.second))
        if tile.warp_specialized
    ],
)
def test_warp_specialized_kernels_keep_to_registers(name, what, monkeypatch, unless_kept):
    """Loops that multiply: of whole and halved tiles and of one with its tail, once per consumer."""
    form, schedule = SPECIALIZED[name]
    tile = schedule.first if what == "gathering" else schedule.second
    made = machine(monkeypatch, schedule, what, form, unless_kept)
    assert made.local == 0
    between = {"fp8_channel": FP8_BETWEEN_TILES, W4A8: W4A8_BETWEEN_TILES}.get(form, BETWEEN_TILES)
    wide_blocks = form == "fp8_block" and schedule.first.n == 256
    assert made.stack <= (FP8_BETWEEN_TILES if wide_blocks else between)[what]
    assert made.shared + 1024 <= 227 * 1024
    waits = next(index for index, line in enumerate(made.code) if line.startswith("ACQBULK"))
    early = "LDG", "STG", "ATOM", "RED.", "UTMALDG", "UTMASTG"
    assert not [line for line in made.code[:waits] if line.startswith(early)], "the previous kernel may still write"
    assert accesses_to_barriers(made.code) == []
    four_bit, scaled, fp8 = not form.startswith(("bf16", "fp8")), form == "fp8_block", "fp8" in form
    consumers, parts = (tile.n // 64, tile.k // 64) if four_bit else (2, 1)
    products = tile.k // (32 if fp8 else 16) * tile.n // consumers // 64
    pieces = [products] * (1 + tile.halvings) + [2 * products] * (schedule.tail > 0)
    product = "QGMMA" if fp8 else "HGMMA"
    assert sorted(count(loop)[product] for loop in made.loops) == sorted(pieces * consumers)
    for loop in made.loops:
        steps = count(loop)
        decoding = 10 if form == W4A8 else 16 if four_bit else 0
        assert steps[DECODES.get(form, "HMUL2")] == decoding * parts, "values of an instruction, each decoded once"
        moves = {"SHFL", "PRMT", "STS", "STSM", "LDSM", "LDL", "STL"} - {DECODES.get(form)}
        assert not steps.keys() & moves, "nothing changes threads"
        read = [line for line in loop if line.startswith("LDS") and not line.endswith("[RZ]")]
        assert scaled or len(read) == (2 * parts if four_bit else 0), "words and scales"
        waits = steps[product] // (tile.k // 32) if scaled else 1
        assert sum("DEPBAR" in line for line in loop) == waits, "a stage's products are waited for together, or scaled"
        arrivals = [index for index, line in enumerate(loop) if line.startswith("SYNCS.ARRIVE")]
        assert arrivals
        for index in arrivals:
            together = max(at for at in range(index) if loop[at].startswith("BAR.SYNC"))
            late = [line for line in loop[together:] if "DEPBAR" in line or line in read] if scaled else []
            assert scaled or together >= index - 3, "one thread arrives for its warpgroup, when all of it is there"
            assert not late, "one thread arrives for its warpgroup, when all of it has read"
        assert overwritten_operands(loop) == []


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", [name for name in SPECIALIZED if name.startswith(f"up to {ANY} rows")])
def test_short_sums_keep_to_registers(name, blocks, monkeypatch, unless_kept):
    """Their loops are gone: ptxas could order what they kept apart in another way."""
    form, schedule = SPECIALIZED[name]
    made = machine(monkeypatch, schedule, "rows", form, unless_kept, blocks * (128 if "fp8" in form else 64))
    assert made.local == 0
    assert made.stack <= W4A8_BETWEEN_TILES["rows"]
    assert accesses_to_barriers(made.code) == []
    assert overwritten_operands(made.code) == []


def test_what_the_warp_specialized_kernel_cannot_take():
    """Rows in whole 32 bytes, gathered ones also in blocks of 64, 32 bits of offsets to tokens, and a chip and a Triton
    that have them."""

    def fits(cols=768, stride=768, rows=64, chip=WARP_SPECIALIZED, source=None):
        scales = torch.zeros(1, 64, cols // 32, dtype=torch.uint8)
        weights = Mxfp4(torch.zeros(1, 64, cols // 2, dtype=torch.uint8), scales)
        gemm = launch.Gemm(GroupedMatrix.prepare(weights, None, 1, CPU), None, "w4a16", chip)
        data = torch.empty(rows, stride, dtype=torch.bfloat16, device="meta")[:, :cols]
        return gemm._fits_warp_specialized(launch.Rows(data, source=source), torch.empty(64, 64, device="meta"))

    assert fits()
    assert fits(stride=784)
    assert fits(source=torch.empty(64, device="meta"))
    assert fits(cols=736, stride=736)
    assert not fits(cols=736, stride=736, source=torch.empty(64, device="meta"))
    assert fits(cols=64, stride=64)
    assert not fits(stride=776)
    assert not fits(rows=(1 << 31) // 768 + 1)
    assert not fits(chip=launch.Chip(132, True))


def test_what_comes_by_tma(monkeypatch):
    """Weights of bf16, and tokens that lie in rows."""
    form, schedule = SPECIALIZED["up to 1073741824 rows, bf16"]
    # Tiles of 64, 128 and 128 + 32 tokens: of weights a block each, of tokens one for each 64 rows and the tail.
    for what, blocks in {"gathering": 3, "slabs": 3, "rows": 3 + 1 + 2 + 3}.items():
        assert count(machine(monkeypatch, schedule, what, form).code)["UTMALDG"] == blocks


def test_without_settling_registers_would_be_overwritten():
    """The check can see it: a product that is waited for one iteration later."""
    loop = ["LOP3.LUT R4, R9, R8, RZ, 0xc0, !PT", "HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"]
    late = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert overwritten_operands([*loop, "WARPGROUP.DEPBAR.LE gsb0, 0x0"]) == []
    assert overwritten_operands([*loop, late]) == [(loop[0], loop[1])] * 2
    assert overwritten_operands([*loop, "LDS.128 R4, [R2]", "WARPGROUP.DEPBAR.LE gsb0, 0x0"])

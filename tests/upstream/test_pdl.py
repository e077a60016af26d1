"""Kernels that are set up while the one before ends, as machine code for sm_90a: none touches memory that another one
writes before it has waited. A compiler that moved such an access would make results wrong now and then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton isn't installed")

from support.sass import Machine, in_place_of_prepared

from eprt.activation import Activation
from eprt.config import Routing
from eprt.experts import permute_triton, sort_by_expert_triton
from eprt.experts.grouped import launch
from eprt.experts.grouped.schedules import HOPPER
from eprt.experts.grouped.weights import GroupedMatrix
from eprt.experts.sort_by_expert_triton import RowTiles, TileSchedule
from eprt.routing import launch as routing
from eprt.weights import Dense

CPU = torch.device("cpu")
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
MODULES = sort_by_expert_triton, permute_triton, launch, routing
ACCESSES = "LDG", "STG", "ATOM", "RED.", "UTMALDG", "UTMASTG", "UBLKCP"  # and LDGSTS


@pytest.fixture
def made(monkeypatch) -> Iterator[dict[str, Machine]]:
    """What calls launch, by the kernel's name, as on a Hopper GPU."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    found: dict[str, Machine] = {}

    caches = [member for module in MODULES for member in vars(module).values() if hasattr(member, "cache_clear")]
    for module in MODULES:
        monkeypatch.setattr(module, "CachedKernel", in_place_of_prepared(found))
    for each in caches:
        each.cache_clear()
    yield found
    for each in caches:
        each.cache_clear()


def before_the_wait(machine: Machine) -> list[str]:
    """Accesses to memory."""
    waits = [index for index, line in enumerate(machine.code) if line.startswith("ACQBULK")]
    assert waits
    return [line for line in machine.code[: waits[0]] if line.startswith(ACCESSES)]


def launches_dependents(machine: Machine) -> bool:
    """Whether it lets the next kernel be set up."""
    return any(line.startswith("PREEXIT") for line in machine.code)


@pytest.mark.parametrize("tokens", [16, 1024], ids=["one launch", "counted first"])
def test_lists_and_sums(tokens, made):
    ids = torch.zeros(tokens, 8, dtype=I32)
    place, _, _ = sort_by_expert_triton.sort_and_schedule(ids, 0, 32, RowTiles(64, 16, True))
    weights = torch.zeros(tokens, 8)
    permute_triton.weighted_unpermute(torch.zeros(tokens, 2880), place, weights, torch.zeros(tokens, 2880), True)
    counted = ["_count_by_expert"] if tokens > 16 else []
    assert list(made) == [*counted, "_sort_by_expert", "_weighted_sum"]
    early = {name: before_the_wait(machine) for name, machine in made.items()}
    ids_again = early.pop("_sort_by_expert")
    assert not any(early.values())
    # Whoever counts them has waited for them, and only then lets the next kernel begin.
    assert bool(ids_again) == bool(counted)
    assert all(line.startswith("LDG.E.STRONG.GPU ") for line in ids_again), "from the L2 cache: ids alone are read so"
    assert [name for name, machine in made.items() if launches_dependents(machine)] == list(made)[:-1]


def test_a_sort_beside_another_kernel_reads_ids_alone(made):
    """Until it has waited for that kernel, which is the last thing that it does."""
    ids = torch.zeros(16, 8, dtype=I32)
    sort_by_expert_triton.sort_and_schedule(ids, 0, 32, RowTiles(64, 16, True), beside=True)
    machine = made["_sort_by_expert"]
    early = before_the_wait(machine)
    early = [line for line in early if not line.startswith(("STG", "ATOMS"))]  # the latter of shared memory
    assert early
    assert all(line.startswith("LDG") and "STRONG.GPU" in line for line in early), "from the L2 cache"
    code = machine.code
    rest = code[next(index for index, line in enumerate(code) if line.startswith("ACQBULK")) :]
    assert not any(line.startswith(ACCESSES) for line in rest)
    assert launches_dependents(machine)
    sort_by_expert_triton.sort_and_schedule(ids.T, 0, 32, RowTiles(64, 16, True), beside=True)
    assert before_the_wait(made["_sort_by_expert"]) == [], "the kernel before is the ids' copy"


def test_rows_in_order(made):
    permute_triton.group_rows(torch.zeros(16, 256, dtype=BF16), torch.zeros(16, 4, dtype=I32), 0, 8, BF16)
    assert before_the_wait(made["_group_small"]) == []


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_products(rows, made):
    matrix = GroupedMatrix.prepare(Dense(torch.zeros(1, 512, 736, dtype=BF16)), None, 2, CPU)
    gemm = launch.Gemm(matrix, Activation(), "bf16", launch.Chip(132, False))
    schedule = next(schedule for limit, schedule in HOPPER["bf16"] if rows <= limit)
    source, work = torch.zeros(64, dtype=I32), TileSchedule.empty(4, RowTiles(schedule.m), CPU)
    given = launch.Rows(torch.zeros(64, 736, dtype=BF16), None, source)
    gemm(given, work, schedule, schedule.first, torch.zeros(64, 256, dtype=BF16))
    assert before_the_wait(made["grouped_gemm"]) == []
    assert not launches_dependents(made["grouped_gemm"])


@pytest.mark.parametrize("scheduled", [False, True])
def test_rows_that_become_e4m3(scheduled, made):
    matrix = GroupedMatrix.prepare(Dense(torch.zeros(1, 512, 768, dtype=BF16)), None, 1, CPU)
    gemm = launch.Gemm(matrix, None, "w8a8", launch.Chip(132, False))
    work = TileSchedule.empty(4, RowTiles(16), CPU) if scheduled else None
    launch.quantize_rows(torch.zeros(64, 768, dtype=BF16), work, gemm)
    assert before_the_wait(made["quantize_tiles"]) == []
    assert launches_dependents(made["quantize_tiles"])


def test_routers_read_what_is_constant_first(made):
    """Of the GEMM its weight, of the choice what is added to scores: a load or two each, and nothing is written."""
    rounding = routing.Rounding(F32, F32)
    how = Routing("grouped_sigmoid", num_groups=8, topk_groups=4)
    router = routing.FusedRouter(torch.zeros(256, 512, dtype=BF16), how, 8, rounding, None, torch.zeros(256))
    router.topk(torch.zeros(4, 512, dtype=BF16), None)
    gemm, choice = before_the_wait(made["logits_kernel"]), before_the_wait(made["choice_kernel"])
    assert gemm
    assert len(choice) == 2
    assert all(line.startswith("LDG") for line in gemm + choice)
    assert launches_dependents(made["logits_kernel"])
    assert launches_dependents(made["choice_kernel"])

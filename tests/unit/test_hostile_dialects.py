"""Broken checkpoints of compressed-tensors, GPTQ and AWQ: an error that names the file, or numbers that are right.

EPRT_FUZZ_CASES=2000 is the full number of checkpoints and of configs that are loaded in processes of their own.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases.broken_files import change_config, mutate, mutate_config, outcome, require_all_told
from support.cases.model_recipes import RECIPES, make_model
from support.cases.packed_checkpoints import pack
from support.cases.packed_int4 import AWQ

from eprt.errors import EprtError
from eprt.models import load_layer
from eprt.models.checkpoint import SINGLE
from eprt.weights import Fp8Channel, Int4

FUZZ_CASES = int(os.environ.get("EPRT_FUZZ_CASES", "60"))
MOST_BYTES, MOST_CPU_S, MOST_MB = 6 << 30, 3.0, 300.0
DIALECTS = ("pack_quantized", "pack_quantized_zeros", "pack_quantized_act_order", "float_channel", "gptq", "awq")
SIZES = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "vocab_size": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    recipe = RECIPES["qwen3_moe"]
    folder = tmp_path_factory.mktemp("plain")
    make_model(replace(recipe, fields=recipe.fields | SIZES), torch.bfloat16).save_pretrained(folder)
    return folder


def nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [n, words] -> [n, 8 words]."""
    places = [order.index(i) for i in range(8)]
    return torch.stack([(words.long() >> (4 * place)) % 16 for place in places], dim=-1).flatten(-2)


def expected(held: dict[str, torch.Tensor], dialect: str, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [rows, cols], scales [rows, ...]) of one matrix, taken apart by hand."""
    match dialect:
        case "gptq":
            return nibbles(held[f"{module}.qweight"].T), held[f"{module}.scales"].T
        case "awq":
            return nibbles(held[f"{module}.qweight"], AWQ).T, held[f"{module}.scales"].T
        case "float_channel":
            return held[f"{module}.weight"].view(torch.uint8), held[f"{module}.weight_scale"][:, 0]
        case _:
            return nibbles(held[f"{module}.weight_packed"]), held[f"{module}.weight_scale"]


def assert_right(dialect: str, folder: Path, seed: int) -> None:
    layer = RECIPES["qwen3_moe"].layer
    matrix = load_layer(folder, layer).experts.down
    assert isinstance(matrix, (Int4, Fp8Channel)), f"seed {seed}"
    held = load_file(folder / SINGLE)
    for expert in range(matrix.shape[0]):
        codes, scales = expected(held, dialect, f"model.layers.{layer}.mlp.experts.{expert}.down_proj")
        if isinstance(matrix, Int4):
            found = torch.stack((matrix.codes[expert] % 16, matrix.codes[expert] // 16), dim=-1).flatten(-2)
            assert torch.equal(found.long(), codes), f"seed {seed}"
            assert torch.equal(matrix.scales[expert].float(), scales.float()), f"seed {seed}"
        else:
            assert torch.equal(matrix.data[expert].view(torch.uint8), codes), f"seed {seed}"
            assert torch.equal(matrix.scale[expert], scales.float()), f"seed {seed}"


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 250), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_broken_checkpoints(plain: Path, tmp_path: Path, dialect: str, seeds: range) -> None:
    require_all_told(pack(plain, tmp_path / "whole", dialect), tmp_path, seeds, partial(assert_right, dialect))


def test_a_width_that_cuts_a_word_names_the_file(plain: Path, tmp_path: Path) -> None:
    folder = change_config(pack(plain, tmp_path / "whole", "awq"), moe_intermediate_size=12)
    with pytest.raises(EprtError, match="12 rows or columns, by the config, are no multiple") as found:
        load_layer(folder, RECIPES["qwen3_moe"].layer)
    assert str(folder) in str(found.value)


def resident_mb() -> float:
    with open("/proc/self/statm") as held:
        return int(held.read().split()[1]) * resource.getpagesize() / 2**20


def in_a_process(call: Callable[[], str], told: Path) -> tuple[str, float, float]:
    """Calls in a fork that may have `MOST_BYTES` of addresses; returns what it said, its CPU seconds and how many MB it
    grew by at most."""
    pid = os.fork()
    if pid == 0:
        said, before = "", resident_mb()
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
            said = call()
        except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
            said = f"untyped: {traceback.format_exc()}"
        told.write_text(f"{before} {said}")
        os._exit(0)
    _, status, used = os.wait4(pid, 0)
    assert status == 0, f"the process ended by status {status}"
    before, _, said = told.read_text().partition(" ")
    return said, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024 - float(before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("break_it", [mutate, mutate_config])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_broken_files_cost_little(plain: Path, tmp_path: Path, dialect: str, break_it: Callable[..., None]) -> None:
    whole = pack(plain, tmp_path / "whole", dialect)
    load_layer(whole, RECIPES["qwen3_moe"].layer)  # what is imported on the way is nobody's cost
    outcomes: list[str] = []
    for seed in range(1000, 1000 + FUZZ_CASES // len(DIALECTS)):
        folder = shutil.copytree(whole, tmp_path / "broken")
        break_it(folder, random.Random(f"{seed} {dialect}"))
        load = partial(outcome, folder, partial(assert_right, dialect, folder, seed))
        said, seconds, grown = in_a_process(load, tmp_path / "told")
        assert said.startswith(("right", f"refused: {folder}")), f"seed {seed}: {said[:3000]}"
        assert seconds <= MOST_CPU_S, f"seed {seed}: {said[:300]}"
        assert grown <= MOST_MB, f"seed {seed}: {said[:300]}"
        outcomes.append(said[:5])
        shutil.rmtree(folder)
    assert {"right", "refus"} == set(outcomes)

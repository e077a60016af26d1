"""Broken checkpoints of compressed-tensors, GPTQ and AWQ: an error that names the file, or numbers that are right."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases.broken_files import mutate
from support.cases.model_recipes import RECIPES, make_model
from support.cases.packed_checkpoints import pack
from support.cases.packed_int4 import AWQ

from eprt.errors import EprtError
from eprt.models import load_layer
from eprt.models.checkpoint import SINGLE
from eprt.weights import Fp8Channel, Int4

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


def assert_right(folder: Path, dialect: str, matrix: Int4 | Fp8Channel, layer: int, seed: int) -> None:
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
@pytest.mark.parametrize("dialect", ["pack_quantized", "pack_quantized_zeros", "float_channel", "gptq", "awq"])
def test_broken_checkpoints(plain: Path, tmp_path: Path, dialect: str, seeds: range) -> None:
    whole = pack(plain, tmp_path / "whole", dialect)
    layer, refused = RECIPES["qwen3_moe"].layer, 0
    started = time.process_time()
    for seed in seeds:
        folder = shutil.copytree(whole, tmp_path / str(seed))
        mutate(folder, random.Random(seed))
        refusal, found = "", None
        try:
            found = load_layer(folder, layer).experts.down
        except EprtError as error:
            refusal = str(error)
        if refusal:
            refused += 1
            assert str(folder) in refusal, f"seed {seed}: {refusal}"
            assert len(refusal) < 5000, f"seed {seed}"
        else:
            assert isinstance(found, (Int4, Fp8Channel)), f"seed {seed}"
            assert_right(folder, dialect, found, layer, seed)
        shutil.rmtree(folder)
    assert len(seeds) / 5 < refused < len(seeds), "the mutations no longer do what they should"
    assert time.process_time() - started < 60

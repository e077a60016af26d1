"""Checkpoints that somebody broke, on purpose or not: a typed error that names the file, or numbers that are right."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases.broken_files import (
    LAYER,
    change_config,
    header_of,
    require_all_told,
    set_number,
    shard_of,
    small_checkpoint,
    with_header,
)

from eprt.errors import CheckpointError, ConfigError
from eprt.json_files import MAX_DEPTH, parse_object
from eprt.models import load_layer, shards
from eprt.models.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, read_config
from eprt.models.families import Qwen3Moe
from eprt.models.schemes import scheme_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "model")


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 500), marks=pytest.mark.long)], ids=str)
def test_500_broken_checkpoints(tiny: Path, tmp_path: Path, seeds: range) -> None:
    require_all_told(tiny, tmp_path, seeds, assert_right)


def assert_right(folder: Path, seed: int) -> None:
    """What is loaded is what safetensors' own reader finds, rows of gate and up taken apart by hand."""
    parts = load_layer(folder, 0)
    found = load_file(folder / json.loads((folder / INDEX).read_text())["weight_map"][f"{LAYER}.router.weight"])
    blocks = found[f"{LAYER}.experts.gate_up_proj_blocks"].flatten(2)
    scales = found[f"{LAYER}.experts.gate_up_proj_scales"]
    codes, factors = parts.experts.gate_up.codes, parts.experts.gate_up.scales
    half = blocks.shape[1] // 2
    assert torch.equal(codes[:, :half], blocks[:, 0::2]), f"seed {seed}"
    assert torch.equal(codes[:, half:], blocks[:, 1::2]), f"seed {seed}"
    assert torch.equal(factors[:, :half], scales[:, 0::2]), f"seed {seed}"
    assert torch.equal(parts.experts.down.codes, found[f"{LAYER}.experts.down_proj_blocks"].flatten(2)), f"seed {seed}"
    for tensor in (parts.router.weight, parts.router.bias, parts.experts.gate_up_bias, parts.experts.down_bias):
        assert tensor.isfinite().all(), f"seed {seed}"
    assert torch.equal(parts.router.weight, found[f"{LAYER}.router.weight"]), f"seed {seed}"


HUGE = [10**400, float("nan"), float("inf"), "x" * 10**6, ["y" * 100] * 10**5]


@pytest.mark.parametrize(
    "fields",
    [
        *({field: value} for field in ("swiglu_limit", "hidden_size", "num_local_experts") for value in HUGE),
        {"num_experts_per_tok": 400, "experts_per_token": 400},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_values_that_no_number_holds_or_that_contradict_each_other(folder: Path, fields: dict[str, object]) -> None:
    change_config(folder, **fields)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_layer(folder, 0)
    assert str(folder / CONFIG) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_late_duplicate_key_takes_linear_time(tmp_path: Path) -> None:
    text = "{" + ",".join(f'"{i}": 1' for i in range(200_000)) + ', "199999": 2}'
    (tmp_path / CONFIG).write_text(text)
    started = time.process_time()
    with pytest.raises(CheckpointError, match="key '199999' appears twice"):
        read_config(tmp_path)
    assert time.process_time() - started < 10


def test_nesting_is_limited() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b', "[[[": "\\"[[[["}'

    assert parse_object(nested(MAX_DEPTH), "file")
    for depth in (MAX_DEPTH + 1, 200_000):
        with pytest.raises(CheckpointError, match=f"nested {depth} deep: expected at most {MAX_DEPTH}"):
            parse_object(nested(depth), "file")


def test_a_long_list_of_dense_layers_takes_linear_time(tmp_path: Path) -> None:
    hf = {"num_hidden_layers": 10_000, "mlp_only_layers": list(range(3_000_000))}
    started = time.process_time()
    assert Qwen3Moe().moe_layers(hf) == []
    assert time.process_time() - started < 5


def test_200_000_exclude_patterns() -> None:
    quant = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"lm.{i}" for i in range(200_000)]}
    started = time.process_time()
    assert scheme_of({"quantization_config": quant}, ("model.x",)).format == "nvfp4"
    quant["ignore"] = [f"lm.{i}*" for i in range(200_000)]
    with pytest.raises(ConfigError, match="200000 excluded patterns: expected at most"):
        scheme_of({"quantization_config": quant}, ("model.x",))
    assert time.process_time() - started < 4


def test_a_name_twice_in_a_header_is_refused(folder: Path) -> None:
    """safetensors takes the last."""
    name = f"{LAYER}.router.weight"
    header, data = header_of(path := shard_of(folder, name))
    with_header(path, json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}", data)
    with pytest.raises(CheckpointError, match=r"appears twice|duplicate"):
        load_layer(folder, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"]
)
def test_numbers_that_are_none_are_found_with_their_place(folder: Path, name: str, value: float) -> None:
    place = [2] if name == "router.bias" else [2, 5]
    path = set_number(folder, f"{LAYER}.{name}", place, value)
    with pytest.raises(CheckpointError) as caught:
        load_layer(folder, 0)
    assert f"{path}: tensor '{LAYER}.{name}' holds {value} at {place}" in str(caught.value)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_among_fp8_codes_is_found(tmp_path: Path, code: int) -> None:
    codes = torch.zeros(3, 40, 50, dtype=torch.uint8)
    codes[:] = 0x7E  # the largest number, 448
    codes[:, 0] = 0xFE
    (tmp_path / CONFIG).write_text("{}")
    save_file({"w": codes.view(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w").shape == (3, 40, 50)
    codes[1, 7, 9] = code
    save_file({"w": codes.view(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w", (0,)).shape == (40, 50)
        with pytest.raises(CheckpointError, match=r"holds nan at \[1, 7, 9\]"):
            checkpoint.read("w", (1, slice(5, 9), slice(4, 20)))


@pytest.mark.parametrize("seed", range(20))
def test_slices_are_those_of_torch(tmp_path: Path, seed: int, monkeypatch) -> None:
    """Whatever way the reads are cut: limits are made small so that each is taken."""
    dice = random.Random(seed)
    monkeypatch.setattr(shards, "_SPAN_BYTES", dice.choice((16, 64, 300, 1 << 20)))
    shape = [dice.randint(1, 7) for _ in range(dice.randint(1, 4))]
    tensor = torch.randn(shape).to(dice.choice((torch.float32, torch.bfloat16)))
    (tmp_path / CONFIG).write_text("{}")
    save_file({"other": torch.ones(3), "w": tensor}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        for _ in range(30):
            index: list = []
            for size in shape[: dice.randint(0, len(shape))]:
                first = dice.randrange(size)
                index.append(first if dice.random() < 0.3 else slice(first, dice.randint(first, size)))
            found = checkpoint.read("w", tuple(index))
            assert torch.equal(found, tensor[tuple(index)])
            assert found.is_contiguous()

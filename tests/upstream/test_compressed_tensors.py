"""The compressed-tensors package compresses random experts and writes their config; eprt reads both. No GPU needed."""

from __future__ import annotations

import json
import random
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.cases import packed_checkpoints
from support.cases.model_cases import saved
from support.libraries import needs

from eprt.config import ParallelConfig
from eprt.experts.reference import decode_matrix
from eprt.models import load_layer
from eprt.models.schemes import scheme_of

pytestmark = needs("compressed_tensors")

GROUP = 32
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
CASES = {
    "group": ("pack-quantized", INT4, "int4"),
    "zero points": ("pack-quantized", INT4 | {"symmetric": False}, "int4"),
    "row": ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}, "int4"),
    "fp8 tensor": ("float-quantized", FP8 | {"strategy": "tensor"}, "fp8_tensor"),
    "fp8 row": ("float-quantized", FP8 | {"strategy": "channel"}, "fp8_channel"),
    "fp8 block": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}, "fp8_block"),
    "nvfp4": ("nvfp4-pack-quantized", FP4, "nvfp4"),
    "mxfp4": ("mxfp4-pack-quantized", MX | {"num_bits": 4}, "mxfp4"),
    "mxfp8": ("mxfp8-quantized", MX | {"num_bits": 8}, "mxfp8"),
}


@cache
def package() -> SimpleNamespace:
    """Imported by the first test, not by all workers that collect these. torch.compile would take 20 s for one sum."""
    with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda each: each)):
        names = {name: import_module(f"compressed_tensors.{name}") for name in ("compressors", "quantization")}
        return SimpleNamespace(**names, utils=import_module("compressed_tensors.quantization.utils"))


def ranges(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest values of what shares a scale."""
    rows, cols = weight.shape
    match args.strategy:
        case "tensor":
            return weight.min().view(1), weight.max().view(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            blocks = [-(-size // 128) for size in (rows, cols)]
            whole = torch.zeros(128 * blocks[0], 128 * blocks[1], dtype=weight.dtype)
            whole[:rows, :cols] = weight
            tiles = whole.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            return tiles.amin((1, 3)), tiles.amax((1, 3))
        case _:
            groups = weight.unflatten(1, (-1, args.group_size))
            return groups.amin(2), groups.amax(2)


def compressor(format: str, scheme):
    """A maker of one matrix: the tensors that the package stores, and the numbers that it makes of them again."""
    args, packer = scheme.weights, package().compressors.BaseCompressor.get_value_from_registry(format)
    assert args is not None

    def made(rows: int, cols: int) -> packed_checkpoints.Made:
        weight = torch.randn(rows, cols) * cols**-0.5
        state: dict[str, torch.Tensor] = {"weight": weight}
        if args.actorder == "group":
            # One order for all matrices that take hidden states, which are wider in rows here.
            shared = torch.Generator().manual_seed(cols) if cols < rows else None
            state["weight_g_idx"] = (torch.randperm(cols, generator=shared) // GROUP).to(torch.int32)
            least, most = ranges(weight[:, state["weight_g_idx"].argsort()], args)
        else:
            least, most = ranges(weight, args)
        if format.startswith("nvfp4"):
            state["weight_global_scale"] = package().utils.generate_gparam(weight.min(), weight.max()).view(1)
        state["weight_scale"], zero = package().utils.calculate_qparams(
            least, most, args, state.get("weight_global_scale")
        )
        if args.type == "int":
            state["weight_scale"] = state["weight_scale"].bfloat16()
        state["weight_zero_point"] = zero
        stored = packer.compress(state, scheme)
        numbers = packer.decompress({name: tensor.clone() for name, tensor in stored.items()}, scheme)["weight"]
        return dict(stored), numbers.float()

    return made


def compressed(tmp_path, monkeypatch, name: str, format: str, weights: dict):
    """(packed folder, the same numbers in float32, MoE layer) of a model that the package compressed."""
    library = package().quantization
    scheme = library.QuantizationScheme(targets=["Linear"], weights=library.QuantizationArgs(**weights), format=format)
    settings = library.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*self_attn.*"], format=format
    )
    quant = json.loads(settings.model_dump_json()) | {"quant_method": "compressed-tensors"}
    monkeypatch.setitem(packed_checkpoints.PACK, name, compressor(format, scheme))
    monkeypatch.setitem(packed_checkpoints.QUANT, name, quant)
    *_, layer, folders = saved("qwen3_moe")
    plain = tmp_path / "plain"
    return packed_checkpoints.pack(folders["original"], tmp_path / "packed", name, plain=plain), plain, layer


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_in_activation_order(tmp_path, monkeypatch, symmetric):
    """Held to the package's own numbers by what the experts compute: their columns lie in another order."""
    weights = INT4 | {"actorder": "group", "symmetric": symmetric}
    *folders, layer = compressed(tmp_path, monkeypatch, "ordered", "pack-quantized", weights)
    found, plain = (load_layer(folder, layer) for folder in folders)
    order = found.experts.hidden_order
    assert order is not None
    x = torch.randn(16, found.config.hidden_size)
    for expert in range(found.config.num_experts):
        outputs = []
        for parts, tokens in ((found, x[:, order]), (plain, x)):
            gate_up, down = (getattr(parts.experts, each).expert(expert) for each in ("gate_up", "down"))
            gate, up = (tokens @ decode_matrix(gate_up, 2)[0].T).chunk(2, dim=1)
            outputs.append((torch.nn.functional.silu(gate) * up) @ decode_matrix(down, 1)[0].T)
        assert (outputs[0] - outputs[1]).norm() < 2**-7 * outputs[1].norm()  # the package multiplies in bf16


@pytest.mark.parametrize("name", CASES)
def test_experts_that_the_package_compressed(tmp_path, monkeypatch, name):
    format, weights, kind = CASES[name]
    *folders, layer = compressed(tmp_path, monkeypatch, name, format, weights)
    for rank in range(2):
        found, plain = (load_layer(folder, layer, ParallelConfig(2), rank) for folder in folders)
        assert found.config.weight_format == kind
        for matrix, parts in (("gate_up", 2), ("down", 1)):
            values, expected = decode_matrix(getattr(found.experts, matrix), parts), getattr(plain.experts, matrix).data
            # The package multiplies in bf16 where its scales are: half a step of that, of the value.
            torch.testing.assert_close(values, expected, rtol=2**-8, atol=1e-9)
            assert (values - expected).norm() < 2**-8 * expected.norm()
        gate, up = decode_matrix(found.experts.gate_up, 2).chunk(2, dim=1)
        assert (gate - up).norm() > gate.norm()  # swapped, nothing above would hold


def test_a_module_is_of_the_group_that_the_package_finds():
    """Of groups that name it whole, by expressions and by its class, in any order."""
    match, chosen = pytest.importorskip("compressed_tensors.utils.match"), random.Random(0)
    names = [f"model.layers.3.mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")]
    pool = ["Linear", "re:.*mlp.*", "re:.*experts.*", "re:^model.*", "re:.*down_proj", "re:.*self_attn.*", *names]
    for _ in range(300):
        sizes = chosen.sample((32, 64, 128), chosen.randint(1, 3))
        groups = {str(n): {"targets": chosen.sample(pool, 2), "weights": INT4 | {"group_size": n}} for n in sizes}
        quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        size_of = {target: int(size) for size, group in groups.items() for target in group["targets"]}
        for name in names:
            targets = match.match_targets(name, torch.nn.Linear(1, 1), size_of)
            expected = size_of[targets[0]] if targets else 0
            assert scheme_of({"quantization_config": quant}, (name,)).group == expected, (groups, name)

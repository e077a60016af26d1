"""Checkpoints of compressed-tensors, GPTQ and AWQ: packed nibble by nibble, read by every shard, and refused if bad."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.cases.model_cases import saved
from support.cases.packed_checkpoints import QUANT, edit, pack
from support.cases.packed_int4 import compressed, words

from eprt.config import ParallelConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.experts.reference import decode_matrix
from eprt.models import load_layer
from eprt.models.checkpoint import SINGLE
from eprt.weights import Int4, Nvfp4

PREFIX = "model.layers.1.mlp.experts"
FORMAT = {
    **dict.fromkeys(
        ("pack_quantized", "pack_quantized_zeros", "pack_quantized_channel", "gptq", "gptq_v2", "awq"), "int4"
    ),
    "float_channel": "fp8_channel",
    "float_block": "fp8_block",
    "nvfp4_packed": "nvfp4",
}
WHOLE_ROWS = ("pack_quantized_channel", "float_channel", "nvfp4_packed")  # 48 of 96 columns cut no scale's block


def packed(tmp_path, dialect: str, config=None):
    """(folder, the same experts in float32, MoE layer) of a model whose 96 columns are three groups."""
    *_, layer, folders = saved("qwen3_moe")
    plain = tmp_path / "plain"
    return pack(folders["original"], tmp_path / "packed", dialect, config, plain=plain), plain, layer


@pytest.mark.parametrize("dialect", FORMAT)
def test_every_shard_holds_the_numbers_that_were_packed(tmp_path, dialect):
    folder, plain, layer = packed(tmp_path, dialect)
    for world, moe_tp in [(1, 1), (2, 1)] + ([(2, 2)] if dialect in WHOLE_ROWS else []):
        for rank in range(world):
            parallel = ParallelConfig(world, moe_tp_size=moe_tp)
            found, expected = (load_layer(path, layer, parallel, rank) for path in (folder, plain))
            assert found.config.weight_format == FORMAT[dialect]
            for name, parts in (("gate_up", 2), ("down", 1)):
                values = decode_matrix(getattr(found.experts, name), parts)
                # NVFP4 multiplies three numbers, in either order.
                rtol = 1e-6 if dialect == "nvfp4_packed" else 0
                torch.testing.assert_close(values, getattr(expected.experts, name).data, rtol=rtol, atol=0)


def test_zero_points_and_scales_keep_what_files_say(tmp_path):
    kept = {}
    for dialect in ("pack_quantized", "gptq", "gptq_v2", "awq", "pack_quantized_channel"):
        folder, _, layer = packed(tmp_path / dialect, dialect)
        up = load_layer(folder, layer).experts.gate_up
        assert isinstance(up, Int4)
        kept[dialect] = (up.group, up.scales.dtype, up.zeros is None)
    assert kept == {
        "pack_quantized": (32, torch.bfloat16, True),
        "gptq": (32, torch.float32, True),
        "gptq_v2": (32, torch.float32, False),
        "awq": (32, torch.float32, False),
        "pack_quantized_channel": (64, torch.bfloat16, True),
    }


def test_only_own_experts_are_read(tmp_path):
    from eprt.models.checkpoint import Checkpoint

    for dialect in ("pack_quantized", "awq"):
        folder, _, layer = packed(tmp_path / dialect, dialect)
        read = []
        for ranks in (1, 4):
            with Checkpoint(folder) as checkpoint:
                load_layer(checkpoint, layer, ParallelConfig(ranks), 0)
                read.append({name for name in checkpoint.touched if ".experts." in name})
        mine = {name for name in read[0] if int(name.split(".experts.")[1].split(".")[0]) < 2}
        assert read[1] == mine


def test_an_input_scale_is_one_over_the_stored_one(tmp_path):
    folder, _, layer = packed(tmp_path, "nvfp4_packed")
    down = load_layer(folder, layer).experts.down
    assert isinstance(down, Nvfp4)
    stored = load_file(folder / SINGLE)[f"{PREFIX}.3.down_proj.input_global_scale"]
    assert down.input_scale is not None
    assert torch.equal(down.input_scale[3], 1 / stored)


def test_a_group_is_not_cut_by_tensor_parallelism(tmp_path):
    folder, _, layer = packed(tmp_path, "pack_quantized")
    with pytest.raises(ConfigError, match="cuts a scale block of 32"):
        load_layer(folder, layer, ParallelConfig(2, moe_tp_size=2), 0)


@pytest.mark.parametrize("dialect", ["pack_quantized", "gptq", "awq", "float_channel"])
def test_a_packed_shared_expert_is_decoded(tmp_path, dialect):
    *_, layer, folders = saved("deepseek_v3")
    folder = pack(folders["original"], tmp_path / "a", dialect, plain=tmp_path / "plain")
    found, plain = (load_layer(path, layer).shared for path in (folder, tmp_path / "plain"))
    for name in ("gate", "up", "down"):
        assert torch.equal(getattr(found, name), getattr(plain, name).bfloat16()), name


# ---- config.json ----------------------------------------------------------------------------------------------------

INT = QUANT["pack_quantized"]["config_groups"]["group_0"]["weights"]


EXPERTS, NAMED = r"re:.*experts\.\d+\..*", {"format": "pack-quantized"}


def group(targets: list[str], **weights: object) -> dict[str, object]:
    return {"targets": targets, "weights": {**INT, **weights}}


@pytest.mark.parametrize(
    "change",
    [
        {"ignore": ["re:.*experts.*"]},
        {"ignore": [f"{PREFIX}.0.{name}_proj" for name in ("gate", "up", "down")]},
        {"config_groups": {"group_0": group(["re:.*self_attn.*"])}},
        {"config_groups": {}},
    ],
)
def test_experts_that_are_ignored_or_no_target_are_plain(tmp_path, change):
    *_, layer, folders = saved("qwen3_moe")
    folder = edit(folders["original"], tmp_path, config={"quantization_config": QUANT["pack_quantized"] | change})
    assert load_layer(folder, layer).config.weight_format == "bf16"


@pytest.mark.parametrize(
    ("dialect", "change"),
    [
        ("pack_quantized", {"config_groups": {"a": group(["Linear"], num_bits=8), "b": group([EXPERTS])}}),
        ("pack_quantized", {"format": "mixed-precision", "config_groups": {"a": group(["Linear"]) | NAMED}}),
        ("gptq", {"dynamic": {"+:.*mlp\\.experts.*": {"bits": 4}, ".*": {"bits": 8}}, "bits": 8}),
        ("gptq", {"dynamic": {"-:.*self_attn.*": {}}}),
        ("awq", {"modules_to_not_convert": ["gate", "self_attn"], "version": "GEMM"}),
    ],
)  # fmt: skip
def test_settings_of_single_modules(tmp_path, dialect, change):
    folder, plain, layer = packed(tmp_path, dialect, {"quantization_config": QUANT[dialect] | change})
    values = decode_matrix(load_layer(folder, layer).experts.gate_up, 2)
    assert torch.equal(values, load_layer(plain, layer).experts.gate_up.data)


PACKED, GPTQ, AWQ = QUANT["pack_quantized"], QUANT["gptq"], QUANT["awq"]
FLOAT = {"num_bits": 8, "type": "float"}
MIXED = PACKED | {"config_groups": {"a": group(["re:.*down_proj"]), "b": group(["Linear"], group_size=64)}}


def linears(**weights: object) -> dict[str, object]:
    return PACKED | {"config_groups": {"a": group(["Linear"], **weights)}}


@pytest.mark.parametrize(
    ("quant", "text"),
    [
        (PACKED | {"format": "int-quantized"}, "format 'int-quantized' is not supported: expected one of pack-q"),
        (PACKED | {"format": None}, "format None is not supported"),
        (linears(num_bits=8), "num_bits 8 is not supported"),
        (linears(group_size=16), "group_size 16 is not supported: expected 32"),
        (linears(strategy="tensor"), "strategy 'tensor' is not supported"),
        (linears(actorder="dynamic"), "actorder 'dynamic'"),
        (MIXED, r"in several ways: down_proj int4 \(groups of 32\), gate_proj int4 \(groups of 64\)"),
        (PACKED | {"ignore": ["re:.*up_proj"]}, "in several ways"),
        (PACKED | {"ignore": ["re:(.+)+x"]}, "no repeated group"),
        (PACKED | {"ignore": ["re:.*.*.*.*.*x"]}, "at most 4 repeats"),
        (PACKED | {"ignore": ["re:(((("]}, "is no regular expression"),
        (PACKED | {"ignore": [f"re:{i}" for i in range(1001)]}, "1001 regular expressions"),
        (PACKED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not supported"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format 'sparse-24-bitmask'"),
        (compressed("float-quantized", **FLOAT, strategy="block", block_structure=[64, 64]), r"structure \[64, 64\]"),
        (compressed("float-quantized", num_bits=8, type="int", strategy="channel"), "expected float of 8"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32), "group_size 32"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"group_size": 48}, "group_size 48"),
        (GPTQ | {"dynamic": {"-:.*up_proj": {}}}, "in several ways"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported: expected gemm"),
        (AWQ | {"bits": "4"}, "bits is '4': expected an integer"),
    ],
)  # fmt: skip
def test_settings_that_eprt_has_no_numbers_for_are_refused(tmp_path, quant, text):
    *_, layer, folders = saved("qwen3_moe")
    folder = edit(folders["original"], tmp_path, config={"quantization_config": quant})
    with pytest.raises(ConfigError, match=text):
        load_layer(folder, layer)


# ---- tensors --------------------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("dialect", "suffix", "change", "text"),
    [
        ("pack_quantized", "weight_shape", lambda t: t + 8, r"says \[72, 104\]: expected \[64, 96\]"),
        ("pack_quantized", "weight_shape", lambda t: t[:1], "has shape"),
        ("pack_quantized", "weight_shape", None, "weight_shape' is missing"),
        ("pack_quantized", "weight_packed", lambda t: t[:, :-1], "has shape"),
        ("pack_quantized", "weight_packed", lambda t: t.view(torch.uint8), "has dtype U8: expected I32"),
        ("pack_quantized", "weight_scale", lambda t: t * NAN, "holds nan"),
        ("pack_quantized", "weight_scale", lambda t: t * 0, "scales such as 0.0"),
        ("pack_quantized", "weight_scale", lambda t: -t, "scales such as -"),
        ("pack_quantized", "weight_scale", lambda t: t.repeat(1, 2), "has shape"),
        ("pack_quantized", "weight_scale", None, r"weight_scale' .*is missing"),
        ("pack_quantized_zeros", "weight_zero_point", None, r"weight_zero_point' .*is missing"),
        ("float_channel", "weight_scale", lambda t: t[:-1], "has shape"),
        ("float_channel", "weight_scale", lambda t: t * NAN, "holds nan"),
        ("float_block", "weight_scale", None, r"weight_scale' .*is missing"),
        ("nvfp4_packed", "weight_global_scale", lambda t: t * 0, "scales such as 0.0"),
        ("nvfp4_packed", "weight_global_scale", None, "weight_global_scale' is missing"),
        ("gptq", "qweight", lambda t: t[:-1], "has shape"),
        ("gptq", "qzeros", lambda t: t + 1, "zero points such as 9: expected 8, the config says sym"),
        ("gptq", "qzeros", lambda t: t * 0 - 1, "zero points of 16"),
        ("gptq", "g_idx", lambda t: t.flip(0), "column 0 is of group 2, expected 0: columns in activation order"),
        ("gptq", "scales", lambda t: t.float() * NAN, "holds nan"),
        ("awq", "qweight", lambda t: t.T.contiguous(), "has shape"),
        ("awq", "qzeros", None, "qzeros' is missing"),
    ],
)
def test_a_bad_tensor_of_one_expert_is_named(tmp_path, dialect, suffix, change, text):
    folder, _, layer = packed(tmp_path, dialect)
    load_layer(folder, layer)
    name = f"{PREFIX}.2.down_proj.{suffix}"
    tensor = load_file(folder / SINGLE)[name]
    bad = edit(
        folder, tmp_path / "bad", {name: tensor if change is None else change(tensor)}, drop=() if change else (name,)
    )
    with pytest.raises(CheckpointError, match=text) as caught:
        load_layer(bad, layer)
    assert f"'{name}'" in str(caught.value)


def test_a_v1_zero_of_sixteen_is_no_zero_point(tmp_path):
    folder, _, layer = packed(
        tmp_path, "gptq_v2", {"quantization_config": QUANT["gptq_v2"] | {"checkpoint_format": "gptq"}}
    )
    with pytest.raises(CheckpointError, match=r"zero points of 16 .* gptq_v2\?"):
        load_layer(folder, layer)


def test_activation_order_needs_its_index(tmp_path):
    folder, _, layer = packed(tmp_path, "gptq", {"quantization_config": GPTQ | {"desc_act": True}})
    load_layer(folder, layer)  # sorted after all
    drop = [name for name in load_file(folder / SINGLE) if name.endswith("g_idx")]
    with pytest.raises(CheckpointError, match="g_idx' is missing"):
        load_layer(edit(folder, tmp_path / "bad", drop=drop), layer)


def test_words_by_hand():
    assert words(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])).tolist() == [0x87654321 - 2**32]
    assert words(torch.tensor([0, 15, 0, 0, 0, 0, 0, 1])).tolist() == [0x100000F0]

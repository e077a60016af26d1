"""Packed checkpoints of every dialect: the numbers that were packed, read by every shard, and refused if bad."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.cases.model_cases import packed, refuses, same_numbers, saved
from support.cases.packed_checkpoints import EACH, EXPERT, PREFIX, QUANT, edit, mixed
from support.cases.packed_int4 import compressed, words

from eprt.config import ParallelConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.experts.reference import decode_matrix
from eprt.models import load_layer
from eprt.models.checkpoint import SINGLE, Checkpoint
from eprt.weights import Int4

ORDERED = ("gptq_act_order", "pack_quantized_act_order")
# Of each format: what config.json's becomes, and the families whose experts are packed so.
INT4 = ("pack_quantized", "pack_quantized_zeros", "pack_quantized_channel", "gptq", "gptq_v2", "awq")
MODELOPT = ("qwen3_moe", "deepseek_v3", "nemotron_h")
STORED: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: ("int4", ("qwen3_moe",)) for name in INT4},
    "float_channel": ("fp8_channel", ("qwen3_moe",)),
    "float_block": ("fp8_block", ("qwen3_moe",)),
    "nvfp4_packed": ("nvfp4", ("qwen3_moe",)),
    **{name: (name, MODELOPT) for name in ("nvfp4", "fp8_tensor")},
    "fp8_block": ("fp8_block", ("deepseek_v3", "qwen3_moe")),
    "mxfp8": ("mxfp8", ("qwen3_moe",)),
    "mxfp4": ("mxfp4", ("deepseek_v4",)),
}
# 48 of 96 columns cut no scale's block. Those of 32 and 128 are kept whole by no split but by experts.
CUT = ("pack_quantized_channel", "float_channel", "nvfp4_packed", "nvfp4", "fp8_tensor")


@pytest.mark.parametrize(("dialect", "case"), [(name, case) for name, (_, cases) in STORED.items() for case in cases])
def test_every_shard_holds_the_numbers_that_were_packed(tmp_path, dialect, case):
    folder, plain, layer = packed(tmp_path, dialect, case=case)
    for world, moe_tp in [(1, 1), (2, 1), (4, 1)] + ([(2, 2)] if dialect in CUT else []):
        for rank in range(world):
            parallel = ParallelConfig(world, moe_tp_size=moe_tp)
            found, expected = (load_layer(path, layer, parallel, rank) for path in (folder, plain))
            assert found.config.weight_format == STORED[dialect][0]
            # NVFP4 multiplies three numbers, in either order.
            same_numbers(found, expected, rtol=1e-6 if dialect.startswith("nvfp4") else 0)


def test_experts_of_mixtrals_kind_by_the_names_that_llm_compressor_gives_them(tmp_path):
    """It makes a linear layer of each expert's matrix, and names them as most families do: w1, w3, w2 become these."""
    folder, plain, layer = packed(tmp_path, "pack_quantized", case="mixtral")
    names = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}

    def renamed(tensors):
        for old, new in names.items():
            tensors = {name.replace(old, new): values for name, values in tensors.items()}
        return tensors

    renamed_folder = edit(folder, tmp_path / "renamed", renamed)
    for rank in range(2):
        same_numbers(*(load_layer(path, layer, ParallelConfig(2), rank) for path in (renamed_folder, plain)))


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
    for dialect in ("pack_quantized", "awq"):
        folder, _, layer = packed(tmp_path / dialect, dialect)
        read = []
        for ranks in (1, 4):
            with Checkpoint(folder) as checkpoint:
                load_layer(checkpoint, layer, ParallelConfig(ranks), 0)
                read.append({name for name in checkpoint.touched if ".experts." in name})
        mine = {name for name in read[0] if int(name.split(".experts.")[1].split(".")[0]) < 2}
        assert read[1] == mine


@pytest.mark.parametrize(
    ("dialect", "suffix"),
    [("nvfp4", "input_scale"), ("fp8_tensor", "input_scale"), ("nvfp4_packed", "input_global_scale")],
)
def test_input_scales_are_those_of_the_file(tmp_path, dialect, suffix):
    """Or one over them, in compressed-tensors."""
    folder, _, layer = packed(tmp_path, dialect)
    experts, tensors = load_layer(folder, layer, ParallelConfig(2), 1).experts, load_file(folder / SINGLE)
    for matrix, names in ((experts.gate_up, ("gate", "up")), (experts.down, ("down",))):
        stored = [[tensors[f"{PREFIX}.{e}.{name}_proj.{suffix}"] for name in names] for e in range(4, 8)]
        wanted = torch.tensor(stored)
        assert torch.equal(matrix.input_scale, 1 / wanted if dialect == "nvfp4_packed" else wanted)


@pytest.mark.parametrize(
    ("dialect", "case", "shared"),
    [
        *((name, "deepseek_v3", None) for name in ("pack_quantized", "gptq", "awq", "float_channel", *ORDERED)),
        *((name, "deepseek_v3", None) for name in ("nvfp4", "fp8_block")),
        ("mxfp4", "deepseek_v4", "fp8_block_e8m0"),  # as published
    ],
)
def test_a_packed_shared_expert_is_decoded(tmp_path, dialect, case, shared):
    folder, plain, layer = packed(tmp_path, dialect, case=case, shared=shared)
    found, known = (load_layer(path, layer).shared for path in (folder, plain))
    for name in ("gate", "up", "down"):
        # NVFP4 multiplies three numbers, in either order, which may round to a neighbour.
        rtol = 2**-7 if dialect == "nvfp4" else 0
        torch.testing.assert_close(getattr(found, name), getattr(known, name).bfloat16(), rtol=rtol, atol=0)


# ---- config.json ----------------------------------------------------------------------------------------------------

INT = QUANT["pack_quantized"]["config_groups"]["group_0"]["weights"]


EXPERTS, NAMED = r"re:.*experts\.\d+\..*", {"format": "pack-quantized"}


def group(targets: list[str], **weights: object) -> dict[str, object]:
    return {"targets": targets, "weights": {**INT, **weights}}


@pytest.mark.parametrize(
    ("dialect", "change"),
    [
        ("pack_quantized", {"ignore": ["re:.*experts.*"]}),
        ("pack_quantized", {"ignore": EACH}),
        ("pack_quantized", {"config_groups": {"group_0": group(["re:.*self_attn.*"])}}),
        ("pack_quantized", {"config_groups": {}}),
        *(
            (dialect, {"modules_to_not_convert": names})
            for dialect in ("fp8_block", "awq")
            for names in (["lm_head", PREFIX.removesuffix(".experts")], ["experts"], ["model.layers.1."])
        ),
        ("nvfp4", {"ignore": [f"{PREFIX}*"]}),
        ("nvfp4", {"exclude_modules": ["model.layers.1.*"]}),
        ("nvfp4", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}),
    ],
)
def test_experts_that_the_config_leaves_out_are_plain(tmp_path, dialect, change):
    *_, layer, folders = saved("qwen3_moe")
    folder = edit(folders["original"], tmp_path, config={"quantization_config": QUANT[dialect] | change})
    assert load_layer(folder, layer).config.weight_format == "bf16"


@pytest.mark.parametrize(
    ("dialect", "change"),
    [
        ("pack_quantized", {"config_groups": {"a": group(["Linear"], num_bits=8), "b": group([EXPERTS])}}),
        ("pack_quantized", {"config_groups": {"a": group(["re:.*mlp.*"], num_bits=8), "b": group([EXPERTS])}}),
        ("pack_quantized", {"config_groups": {"a": group([EXPERTS], num_bits=8), "b": group(EACH)}}),
        ("pack_quantized", {"format": "mixed-precision", "config_groups": {"a": group(["Linear"]) | NAMED}}),
        ("gptq", {"dynamic": {"+:.*mlp\\.experts.*": {"bits": 4}, ".*": {"bits": 8}}, "bits": 8}),
        ("gptq", {"dynamic": {"-:.*self_attn.*": {}}}),
        ("gptq_v2", {"checkpoint_format": None, "format": "gptq_v2"}),
        ("awq", {"dynamic": {"+:.*mlp\\.experts.*": {"bits": 4}, ".*": {"bits": 8}}, "bits": 8}),
        ("awq", {"modules_to_not_convert": ["gate", "self_attn"], "version": "GEMM"}),
        ("fp8_tensor", {"quant_method": "fp8", "weight_block_size": None}),
    ],
)  # fmt: skip
def test_settings_of_single_modules(tmp_path, dialect, change):
    folder, plain, layer = packed(tmp_path, dialect, {"quantization_config": QUANT[dialect] | change})
    same_numbers(load_layer(folder, layer), load_layer(plain, layer))


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
        (linears(actorder="rows"), "actorder 'rows'"),
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
        (GPTQ | {"dynamic": {".*down_proj": {"sym": False}}}, r"32, zero points\), gate_proj int4 \(.* 32\)"),
        (GPTQ | {"dynamic": {".*down_proj": {"desc_act": True, "group_size": -1}}}, "whole rows, activation order"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported: expected gemm"),
        (AWQ | {"bits": "4"}, "bits is '4': expected an integer"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64}, "group_size 64 is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, "quant_algo"),
        ({"quant_method": "modelopt", "ignore": "lm_head"}, "ignore is 'lm_head': expected a list"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\] is not supported"),
        ("fp8", "quantization_config is 'fp8': expected an object"),
    ],
)  # fmt: skip
def test_settings_that_eprt_has_no_numbers_for_are_refused(tmp_path, quant, text):
    assert refuses(text, tmp_path, "qwen3_moe", config={"quantization_config": quant}) is ConfigError


@pytest.mark.parametrize(
    ("quant", "text"),
    [
        (PACKED | {"ignore": [rf"re:.*experts\.2\.{name}_proj" for name in ("gate", "up", "down")]}, r"2.* bf16"),
        (PACKED | {"ignore": [f"{PREFIX}.3.{name}_proj" for name in ("gate", "up", "down")]}, r"3.* bf16"),
        (PACKED | {"ignore": [r"re:.*experts\.1\.up_proj"]}, "up_proj bf16"),
        (
            PACKED
            | {"config_groups": {"a": group([r"re:.*experts\.[0-2]\..*"]), "b": group(["Linear"], group_size=64)}},
            r"experts.0.* int4 \(groups of 32\), .*experts.3.* int4 \(groups of 64\)",
        ),
        (PACKED | {"config_groups": {"a": group([r"re:.*experts\.[0-2]\..*"])}}, r"experts.3.* bf16; expected one"),
        (GPTQ | {"dynamic": {r"-:.*experts\.3\..*": {}}}, "experts.3.* bf16"),
        (GPTQ | {"dynamic": {r"+:.*experts\.3\..*": {"bits": 8}}}, "bits 8 is not supported"),
        (AWQ | {"dynamic": {r"-:.*experts\.3\..*": {}}}, "experts.3.* bf16"),
        (AWQ | {"dynamic": {r"+:.*experts\.3\..*": {"bits": 8}}}, "bits 8 is not supported"),
        (AWQ | {"modules_to_not_convert": ["experts.1.down_proj"]}, "down_proj bf16"),
        (QUANT["fp8_block"] | {"modules_to_not_convert": [f"{PREFIX}.1.down_proj"]}, "down_proj bf16"),
        (
            mixed({name: "FP8" if ".experts.2." in name else "NVFP4" for name in EACH}),
            "experts.0.* nvfp4, .*experts.2.* fp8_tensor",
        ),
        (
            mixed({f"{PREFIX}.down_proj": "FP8", f"{PREFIX}.gate_up_proj": "NVFP4"}),
            "experts.down_proj fp8_tensor, .*experts.gate_up_proj nvfp4",
        ),
    ],
)  # fmt: skip
def test_experts_of_one_layer_are_stored_alike(tmp_path, quant, text):
    """Whichever expert differs, and whichever this rank holds."""
    *_, layer, folders = saved("qwen3_moe")
    folder = edit(folders["original"], tmp_path, config={"quantization_config": quant})
    for rank in range(4):
        with pytest.raises(ConfigError, match=text):
            load_layer(folder, layer, ParallelConfig(4), rank)


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
        ("float_channel", "weight_scale", lambda t: -t, "scales such as -"),
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
        ("gptq", "g_idx", lambda t: t.flip(0), "column 0 is of group 2, expected 0, as the config says"),
        ("gptq", "scales", lambda t: t.float() * NAN, "holds nan"),
        ("awq", "qweight", lambda t: t.T.contiguous(), "has shape"),
        ("awq", "qzeros", None, "qzeros' is missing"),
    ],
)
def test_a_bad_tensor_of_one_expert_is_named(tmp_path, dialect, suffix, change, text):
    folder, _, layer = packed(tmp_path, dialect)
    load_layer(folder, layer)
    assert_named(folder, tmp_path / "bad", layer, f"{PREFIX}.2.down_proj.{suffix}", change, text)


def assert_named(folder, bad, layer, name, change, text):
    """A tensor that is changed, or dropped where `change` is None, is refused by its name."""
    tensor = load_file(folder / SINGLE)[name].clone()
    bad = edit(folder, bad, {name: tensor if change is None else change(tensor)}, drop=() if change else (name,))
    with pytest.raises(CheckpointError, match=text) as caught:
        load_layer(bad, layer)
    assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize("dialect", ["gptq", "pack_quantized"])
def test_biases_of_zero_that_a_packer_writes_are_none(tmp_path, dialect):
    folder, plain, layer = packed(tmp_path, dialect, case="deepseek_v3")
    rows = {name.removesuffix("weight"): len(t) for name, t in load_file(plain / SINGLE).items() if EXPERT.match(name)}
    folder = edit(folder, tmp_path / "biased", {f"{name}bias": torch.zeros(n).half() for name, n in rows.items()})
    load_layer(folder, layer)
    assert_named(folder, tmp_path / "bad", layer, f"{PREFIX}.2.down_proj.bias", torch.ones_like, "64 of 64 are other")


def test_a_v1_zero_of_sixteen_is_no_zero_point(tmp_path):
    folder, _, layer = packed(
        tmp_path, "gptq_v2", {"quantization_config": QUANT["gptq_v2"] | {"checkpoint_format": "gptq"}}
    )
    with pytest.raises(CheckpointError, match=r"zero points of 16 .* gptq_v2\?"):
        load_layer(folder, layer)


@pytest.mark.parametrize("dialect", ORDERED)
def test_columns_in_activation_order_are_sorted_at_load(tmp_path, dialect):
    """By the files' own indices: hidden states once for all experts, what is between the matrices expert by expert."""
    folder, plain, layer = packed(tmp_path, dialect)
    known, tensors = load_layer(plain, layer).experts, load_file(folder / SINGLE)
    suffix = next(name for name in tensors if name.endswith("g_idx")).rpartition(".")[2]

    def by_group(module: str) -> list[int]:
        groups = tensors[f"{PREFIX}.{module}.{suffix}"].tolist()
        return [column for group in range(max(groups) + 1) for column, of in enumerate(groups) if of == group]

    for rank in range(2):
        found = load_layer(folder, layer, ParallelConfig(2), rank)
        hidden = by_group("0.up_proj")
        assert found.experts.hidden_order is not None
        assert found.experts.hidden_order.tolist() == hidden != sorted(hidden)
        gate_up, down = decode_matrix(found.experts.gate_up, 2), decode_matrix(found.experts.down, 1)
        assert len({tuple(by_group(f"{expert}.down_proj")) for expert in found.shard.experts}) > 1
        for local, expert in enumerate(found.shard.experts):
            inner = by_group(f"{expert}.down_proj")
            both = inner + [len(inner) + row for row in inner]
            assert torch.equal(gate_up[local], known.gate_up.data[expert][both][:, hidden])
            assert torch.equal(down[local], known.down.data[expert][:, inner])


def swapped(index: torch.Tensor) -> torch.Tensor:
    """Another order with groups of the same size."""
    first, second = int((index == 0).nonzero()[0]), int((index == 1).nonzero()[0])
    index[[first, second]] = index[[second, first]]
    return index


@pytest.mark.parametrize(
    ("module", "change", "text"),
    [
        ("3.gate_proj", swapped, "another activation order than those of .*0.gate_proj"),
        ("3.up_proj", swapped, "another activation order"),
        ("2.down_proj", lambda index: index.clamp(max=1), "64 columns are of group 1: expected 32 .* groups 0 to 2"),
        ("2.down_proj", lambda index: index - 1, "32 columns are of group -1"),
        ("2.down_proj", lambda index: index + 2**30, "of group 10737418"),
        ("2.down_proj", lambda index: index[:-1], "has shape"),
        ("2.down_proj", lambda index: index.long(), "has dtype I64: expected I32"),
        ("2.down_proj", None, "is missing"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_be_shared_or_is_none_is_refused(tmp_path, module, change, text):
    folder, _, layer = packed(tmp_path, "gptq_act_order")
    assert_named(folder, tmp_path / "bad", layer, f"{PREFIX}.{module}.g_idx", change, text)


def test_columns_in_activation_order_are_not_cut(tmp_path):
    folder, _, layer = packed(tmp_path, "gptq_act_order")
    with pytest.raises(ConfigError, match=r"down_proj\.g_idx'.* can't be cut: use moe_tp_size 1"):
        load_layer(folder, layer, ParallelConfig(2, moe_tp_size=2), 0)


def test_activation_order_needs_its_index(tmp_path):
    folder, _, layer = packed(tmp_path, "gptq", {"quantization_config": GPTQ | {"desc_act": True}})
    assert load_layer(folder, layer).experts.hidden_order is None  # sorted after all
    drop = [name for name in load_file(folder / SINGLE) if name.endswith("g_idx")]
    with pytest.raises(CheckpointError, match="g_idx' is missing"):
        load_layer(edit(folder, tmp_path / "bad", drop=drop), layer)


def test_words_by_hand():
    assert words(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])).tolist() == [0x87654321 - 2**32]
    assert words(torch.tensor([0, 15, 0, 0, 0, 0, 0, 1])).tolist() == [0x100000F0]

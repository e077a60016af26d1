"""Settings of published checkpoints that name formats and modules in ways of their own, and how other libraries read
them: vLLM 0.32 (`Fp8Config`, `ModelOptQuantConfigBase`, `INCConfigParser`, `_normalize_quantization_config`), SGLang,
transformers (`Mxfp4Config`) and the compressed-tensors package's `QuantizationArgs`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from support.cases.model_cases import packed, refuses, same_numbers
from support.cases.packed_checkpoints import EACH, PREFIX, QUANT, edit, mixed
from support.cases.packed_int4 import GROUP, compressed

from eprt.config import ParallelConfig
from eprt.errors import ConfigError
from eprt.models import load_layer
from eprt.models.checkpoint import QUANT_CONFIG, read_config
from eprt.models.deepseek import DeepseekV4
from eprt.models.gpt_oss import GptOss
from eprt.models.schemes import Scheme, scheme_of

NVFP4, FP8, ROUND = QUANT["nvfp4"], QUANT["fp8_block"], QUANT["auto_round"]


def of_layer(quant: dict[str, Any], layer: int = 1) -> Scheme:
    prefix = f"model.layers.{layer}.mlp.experts"
    names = (*(f"{prefix}.0.{name}_proj" for name in ("down", "gate", "up")), prefix)
    return scheme_of({"quantization_config": quant}, names, 8)


# ---- what is left out -----------------------------------------------------------------------------------------------


LEFT_OUT = [
    *(FP8 | {"ignored_layers": names} for names in (EACH, [PREFIX], ["model.layers.1"])),
    FP8 | {"ignored_layers": [PREFIX], "modules_to_not_convert": ["lm_head"]},
    *(NVFP4 | {"ignore": [name]} for name in ("model.layers.1", "model.layers.1.mlp", "layers.1.mlp.experts")),
    NVFP4 | {"exclude_modules": ["lm_head", PREFIX]},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": {"num_bits": 8, "type": "float"}},  # in config.json
    ROUND | {"extra_config": {name: {"bits": 16, "data_type": "float"} for name in EACH}},
    ROUND | {"extra_config": {name.removeprefix("model."): {"bits": 16} for name in EACH}},
    ROUND | {"extra_config": {r"layers\.1\.mlp\.experts.*": {"bits": 16}}},
    ROUND | {"block_name_to_quantize": "model.layers.0,model.visual.blocks"},
    ROUND | {"block_name_to_quantize": ["model.layers.0"]},
]


@pytest.mark.parametrize(
    ("quant", "format"),
    [
        *((quant, "bf16") for quant in LEFT_OUT),
        (FP8 | {"ignored_layers": ["lm_head", "model.layers.1.mlp.gate", "gate"]}, "fp8_block"),
        (FP8 | {"ignored_layers": ["model.layers.11", "model.layers.1.mlp.gate_proj"]}, "fp8_block"),
        (NVFP4 | {"ignore": ["model.layers.11", "model.layers.1.mlp.gate", "lm_head", "mtp.layers.1*"]}, "nvfp4"),
        (ROUND | {"extra_config": {"model.layers.1.mlp.gate": {"bits": 16}, r".*mlp\.gate$": {"bits": 16}}}, "int4"),
        (ROUND | {"block_name_to_quantize": None, "packing_format": None}, "int4"),
    ],
)
def test_experts_that_other_words_leave_out_or_do_not(quant, format):
    assert of_layer(quant).format == format


def test_one_projection_that_modelopt_leaves_out_is_named():
    left = [f"{PREFIX}.{expert}.down_proj" for expert in range(8)]
    with pytest.raises(ConfigError, match="in several ways: down_proj bf16, gate_proj nvfp4"):
        of_layer(NVFP4 | {"ignore": left})


def test_gpt_oss_experts_that_are_left_out():
    published = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    for left, format in ((published, "mxfp4"), ([*published, PREFIX], "bf16")):
        hf = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}}
        assert scheme_of(hf, GptOss().expert_modules(1)).format == format


V4 = [f"layers.3.ffn.experts.{expert}.{name}" for expert in range(8) for name in ("w1", "w2", "w3")]


@pytest.mark.parametrize(
    ("quant", "format"),
    [
        (mixed(dict.fromkeys(V4, "NVFP4")), "nvfp4"),
        (NVFP4 | {"ignore": V4}, "bf16"),
        (QUANT["pack_quantized"] | {"ignore": [r"re:.*experts\.\d+\.w[123]$"]}, "bf16"),
        (QUANT["pack_quantized"] | {"ignore": [r"re:.*experts\.\d+\.(gate|up|down)_proj$"]}, "bf16"),
    ],
)
def test_settings_by_one_of_two_names_that_files_of_a_family_use(quant, format):
    """transformers' names of DeepSeek-V4's matrices, which these leave out, are of the same matrices."""
    assert scheme_of({"quantization_config": quant}, DeepseekV4().expert_modules(3), 8).format == format
    one_left = mixed(dict.fromkeys((name for name in V4 if not name.endswith("w3")), "NVFP4"))
    with pytest.raises(ConfigError, match="gate_proj nvfp4, up_proj bf16; expected one"):
        scheme_of({"quantization_config": one_left}, DeepseekV4().expert_modules(3), 8)


# ---- words for the same ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "known"),
    [
        (FP8 | {"quant_method": "FP8"}, FP8),
        (QUANT["gptq"] | {"quant_method": "GPTQ"}, QUANT["gptq"]),
        (QUANT["pack_quantized"] | {"quant_method": "compressed_tensors"}, QUANT["pack_quantized"]),
        (NVFP4 | {"quant_algo": "nvfp4"}, NVFP4),
        (NVFP4 | {"quant_method": "modelopt_fp4"}, NVFP4),
        (QUANT["fp8_tensor"] | {"quant_method": "modelopt_fp8"}, QUANT["fp8_tensor"]),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, NVFP4),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, NVFP4),
    ],
)
def test_other_words_for_a_format(quant, known):
    assert of_layer(quant) == of_layer(known)


def test_modules_that_a_nested_section_of_modelopt_excludes():
    quant = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": [f"{PREFIX}*"]}}
    assert (of_layer(quant, 1).format, of_layer(quant, 2).format) == ("bf16", "nvfp4")


@pytest.mark.parametrize("said", ["128x128", [128, 128]])
def test_block_structure_as_text(said):
    quant = json.loads(json.dumps(QUANT["float_block"]))
    quant["config_groups"]["group_0"]["weights"] |= {"block_structure": said, "strategy": "BLOCK"}
    assert of_layer(quant).format == "fp8_block"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("packer", "format"), [("mxfp4_packed", "mxfp4"), ("fp8_pb_wo", "fp8_block"), ("fp8_pc_pt", "fp8_channel")]
)
def test_experts_and_a_shared_one(tmp_path, packer, format, rank):
    """compressed-tensors' MXFP4, as Kimi-K3 is published, and ModelOpt's FP8 by blocks and by rows."""
    folder, plain, layer = packed(tmp_path, packer, case="deepseek_v3")
    found, known = (load_layer(path, layer, ParallelConfig(2), rank) for path in (folder, plain))
    assert found.config.weight_format == format
    same_numbers(found, known)
    assert found.shared is not None
    assert known.shared is not None
    assert torch.equal(found.shared.up, known.shared.up.bfloat16())


@pytest.mark.parametrize(
    ("format", "weights", "text"),
    [
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}, "group_size 16 is not supported"),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "int", "group_size": 32}, "expected float of 4"),
        ("mxfp8-quantized", {"num_bits": 4, "type": "float", "group_size": 32}, "expected float of 8"),
    ],
)
def test_mx_formats_that_are_none(format, weights, text):
    with pytest.raises(ConfigError, match=text):
        of_layer(compressed(format, **weights))


def test_compression_config_is_what_its_authors_once_called_it(tmp_path):
    """Until llm-compressor 0.1, and read by vLLM where there is no other."""
    folder, _, layer = packed(tmp_path, "pack_quantized")
    config = {"compression_config": QUANT["pack_quantized"]}
    older = edit(folder, tmp_path / "b", config=config, drop=("quantization_config",))
    assert load_layer(older, layer).config.weight_format == "int4"
    (older / QUANT_CONFIG).write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert read_config(older)["quantization_config"]["quant_method"] == "compressed-tensors"


# ---- AutoRound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("dialect", "change"),
    [
        ("gptq", {}),
        ("gptq", {"packing_format": None, "backend": "auto"}),
        ("gptq", {"bits": 8, "extra_config": {name: {"bits": 4} for name in EACH}}),
        ("gptq", {"group_size": 128, "extra_config": {rf"{PREFIX}.*": {"group_size": GROUP}}}),
        ("awq", {"packing_format": "auto_round:auto_awq", "sym": False}),
    ],
)
def test_what_auto_round_packed(tmp_path, dialect, change, rank):
    """As GPTQ's first version or AWQ's `gemm` do."""
    folder, plain, layer = packed(tmp_path, dialect, {"quantization_config": ROUND | change})
    same_numbers(*(load_layer(path, layer, ParallelConfig(2), rank) for path in (folder, plain)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"packing_format": "auto_round"}, "packing_format 'auto_round' is not supported: expected one of auto_round:"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported"),
        ({"bits": 2}, "bits 2 is not supported: expected 4"),
        ({"extra_config": {f"{PREFIX}.3.up_proj": {"bits": 16}}}, "up_proj bf16"),
        ({"extra_config": {f"{PREFIX}.3.up_proj": {"bits": 8}}}, "bits 8 is not supported: expected 4"),
        ({"extra_config": {r".*experts\.3\..*": {"bits": 16}}}, r"experts.3.* bf16"),
        ({"extra_config": {PREFIX: 16}}, "expected an object"),
        ({"block_name_to_quantize": 3}, "block_name_to_quantize is 3: expected a list of str"),
    ],
)
def test_what_auto_round_may_not_say(tmp_path, change, text):
    assert refuses(text, tmp_path, "qwen3_moe", config={"quantization_config": ROUND | change}) is ConfigError


def test_200_000_names_of_auto_round():
    extra = {f"lm.{i}": {"bits": 16} for i in range(200_000)}
    started = time.process_time()
    assert of_layer(ROUND | {"extra_config": extra}).format == "int4"
    with pytest.raises(ConfigError, match="200000 regular expressions: expected at most"):
        of_layer(ROUND | {"extra_config": {f"{name}.*": rule for name, rule in extra.items()}})
    assert time.process_time() - started < 4


@pytest.mark.parametrize(
    "quant",
    [
        QUANT["gptq"] | {"dynamic": {rf"-:.*layers\.{i}\.self_attn.*": {} for i in range(1000)}},
        ROUND | {"extra_config": {rf".*layers\.{i}\.self_attn.*": {"bits": 16} for i in range(1000)}},
    ],
    ids=["dynamic", "extra_config"],
)
def test_1000_rules_for_512_experts(quant):
    started = time.process_time()
    assert scheme_of({"quantization_config": quant}, (*EACH[:3], PREFIX), 512).format == "int4"
    assert time.process_time() - started < 4

"""Model families: shards against the transformers modules' own parameters, packed formats against the bytes written."""

from __future__ import annotations

import json
import re

import pytest
import torch
from model_cases import MODELS, canonical_experts, edit, make_model, shard_of
from safetensors.torch import load_file

from eprt.checkpoint import CONFIG, QUANT_CONFIG, SINGLE, Checkpoint
from eprt.config import MoEConfig, ParallelConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.models import FAMILIES, family_for, load_layer
from eprt.models.formats import e8m0_scale, positive_scale
from eprt.models.tiny import write_tiny_checkpoint
from eprt.weights import ExpertWeights

WORLDS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]
STORED = ["original", "stacked"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """case -> (model, MoE block, layer, {"original", "stacked"} -> folder), made on first use."""
    made = {}

    def get(case):
        if case not in made:
            model, block, layer = make_model(case)
            root = tmp_path_factory.mktemp(case)
            model.save_pretrained(root / "original")
            model.save_pretrained(root / "stacked", save_original_format=False)
            made[case] = (model, block, layer, {kind: root / kind for kind in STORED})
        return made[case]

    return get


def equal(found, expected):
    """Same dtype, same bytes."""
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def every_rank(source, layer):
    for world, moe_tp in WORLDS:
        for rank in range(world):
            yield load_layer(source, layer, ParallelConfig(world, moe_tp_size=moe_tp), rank)


class TestAgainstTransformers:
    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("case", MODELS)
    def test_experts_of_every_shard(self, saved, case, stored):
        _, block, layer, folders = saved(case)
        gate_up, down = canonical_experts(block)
        with Checkpoint(folders[stored]) as checkpoint:
            for parts in every_rank(checkpoint, layer):
                expected = shard_of(gate_up, down, parts.config.activation.parts, parts.shard)
                equal(parts.experts.gate_up.data, expected[0])
                equal(parts.experts.down.data, expected[1])

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("case", MODELS)
    def test_router_chooses_alike(self, saved, case, stored):
        _, block, layer, folders = saved(case)
        parts = load_layer(folders[stored], layer)
        hidden = torch.randn(33, parts.config.input_size, generator=torch.Generator().manual_seed(1)).bfloat16()
        token_ids = torch.arange(33)
        theirs = block.router if case == "gpt_oss" else block.gate
        _, weights, ids = theirs(hidden, token_ids) if case.endswith("hash") else theirs(hidden)
        found = parts.router(hidden, token_ids)
        empty = torch.zeros(33, parts.config.num_experts)
        expected = empty.scatter(1, ids, weights.float())
        assert torch.equal(empty.scatter(1, found.ids.long(), found.weights), expected)

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("case", MODELS)
    def test_shared_expert_and_latent_projections(self, saved, case, stored):
        _, block, layer, folders = saved(case)
        parts = load_layer(folders[stored], layer)
        theirs = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
        assert (parts.shared is None) == (theirs is None) == (parts.config.shared is None)
        if parts.shared is not None:
            gate = theirs.gate_proj.weight if hasattr(theirs, "gate_proj") else None
            equal(parts.shared.gate, gate)
            equal(parts.shared.up, theirs.up_proj.weight)
            equal(parts.shared.down, theirs.down_proj.weight)
            assert parts.config.shared.intermediate_size == theirs.up_proj.weight.shape[0]
            output_gate = getattr(block, "shared_expert_gate", None)
            equal(parts.shared.output_gate, None if output_gate is None else output_gate.weight)
        assert (parts.latent is not None) == (case == "nemotron_h")
        if parts.latent is not None:
            equal(parts.latent.into, block.fc1_latent_proj.weight)
            equal(parts.latent.out_of, block.fc2_latent_proj.weight)

    @pytest.mark.parametrize("case", MODELS)
    def test_config_and_module_path(self, saved, case):
        model, block, layer, folders = saved(case)
        parts = load_layer(folders["original"], layer)
        assert model.get_submodule(parts.module_path) is block
        limit = getattr(model.config, "swiglu_limit", None)
        assert parts.config.activation.limit == limit
        assert (parts.config.activation.alpha, parts.config.activation.beta) == (
            (1.702, 1.0) if case == "gpt_oss" else (1.0, 0.0)
        )
        assert parts.config.activation.gated == (not case.startswith("nemotron"))
        assert parts.config.bias == (case == "gpt_oss")

    def test_biases_of_every_shard(self, saved):
        _, block, layer, folders = saved("gpt_oss")
        bias = block.experts.gate_up_proj_bias
        bias = torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=1)[:, :, None]
        for parts in every_rank(folders["original"], layer):
            expected, _ = shard_of(bias, bias.expand(-1, -1, 4), 2, parts.shard)
            equal(parts.experts.gate_up_bias, expected[:, :, 0])
            mine = slice(parts.shard.first_expert, parts.shard.end_expert)
            equal(parts.experts.down_bias, block.experts.down_proj_bias[mine])

    def test_float32(self, tmp_path):
        model, block, layer = make_model("qwen3_moe", torch.float32)
        model.save_pretrained(tmp_path)
        parts = load_layer(tmp_path, layer)
        assert parts.config.weight_format == "f32"
        equal(parts.experts.gate_up.data, block.experts.gate_up_proj.data)
        assert parts.router.weight.dtype == torch.float32

    @pytest.mark.parametrize(
        ("case", "pattern", "replacement"),
        [
            ("deepseek_v4", r"^model\.", ""),  # as published: no model. prefix
            ("qwen3_5_moe_text", r"^model\.", "model.language_model."),  # inside the vision-language model
            ("nemotron_h", r"^backbone\.", "model."),
        ],
    )
    def test_other_prefixes(self, saved, tmp_path, case, pattern, replacement):
        _, block, layer, folders = saved(case)
        renamed = edit(
            folders["original"], tmp_path, lambda held: {re.sub(pattern, replacement, k): v for k, v in held.items()}
        )
        equal(load_layer(renamed, layer).experts.down.data, block.experts.down_proj.data)

    def test_nested_text_config(self, saved, tmp_path):
        _, block, layer, folders = saved("qwen3_5_moe_text")
        text = json.loads((folders["original"] / CONFIG).read_text())
        nested = edit(folders["original"], tmp_path)
        outer = {"model_type": "qwen3_5_moe", "dtype": "bfloat16", "text_config": text, "vision_config": {}}
        (nested / CONFIG).write_text(json.dumps(outer))
        parts = load_layer(nested, layer)
        equal(parts.experts.down.data, block.experts.down_proj.data)
        assert parts.module_path == "model.language_model.layers.0.mlp"

    def test_module_path_of_the_vision_language_model(self):
        import transformers

        fields = MODELS["qwen3_5_moe_text"][2]
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
        config = transformers.Qwen3_5MoeConfig(text_config=dict(fields), vision_config=vision)
        with torch.device("meta"):
            model = transformers.Qwen3_5MoeForConditionalGeneration(config)
        path = family_for(config.to_dict()).module_path(0)
        assert type(model.get_submodule(path)).__name__ == "Qwen3_5MoeSparseMoeBlock"


class TestGptOssMxfp4:
    """The decoder here is transformers', ours is not involved."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def folder(cls, tmp_path_factory):
        cls.path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "m", intermediate_size=128)
        cls.tensors = {}
        for file in sorted(cls.path.glob("*.safetensors")):
            cls.tensors |= load_file(file)

    def decode(self, codes, scales):
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = codes.unflatten(-1, (-1, 16)).contiguous()
        return convert_moe_packed_tensors(blocks, scales.contiguous(), dtype=torch.float32).transpose(1, 2)

    @pytest.mark.parametrize("layer", [0, 1])
    def test_every_shard(self, layer):
        prefix = f"model.layers.{layer}.mlp.experts"
        whole = {}
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (self.tensors[f"{prefix}.{name}_{kind}"] for kind in ("blocks", "scales"))
            whole[name] = self.decode(blocks.flatten(2), scales)
        gate_up = torch.cat((whole["gate_up_proj"][:, 0::2], whole["gate_up_proj"][:, 1::2]), dim=1)
        assert not torch.equal(gate_up[:, :128], gate_up[:, 128:])
        for parts in every_rank(self.path, layer):
            expected = shard_of(gate_up, whole["down_proj"], 2, parts.shard)
            equal(self.decode(parts.experts.gate_up.codes, parts.experts.gate_up.scales), expected[0])
            equal(self.decode(parts.experts.down.codes, parts.experts.down.scales), expected[1])

    def test_a_slice_that_cuts_blocks(self):
        with pytest.raises(ConfigError, match="cut an MXFP4 block of 32"):
            load_layer(self.path, 0, ParallelConfig(8, moe_tp_size=8))

    def test_an_unsupported_format(self, tmp_path):
        write_tiny_checkpoint(tmp_path)
        config = json.loads((tmp_path / CONFIG).read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / CONFIG).write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="fp8_block"):
            load_layer(tmp_path, 0)

    def test_same_seed_same_bytes_and_nothing_is_overwritten(self, tmp_path):
        again = write_tiny_checkpoint(tmp_path / "again", intermediate_size=128)
        for file in sorted(self.path.iterdir()):
            assert file.read_bytes() == (again / file.name).read_bytes()
        with pytest.raises(ConfigError, match="already holds a checkpoint"):
            write_tiny_checkpoint(again)
        with pytest.raises(ConfigError, match="multiples of 32"):
            write_tiny_checkpoint(tmp_path / "odd", hidden_size=48)


# ---- packed formats: random bytes written, the same bytes expected ----------------------------------------------


def random_bytes(*shape, high=256):
    return torch.randint(0, high, shape, dtype=torch.uint8)


def e4m3(*shape):
    """Finite positive e4m3 numbers: codes 1 to 126."""
    return (random_bytes(*shape, high=126) + 1).view(torch.float8_e4m3fn)


def scalar():
    return torch.rand(()) + 0.5


def e8m0(*shape):
    return random_bytes(*shape, high=255)


PACK = {
    "nvfp4": lambda rows, cols: {
        "weight": random_bytes(rows, cols // 2),
        "weight_scale": e4m3(rows, cols // 16),
        "weight_scale_2": scalar(),
        "input_scale": scalar(),
    },
    "fp8_tensor": lambda rows, cols: {
        "weight": e4m3(rows, cols),
        "weight_scale": scalar(),
        "input_scale": scalar(),
    },
    "fp8_block": lambda rows, cols: {
        "weight": e4m3(rows, cols),
        "weight_scale_inv": torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5,
    },
    "mxfp4": lambda rows, cols: {"weight": random_bytes(rows, cols // 2), "scale": e8m0(rows, cols // 32)},
    "mxfp8": lambda rows, cols: {"weight": e4m3(rows, cols), "weight_scale": e8m0(rows, cols // 32)},
}
QUANT = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    "fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
}
# checkpoint suffix -> canonical field, by format
CANONICAL = {
    "nvfp4": {
        "weight": "codes",
        "weight_scale": "scales",
        "weight_scale_2": "global_scale",
        "input_scale": "input_scale",
    },
    "fp8_tensor": {"weight": "data", "weight_scale": "scale", "input_scale": "input_scale"},
    "fp8_block": {"weight": "data", "weight_scale_inv": "scale"},
    "mxfp4": {"weight": "codes", "scale": "scales"},
    "mxfp8": {"weight": "data", "weight_scale": "scales"},
}
EXPERT = re.compile(r"(.*\.(?:shared_)?experts?(?:\.\d+)?)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")


def pack(source, target, format, config=None, scale_name=None):
    """The checkpoint with every routed and shared expert matrix replaced by random numbers of `format`."""
    torch.manual_seed(3)

    def replace(held):
        packed = {}
        for name, tensor in held.items():
            if EXPERT.match(name):
                for suffix, value in PACK[format](*tensor.shape).items():
                    packed[
                        f"{name.removesuffix('weight')}{scale_name.get(suffix, suffix) if scale_name else suffix}"
                    ] = value
            else:
                packed[name] = tensor
        return packed

    return edit(source, target, replace, {"quantization_config": QUANT[format], **(config or {})})


def whole_field(tensors, prefix, names, suffix, num_experts):
    """[E, parts, ...] of one canonical field, from the per-expert tensors."""
    rows = [torch.stack([tensors[f"{prefix}.{e}.{name}.{suffix}"] for name in names]) for e in range(num_experts)]
    return torch.stack(rows)


def expected_field(tensors, prefix, names, suffix, config, shard, down):
    whole = whole_field(tensors, prefix, names, suffix, config.num_experts)
    whole = whole[shard.first_expert : shard.end_expert]
    if whole.dim() == 2:
        return whole
    cut = whole.chunk(shard.moe_tp_size, dim=3 if down else 2)[shard.moe_tp_rank]
    return cut.flatten(1, 2)


CASES = {
    "qwen3_moe": ("model.layers.1.mlp.experts", ("gate_proj", "up_proj"), ("down_proj",)),
    "deepseek_v3": ("model.layers.1.mlp.experts", ("gate_proj", "up_proj"), ("down_proj",)),
    "deepseek_v4": ("model.layers.1.ffn.experts", ("w1", "w3"), ("w2",)),
    "nemotron_h": ("backbone.layers.1.mixer.experts", ("up_proj",), ("down_proj",)),
}
PACKED = [
    *((case, format) for case in ("qwen3_moe", "deepseek_v3", "nemotron_h") for format in ("nvfp4", "fp8_tensor")),
    ("deepseek_v3", "fp8_block"),
    ("qwen3_moe", "fp8_block"),
    ("qwen3_moe", "mxfp8"),
    ("deepseek_v4", "mxfp4"),
]


class TestPacked:
    @pytest.mark.parametrize(("case", "format"), PACKED)
    def test_every_shard(self, saved, tmp_path, case, format):
        *_, layer, folders = saved(case)
        folder = pack(folders["original"], tmp_path, format)
        tensors = load_file(folder / SINGLE)
        prefix, first, second = CASES[case]
        # 96 columns are 3 blocks of 32 and less than one of 128: no split but by experts keeps those whole.
        worlds = [(1, 1), (2, 1), (4, 1)] + ([(2, 2)] if format in ("nvfp4", "fp8_tensor") else [])
        for world, moe_tp in worlds:
            for rank in range(world):
                parts = load_layer(folder, layer, ParallelConfig(world, moe_tp_size=moe_tp), rank)
                assert parts.config.weight_format == format
                for suffix, field in CANONICAL[format].items():
                    for matrix, names in ((parts.experts.gate_up, first), (parts.experts.down, second)):
                        down = names is second
                        expected = expected_field(tensors, prefix, names, suffix, parts.config, parts.shard, down)
                        equal(getattr(matrix, field), expected)

    @pytest.mark.parametrize("stored", ["e8m0", "f32"])
    def test_v4_scales_in_other_dtypes(self, saved, tmp_path, stored):
        *_, layer, folders = saved("deepseek_v4")
        plain = load_layer(pack(folders["original"], tmp_path / "u8", "mxfp4"), layer).experts

        def change(held):
            def convert(codes):
                return (
                    codes.view(torch.float8_e8m0fnu)
                    if stored == "e8m0"
                    else torch.ldexp(torch.ones(codes.shape), codes.int() - 127)
                )

            return {name: convert(t) if name.endswith(".scale") else t for name, t in held.items()}

        other = load_layer(edit(tmp_path / "u8", tmp_path / stored, change), layer).experts
        for matrix, expected in ((other.gate_up, plain.gate_up), (other.down, plain.down)):
            equal(matrix.scales, expected.scales)
            equal(matrix.codes, expected.codes)

    def test_v4_stacked_as_transformers_keeps_it(self, saved, tmp_path):
        """int8 codes and `_scale_inv`, all experts in one tensor."""
        *_, layer, folders = saved("deepseek_v4")
        apart = load_layer(pack(folders["original"], tmp_path / "apart", "mxfp4"), layer).experts
        prefix = "model.layers.1.mlp.experts."
        changes = {}
        for name, matrix in (("gate_up_proj", apart.gate_up), ("down_proj", apart.down)):
            changes[prefix + name] = matrix.codes.view(torch.int8)
            changes[f"{prefix}{name}_scale_inv"] = matrix.scales.view(torch.float8_e8m0fnu)
        config = {"quantization_config": QUANT["mxfp4"]}
        folder = edit(folders["stacked"], tmp_path / "stacked", changes, config)
        found = load_layer(folder, layer, ParallelConfig(2), 1).experts
        for matrix, expected in ((found.gate_up, apart.gate_up), (found.down, apart.down)):
            equal(matrix.codes, expected.codes[2:])
            equal(matrix.scales, expected.scales[2:])

    def test_scalars_of_one_entry(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path / "a", "nvfp4")
        vectors = edit(folder, tmp_path / "b", lambda h: {k: v[None] if v.dim() == 0 else v for k, v in h.items()})
        equal(load_layer(vectors, layer).experts.down.global_scale, load_layer(folder, layer).experts.down.global_scale)

    def test_weight_only_has_no_input_scale(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path / "a", "nvfp4")
        bare = edit(folder, tmp_path / "b", lambda h: {k: v for k, v in h.items() if not k.endswith("input_scale")})
        assert load_layer(bare, layer).experts.gate_up.input_scale is None

    def test_packed_shared_expert_is_decoded(self, saved, tmp_path):
        *_, layer, folders = saved("deepseek_v3")
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        folder = pack(folders["original"], tmp_path / "nvfp4", "nvfp4")
        tensors = load_file(folder / SINGLE)
        shared = load_layer(folder, layer).shared
        for found, name in ((shared.gate, "gate_proj"), (shared.up, "up_proj"), (shared.down, "down_proj")):
            held = {s: tensors[f"model.layers.1.mlp.shared_experts.{name}.{s}"] for s in PACK["nvfp4"](1, 32)}
            codes = torch.stack((held["weight"] & 15, held["weight"] >> 4), dim=-1).flatten(1).long()
            scale = held["weight_scale"].float().repeat_interleave(16, dim=1) * held["weight_scale_2"]
            equal(found, (values[codes] * scale).bfloat16())

    def test_block_fp8_shared_expert_is_decoded(self, saved, tmp_path):
        *_, layer, folders = saved("deepseek_v3")
        folder = pack(folders["original"], tmp_path, "fp8_block")
        tensors = load_file(folder / SINGLE)
        name = "model.layers.1.mlp.shared_experts.down_proj"  # [64, 192]: two blocks, the second one short
        scale = tensors[f"{name}.weight_scale_inv"]
        spread = torch.cat((scale[:, :1].expand(1, 128), scale[:, 1:].expand(1, 64)), dim=1)
        expected = (tensors[f"{name}.weight"].float() * spread).bfloat16()
        equal(load_layer(folder, layer).shared.down, expected)


class TestQuantizationConfig:
    def load(self, saved, tmp_path, format, quantization):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path / "packed", format, {"quantization_config": quantization})
        return load_layer(folder, layer)

    def test_mixed_precision_by_module(self, saved, tmp_path):
        layers = {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4"}, "lm_head": {"quant_algo": "FP8"}}
        quant = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        assert self.load(saved, tmp_path, "nvfp4", quant).config.weight_format == "nvfp4"

    def test_mixed_precision_by_linear(self, saved, tmp_path):
        layers = {"model.layers.1.mlp.experts.0.down_proj": {"quant_algo": "FP8"}}
        quant = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        assert self.load(saved, tmp_path, "fp8_tensor", quant).config.weight_format == "fp8_tensor"

    @pytest.mark.parametrize(
        "quant",
        [
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.1.mlp.experts*"]},
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.1.*"]},
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        ],
    )
    def test_layers_left_in_bf16(self, saved, quant, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = edit(folders["original"], tmp_path, config={"quantization_config": quant})
        assert load_layer(folder, layer).config.weight_format == "bf16"

    def test_hf_quant_config_alone(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path / "a", "nvfp4")
        folder = edit(folder, tmp_path / "b", drop=("quantization_config",))
        (folder / QUANT_CONFIG).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
        assert load_layer(folder, layer).config.weight_format == "nvfp4"

    @pytest.mark.parametrize(
        ("quant", "text"),
        [
            ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported"),
            ({"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, "quant_algo"),
            ({"quant_method": "modelopt", "ignore": "lm_head"}, "ignore is 'lm_head': expected a list"),
            ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
            ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\] is not supported"),
            ("fp8", "quantization_config is 'fp8': expected an object"),
        ],
    )
    def test_refused(self, saved, quant, text, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = edit(folders["original"], tmp_path, config={"quantization_config": quant})
        with pytest.raises(ConfigError, match=text):
            load_layer(folder, layer)

    @pytest.mark.parametrize("said", ["nvfp4", "fp8_tensor", "fp8_block", "mxfp8"])
    def test_plain_tensors_that_the_config_calls_packed(self, saved, tmp_path, said):
        *_, layer, folders = saved("qwen3_moe")
        folder = edit(folders["original"], tmp_path, config={"quantization_config": QUANT[said]})
        with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight' has dtype BF16: expected"):
            load_layer(folder, layer)

    def test_packed_tensors_that_the_config_calls_plain(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path / "a", "fp8_block")
        folder = edit(folder, tmp_path / "b", drop=("quantization_config",))
        with pytest.raises(CheckpointError, match="has dtype F8_E4M3: expected BF16"):
            load_layer(folder, layer)

    def test_float16_is_refused(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        folder = edit(folders["original"], tmp_path, config={"dtype": "float16"})
        with pytest.raises(ConfigError, match="dtype 'float16' is not supported"):
            load_layer(folder, layer)


class TestScales:
    """Each bad scale in one expert's tensor; the error names file, tensor and value."""

    def spoil(self, saved, tmp_path, case, format, suffix, value):
        *_, layer, folders = saved(case)
        folder = pack(folders["original"], tmp_path / "good", format)
        prefix, _, (down,) = CASES[case]
        name = f"{prefix}.2.{down}.{suffix}"
        tensor = load_file(folder / SINGLE)[name]
        load_layer(folder, layer)
        if value is None:
            folder = edit(folder, tmp_path / "bad", drop=(name,))
        else:
            tensor.view(-1)[-1:] = torch.tensor(value).to(tensor.dtype)
            folder = edit(folder, tmp_path / "bad", {name: tensor})
        with pytest.raises(CheckpointError) as caught:
            load_layer(folder, layer)
        assert f"'{name}'" in str(caught.value)
        if value is not None:
            assert str(folder / SINGLE) in str(caught.value)
            assert str(value) in str(caught.value)
        # A rank that holds other experts loads, unless every rank can see it in the headers.
        load_layer(folder, layer, ParallelConfig(4), 0)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None], ids=str)
    @pytest.mark.parametrize(
        ("case", "format", "suffix"),
        [
            ("qwen3_moe", "nvfp4", "weight_scale_2"),
            ("qwen3_moe", "nvfp4", "input_scale"),
            ("nemotron_h", "fp8_tensor", "weight_scale"),
            ("nemotron_h", "fp8_tensor", "input_scale"),
            ("deepseek_v3", "fp8_block", "weight_scale_inv"),
        ],
    )
    def test_float32(self, saved, tmp_path, case, format, suffix, value):
        self.spoil(saved, tmp_path, case, format, suffix, value)

    @pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), None], ids=str)
    def test_e4m3(self, saved, tmp_path, value):
        self.spoil(saved, tmp_path, "qwen3_moe", "nvfp4", "weight_scale", value)

    @pytest.mark.parametrize("value", [255, None], ids=str)
    @pytest.mark.parametrize(
        ("case", "format", "suffix"), [("deepseek_v4", "mxfp4", "scale"), ("qwen3_moe", "mxfp8", "weight_scale")]
    )
    def test_e8m0(self, saved, tmp_path, case, format, suffix, value):
        self.spoil(saved, tmp_path, case, format, suffix, value)

    def test_every_power_of_two_becomes_its_byte(self):
        bytes_ = torch.arange(255, dtype=torch.uint8)
        powers = torch.ldexp(torch.ones(255, dtype=torch.float64), bytes_.double() - 127).float()
        assert powers[0] == 2.0**-127
        assert torch.equal(e8m0_scale(powers, "t"), bytes_)

    @pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 1.0000001, 2.0**-128, float("inf"), float("nan")])
    def test_other_floats_are_no_e8m0(self, value):
        with pytest.raises(CheckpointError, match=r"^t: 1 of 2 scales such as .* expected powers of two"):
            e8m0_scale(torch.tensor([[1.0, value]]), "t")

    def test_smallest_e8m0_is_legal_and_float8_block_scales_become_float32(self):
        zero = torch.zeros(2, 2, dtype=torch.uint8)
        equal(e8m0_scale(zero, "t"), zero)
        equal(positive_scale(zero.view(torch.float8_e8m0fnu), "t"), torch.full((2, 2), 2.0**-127))
        with pytest.raises(CheckpointError, match="nan"):
            positive_scale(torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), "t")


class TestTensorsRefused:
    """config.json and the tensors disagree."""

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize(("change", "original", "stacked"), [
        ({"num_experts": 3, "num_local_experts": 3}, r"gate.weight' has shape \(4, 64\): expected \(3, 64\)", None),
        ({"moe_intermediate_size": 64}, r"experts.0.gate_proj.weight' has shape \(96, 64\): expected \(64, 64\)",
         r"gate_up_proj' has shape \(4, 192, 64\): expected \(4, 128, 64\)"),
        ({"hidden_size": 32}, r"gate.weight' has shape \(4, 64\): expected \(4, 32\)", None),
    ])  # fmt: skip
    def test_sizes(self, saved, tmp_path, stored, change, original, stacked):
        *_, layer, folders = saved("qwen3_moe")
        folder = edit(folders[stored], tmp_path, config=change)
        with pytest.raises(CheckpointError, match=original if stored == "original" else stacked or original):
            load_layer(folder, layer)

    def test_more_experts_than_the_config_says(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        gate = load_file(folders["original"] / SINGLE)["model.layers.1.mlp.gate.weight"][:3]
        config = {"num_experts": 3, "num_local_experts": 3}
        folder = edit(folders["original"], tmp_path, {"model.layers.1.mlp.gate.weight": gate}, config)
        with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight': config\.json says there are 3"):
            load_layer(folder, layer)

    @pytest.mark.parametrize(
        ("case", "name"),
        [
            ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
            ("qwen3_moe", "model.layers.1.mlp.gate.weight"),
            ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
            ("deepseek_v3", "model.layers.1.mlp.shared_experts.up_proj.weight"),
            ("deepseek_v4", "model.layers.1.ffn.gate.bias"),
            ("deepseek_v4_hash", "model.layers.0.ffn.gate.tid2eid"),
            ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
            ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias"),
            ("gpt_oss", "model.layers.1.mlp.router.bias"),
            ("nemotron_h", "backbone.layers.1.mixer.fc2_latent_proj.weight"),
            ("qwen3_5_moe_text", "model.layers.0.mlp.shared_expert_gate.weight"),
        ],
    )
    def test_missing(self, saved, tmp_path, case, name):
        *_, layer, folders = saved(case)
        folder = edit(folders["original"], tmp_path, drop=(name,))
        with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}'.* is missing"):
            load_layer(folder, layer)

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            (torch.full((64, 2), 4), "expert ids 4 to 4: expected 0 to 3"),
            (torch.full((64, 2), -1), "expert ids -1 to -1"),
            (torch.zeros(64, 3, dtype=torch.long), r"shape \(64, 3\): expected \(V, 2\)"),
            (torch.zeros(64, 2), "has dtype F32: expected I64 or I32"),
        ],
    )
    def test_token_table(self, saved, tmp_path, table, text):
        *_, layer, folders = saved("deepseek_v4_hash")
        folder = edit(folders["original"], tmp_path, {"model.layers.0.ffn.gate.tid2eid": table})
        with pytest.raises(CheckpointError, match=text):
            load_layer(folder, layer)

    def test_nothing_is_half_loaded(self, saved, tmp_path, monkeypatch):
        """The last expert's last tensor is bad: no ExpertWeights ever exists."""
        *_, layer, folders = saved("qwen3_moe")
        name = "model.layers.1.mlp.experts.3.down_proj.weight"
        folder = edit(folders["original"], tmp_path, {name: torch.zeros(64, 95, dtype=torch.bfloat16)})
        made = []
        monkeypatch.setattr(ExpertWeights, "check", lambda self, *_: made.append(self))
        with pytest.raises(CheckpointError, match=r"\(64, 95\): expected \(64, 96\)"):
            load_layer(folder, layer)
        assert made == []

    @pytest.mark.parametrize(("format", "block"), [("fp8_block", 128), ("mxfp8", 32)])
    def test_a_slice_that_cuts_scale_blocks(self, saved, tmp_path, format, block):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path, format)
        with pytest.raises(ConfigError, match=f"cuts a scale block of {block}"):
            load_layer(folder, layer, ParallelConfig(2, moe_tp_size=2))

    def test_stacked_blocks_shared_by_gate_and_up(self, saved, tmp_path):
        *_, layer, folders = saved("qwen3_moe")
        prefix = "model.layers.1.mlp.experts"
        stacked = {f"{prefix}.gate_up_proj": e4m3(4, 192, 64), f"{prefix}.gate_up_proj_scale_inv": torch.ones(4, 2, 1)}
        folder = edit(folders["stacked"], tmp_path, stacked, {"quantization_config": QUANT["fp8_block"]})
        with pytest.raises(ConfigError, match="96 rows of gate end inside a block of 128"):
            load_layer(folder, layer)


def hf(case, **changes):
    """The config.json of a case, changed; None removes a field."""
    import transformers

    _, config_class, fields, layer = MODELS[case]
    config = getattr(transformers, config_class)(**fields).to_dict() | changes
    return {name: value for name, value in config.items() if value is not None}, layer


class TestConfigs:
    @pytest.mark.parametrize(
        ("case", "changes", "text"),
        [
            ("gpt_oss", {"num_local_experts": None}, "num_local_experts or num_experts is missing"),
            ("gpt_oss", {"num_local_experts": "8"}, "num_local_experts is '8': expected an integer"),
            ("gpt_oss", {"num_local_experts": True}, "expected an integer"),
            ("gpt_oss", {"num_local_experts": -1}, "expected at least 0"),
            ("gpt_oss", {"num_local_experts": 0}, "num_experts 0: must be a positive integer"),
            ("gpt_oss", {"num_experts_per_tok": 5}, "top_k 5 is larger than num_experts 4"),
            ("gpt_oss", {"hidden_size": 64.5}, "hidden_size is 64.5"),
            ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: expected 'silu'"),
            ("gpt_oss", {"num_hidden_layers": 10**12}, "expected at most 10000"),
            ("gpt_oss", {"swiglu_limit": float("nan")}, "swiglu_limit is nan"),
            ("gpt_oss", {"swiglu_limit": "7"}, "swiglu_limit is '7': expected a number"),
            ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
            ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
            ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3: expected a list of int"),
            ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected at least 1"),
            ("qwen3_moe", {"dtype": ["bfloat16"]}, "is not supported"),
            ("deepseek_v3", {"n_group": None}, "n_group is missing"),
            ("deepseek_v3", {"n_group": 3}, "8 can't be split into 3 routing groups"),
            ("deepseek_v3", {"topk_group": 5}, "topk_groups 5"),
            ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
            ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
            ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
            ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
            ("deepseek_v4", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
            ("deepseek_v4", {"mlp_layer_types": ["moe"]}, "mlp_layer_types has '1 entries' for layer 1"),
            ("deepseek_v4", {"mlp_layer_types": ["moe", "dense"]}, "mlp_layer_types has 'dense' for layer 1"),
            ("deepseek_v4", {"mlp_layer_types": None}, "num_hash_layers is missing"),
            ("deepseek_v4", {"swiglu_limit": None}, "swiglu_limit is missing"),
            ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
            ("nemotron_h", {"mlp_bias": True}, "mlp_bias True is not supported"),
            ("nemotron_h", {"layers_block_type": None}, "layers_block_type or hybrid_override_pattern is missing"),
            ("nemotron_h", {"layers_block_type": [1]}, "expected a list of str"),
        ],
    )
    def test_refused(self, case, changes, text):
        config, layer = hf(case, **changes)
        with pytest.raises(ConfigError, match=text):
            family_for(config).moe_config(config, layer)

    @pytest.mark.parametrize(
        ("case", "changes", "layers"),
        [
            ("gpt_oss", {}, [0, 1]),
            ("qwen3_moe", {}, [1]),
            ("qwen3_moe", {"decoder_sparse_step": 1, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, [1, 3]),
            ("qwen3_5_moe_text", {"num_hidden_layers": 3}, [0, 1, 2]),
            ("deepseek_v3", {"num_hidden_layers": 5, "first_k_dense_replace": 3}, [3, 4]),
            ("deepseek_v4", {}, [0, 1]),
            ("nemotron_h", {}, [1]),
            ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEM*-E"}, [1, 5]),
        ],
    )
    def test_moe_layers(self, case, changes, layers):
        config, _ = hf(case, **changes)
        assert family_for(config).moe_layers(config) == layers
        others = set(range(-1, 7)) - set(layers)
        for other in others:
            with pytest.raises(ConfigError, match=f"layer {other} is not a mixture of experts"):
                family_for(config).moe_config(config, other)

    def test_published_v4_config_counts_hash_layers(self):
        config, _ = hf("deepseek_v4", mlp_layer_types=None, num_hash_layers=1)
        methods = [family_for(config).moe_config(config, layer).routing.method for layer in (0, 1)]
        assert methods == ["hash", "sqrt_softplus"]

    @pytest.mark.parametrize("model_type", [None, "llama", ["gpt_oss"]])
    def test_unknown_family(self, model_type):
        with pytest.raises(ConfigError, match="is not supported: expected gpt_oss"):
            family_for({"model_type": model_type})

    @pytest.mark.parametrize("model_type", FAMILIES)
    def test_every_row_of_the_table_imports(self, model_type):
        assert family_for({"model_type": model_type}).module_path(3).startswith("model.")

    def test_published_sizes(self):
        """DeepSeek-V3 as its hub config.json describes it (the fields that matter)."""
        config = {
            "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 7168, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "moe_layer_freq": 1, "first_k_dense_replace": 3, "num_hidden_layers": 61, "torch_dtype": "bfloat16",
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                    "weight_block_size": [128, 128]},
        }  # fmt: skip
        found = family_for(config).moe_config(config, 3)
        assert isinstance(found, MoEConfig)
        assert (found.weight_format, found.routing.num_groups, found.routing.scaling_factor) == ("fp8_block", 8, 2.5)
        assert found.shared is not None
        assert found.shared.intermediate_size == 2048

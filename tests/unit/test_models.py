"""Model families: every shard against the transformers modules' own parameters. What the modules make of tokens, all
parts together, is in tests/conformance/test_transformers.py."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from support.cases.model_cases import MODELS, canonical_experts, equal, moe_layers, saved, shard_of
from support.cases.model_recipes import NUM_EXPERTS, VOCABULARY
from support.cases.packed_checkpoints import edit

from eprt.config import ParallelConfig
from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.errors import ConfigError
from eprt.models import family_for, load_layer
from eprt.models.checkpoint import CONFIG, SINGLE, Checkpoint

WORLDS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]
STORED = ["original", "stacked"]


def every_rank(source, layer):
    for world, moe_tp in WORLDS:
        for rank in range(world):
            yield load_layer(source, layer, ParallelConfig(world, moe_tp_size=moe_tp), rank)


class TestAgainstTransformers:
    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("case", MODELS)
    def test_experts_of_every_shard(self, case, stored):
        _, block, layer, folders = saved(case)
        gate_up, down = canonical_experts(block)
        with Checkpoint(folders[stored]) as checkpoint:
            for parts in every_rank(checkpoint, layer):
                expected = shard_of(gate_up, down, parts.config.activation.parts, parts.shard)
                equal(parts.experts.gate_up.data, expected[0])
                equal(parts.experts.down.data, expected[1])

    @pytest.mark.parametrize("case", MODELS)
    def test_config_and_module_path(self, case):
        model, block, layer, folders = saved(case)
        parts = load_layer(folders["original"], layer)
        assert model.get_submodule(parts.module_path) is block
        # transformers 5.17 has gpt-oss's as a constant of its code.
        limit = getattr(model.config, "swiglu_limit", 7.0 if case == "gpt_oss" else None)
        assert parts.config.activation.limit == limit
        assert (parts.config.activation.alpha, parts.config.activation.beta) == (
            (1.702, 1.0) if case == "gpt_oss" else (1.0, 0.0)
        )
        assert parts.config.activation.gated == (not case.startswith("nemotron"))
        assert parts.config.bias == (case == "gpt_oss")
        assert parts.config.weight_on_input == case.startswith("llama4")
        assert family_for(model.config.to_dict()).moe_layers(model.config.to_dict()) == moe_layers(model)

    @pytest.mark.parametrize("case", [name for name in MODELS if not name.startswith("llama4")])
    def test_experts_and_weights_of_2000_tokens(self, case):
        """The last bits of bf16 logits decide some of them. Llama 4's experts module isn't told a token's experts."""
        model, block, layer, folders = saved(case)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(2000, model.config.hidden_size, generator=generator).bfloat16()
        ids = torch.randint(VOCABULARY, (2000,), generator=generator)
        told = []
        hook = block.experts.register_forward_pre_hook(lambda _, args: told.append(args))
        block(x[None], *([ids[None]] if case.startswith("deepseek_v4") else []))
        hook.remove()
        chosen = load_layer(folders["original"], layer).router(x, ids)
        ((_, experts, weights),) = told
        none = torch.zeros(2000, NUM_EXPERTS)
        found, expected = (
            none.scatter(1, chosen.ids.long(), chosen.weights),
            none.scatter(1, experts, weights.float()),
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("case", "pattern", "replacement"),
        [
            ("deepseek_v4", r"^model\.", ""),  # as published: no model. prefix
            ("qwen3_5_moe_text", r"^model\.", "model.language_model."),  # inside the vision-language model
            ("nemotron_h", r"^backbone\.", "model."),
        ],
    )
    def test_other_prefixes(self, tmp_path, case, pattern, replacement):
        _, block, layer, folders = saved(case)
        renamed = edit(
            folders["original"], tmp_path, lambda held: {re.sub(pattern, replacement, k): v for k, v in held.items()}
        )
        equal(load_layer(renamed, layer).experts.down.data, block.experts.down_proj.data)

    def test_nested_text_config(self, tmp_path):
        _, block, layer, folders = saved("qwen3_5_moe_text")
        text = json.loads((folders["original"] / CONFIG).read_text())
        nested = edit(folders["original"], tmp_path)
        outer = {"model_type": "qwen3_5_moe", "dtype": "bfloat16", "vision_config": {}}
        for fields in (
            {"text_config": text},
            {"text_config": text, "num_experts": None},
            {"text_config": None, **text},
        ):
            (nested / CONFIG).write_text(json.dumps(fields | outer))
            parts = load_layer(nested, layer)
            equal(parts.experts.down.data, block.experts.down_proj.data)
        assert parts.module_path == f"model.language_model.layers.{layer}.mlp"

    @pytest.mark.parametrize("case", ["deepseek_v3", "ernie4_5_moe"])
    def test_what_is_kept_in_float32_is_not_rounded_where_files_hold_float16(self, tmp_path, case):
        model, _, layer, folders = saved(case)

        def halved(held):
            near = {name: torch.rand(t.shape) / 8 + 4 for name, t in held.items() if "correction_bias" in name}
            return {name: tensor.float().add(1e-3).half() for name, tensor in (held | near).items()}

        half = edit(folders["original"], tmp_path, halved, {"dtype": "float16"})
        known = type(model).from_pretrained(half, dtype=torch.bfloat16).state_dict()
        block, router = f"model.layers.{layer}.mlp", load_layer(half, layer).router
        stored, weight = load_file(half / SINGLE)[f"{block}.gate.weight"].float(), known[f"{block}.gate.weight"]
        equal(router.weight, stored)
        equal(router.weight.to(weight.dtype), weight)  # transformers before 5.24 rounds DeepSeek's
        (bias,) = (tensor for name, tensor in known.items() if name.startswith(block) and "correction_bias" in name)
        equal(router.correction_bias, bias.flatten())

    @pytest.mark.parametrize("case", ["deepseek_v3", "ernie4_5_moe"])
    def test_a_router_in_float32_that_bf16_holds_is_read_in_bf16(self, tmp_path, case):
        *_, layer, folders = saved(case)

        def rounded(held):
            return held | {name: t.bfloat16().float() for name, t in held.items() if name.endswith("gate.weight")}

        folder = edit(folders["original"], tmp_path, rounded, {"dtype": "bfloat16"})
        weight = load_layer(folder, layer).router.weight
        equal(weight, load_file(folder / SINGLE)[f"model.layers.{layer}.mlp.gate.weight"].bfloat16())

    def test_module_path_of_the_vision_language_model(self):
        import transformers

        fields = MODELS["qwen3_5_moe_text"].fields
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

    @pytest.mark.parametrize("rank", [1, -1, None])
    def test_a_rank_that_the_world_has_not(self, rank):
        with pytest.raises(ConfigError, match=f"rank {rank}: expected 0 to 0, of a world of 1; pass parallel"):
            load_layer(self.path, 0, rank=rank)

    def test_same_seed_same_bytes_and_nothing_is_overwritten(self, tmp_path):
        again = write_tiny_checkpoint(tmp_path / "again", intermediate_size=128)
        for file in sorted(self.path.iterdir()):
            assert file.read_bytes() == (again / file.name).read_bytes()
        with pytest.raises(ConfigError, match="already holds a checkpoint"):
            write_tiny_checkpoint(again)
        with pytest.raises(ConfigError, match="multiples of 32"):
            write_tiny_checkpoint(tmp_path / "odd", hidden_size=48)

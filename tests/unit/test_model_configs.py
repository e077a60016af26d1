"""Configs and tensors that disagree, or that a family can't compute: each refusal by its words."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from support.cases.model_cases import MODELS, refuses, saved
from support.cases.model_recipes import make_config
from support.cases.packed_checkpoints import QUANT, e4m3, edit, pack

from eprt.config import ParallelConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.models import family_for, load_layer
from eprt.models.checkpoint import CONFIG, SINGLE
from eprt.weights import ExpertWeights

STORED = ["original", "stacked"]


class TestTensorsRefused:
    """config.json and the tensors disagree."""

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize(("change", "original", "stacked"), [
        ({"num_experts": 3, "num_local_experts": 3}, r"gate.weight' has shape \(8, 64\): expected \(3, 64\)", None),
        ({"moe_intermediate_size": 64}, r"experts.0.gate_proj.weight' has shape \(96, 64\): expected \(64, 64\)",
         r"gate_up_proj' has shape \(8, 192, 64\): expected \(8, 128, 64\)"),
        ({"hidden_size": 32}, r"gate.weight' has shape \(8, 64\): expected \(8, 32\)", None),
    ])  # fmt: skip
    def test_sizes(self, tmp_path, stored, change, original, stacked):
        words = original if stored == "original" else stacked or original
        assert refuses(words, tmp_path, "qwen3_moe", config=change, stored=stored) is CheckpointError

    def test_more_experts_than_the_config_says(self, tmp_path):
        name, config = "model.layers.1.mlp.gate.weight", {"num_experts": 3, "num_local_experts": 3}
        gate = load_file(saved("qwen3_moe")[-1]["original"] / SINGLE)[name][:3]
        words = r"experts\.3\.down_proj\.weight': config\.json says there are 3"
        assert refuses(words, tmp_path, "qwen3_moe", {name: gate}, config) is CheckpointError

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
            ("qwen3_5_moe_text", "model.layers.1.mlp.shared_expert_gate.weight"),
            ("mixtral", "model.layers.1.block_sparse_moe.experts.7.w3.weight"),
            ("minimax_m2", "model.layers.1.block_sparse_moe.e_score_correction_bias"),
            ("phimoe", "model.layers.1.block_sparse_moe.gate.weight"),
            ("granitemoe", "model.layers.1.block_sparse_moe.output_linear.weight"),
            ("granitemoe", "model.layers.1.block_sparse_moe.router.layer.weight"),
            ("hunyuan_v1_moe", "model.layers.1.mlp.gate.wg.weight"),
            ("ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
            ("llama4_text", "model.layers.1.feed_forward.experts.gate_up_proj"),
        ],
    )
    def test_missing(self, tmp_path, case, name):
        assert refuses(rf"'{re.escape(name)}'.* is missing", tmp_path, case, drop=(name,)) is CheckpointError

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            (torch.full((64, 2), 8), "expert ids 8 to 8: expected 0 to 7"),
            (torch.full((64, 2), -1), "expert ids -1 to -1"),
            (torch.zeros(64, 3, dtype=torch.long), r"shape \(64, 3\): expected \(V, 2\)"),
            (torch.zeros(64, 2), "has dtype F32: expected I64 or I32"),
        ],
    )
    def test_token_table(self, tmp_path, table, text):
        changed = {"model.layers.0.ffn.gate.tid2eid": table}
        assert refuses(text, tmp_path, "deepseek_v4_hash", changed) is CheckpointError

    def test_nothing_is_half_loaded(self, tmp_path, monkeypatch):
        """The last expert's last tensor is bad: no ExpertWeights ever exists."""
        made = []
        monkeypatch.setattr(ExpertWeights, "check", lambda self, *_: made.append(self))
        bad = {"model.layers.1.mlp.experts.3.down_proj.weight": torch.zeros(64, 95, dtype=torch.bfloat16)}
        assert refuses(r"\(64, 95\): expected \(64, 96\)", tmp_path, "qwen3_moe", bad) is CheckpointError
        assert made == []

    @pytest.mark.parametrize(("format", "block"), [("fp8_block", 128), ("mxfp8", 32), ("pack_quantized", 32)])
    def test_a_slice_that_cuts_scale_blocks(self, tmp_path, format, block):
        *_, layer, folders = saved("qwen3_moe")
        folder = pack(folders["original"], tmp_path, format)
        with pytest.raises(ConfigError, match=f"cuts a scale block of {block}"):
            load_layer(folder, layer, ParallelConfig(2, moe_tp_size=2))

    def test_stacked_blocks_shared_by_gate_and_up(self, tmp_path):
        prefix, config = "model.layers.1.mlp.experts", {"quantization_config": QUANT["fp8_block"]}
        stacked = {f"{prefix}.gate_up_proj": e4m3(8, 192, 64), f"{prefix}.gate_up_proj_scale_inv": torch.ones(8, 2, 1)}
        words = "96 rows of gate end inside a block of 128"
        assert refuses(words, tmp_path, "qwen3_moe", stacked, config, stored="stacked") is ConfigError


def hf(case, **changes):
    """The config.json of a case, changed; None removes a field."""
    config = make_config(MODELS[case]).to_dict() | changes
    return {name: value for name, value in config.items() if value is not None}, MODELS[case].layer


class TestConfigs:
    @pytest.mark.parametrize(
        ("case", "changes", "text"),
        [
            ("gpt_oss", {"num_local_experts": None}, "num_local_experts or num_experts is missing"),
            ("gpt_oss", {"num_local_experts": "8"}, "num_local_experts is '8': expected an integer"),
            ("gpt_oss", {"num_local_experts": True}, "expected an integer"),
            ("gpt_oss", {"num_local_experts": -1}, "expected at least 0"),
            ("gpt_oss", {"num_local_experts": 0}, "num_experts 0: must be a positive integer"),
            ("gpt_oss", {"num_experts_per_tok": 9}, "top_k 9 is larger than num_experts 8"),
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
            ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
            ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
            ("phimoe", {"num_experts_per_tok": 3}, "top_k 3 with sparsemixer routing: must be 2"),
            ("phimoe", {"router_jitter_noise": -1.0}, "routing jitter -1.0"),
            ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
            ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
            ("deepseek_v2", {"n_group": None}, "n_group is missing"),
            ("deepseek_v32", {"mlp_layer_types": None, "first_k_dense_replace": None}, "first_k_dense_replace is miss"),
            ("hunyuan_v1_moe", {"moe_topk": [2]}, "moe_topk has 1 entries: expected one for layer 1"),
            ("hunyuan_v1_moe", {"moe_topk": [2, "2"]}, "moe_topk is '2': expected an integer"),
            ("hunyuan_v1_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped 1 is not supported"),
            ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min 0.1 is not supported"),
            ("ernie4_5_moe", {"use_bias": True}, "use_bias True is not supported"),
            ("llama4_text", {"num_experts_per_tok": 2}, "top_k 2 with weight_on_input: must be 1"),
        ],
    )
    def test_refused(self, case, changes, text):
        config, layer = hf(case, **changes)
        with pytest.raises(ConfigError, match=text):
            family_for(config).moe_config(config, layer)

    @pytest.mark.parametrize("layer", [-1, None, "1"])
    def test_no_layer_of_sizes_that_are_listed(self, layer):
        config, _ = hf("hunyuan_v1_moe", moe_topk=[2, 2])
        with pytest.raises(ConfigError, match=f"expected one for layer {layer!r}"):
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
            ("olmoe", {"num_hidden_layers": 3}, [0, 1, 2]),
            ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, [1, 3]),
            ("deepseek_v32", {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_hidden_layers": 3}, [0, 2]),
            ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, [1]),  # the last predicts tokens
            ("deepseek_v32", {"mlp_layer_types": None, "num_hidden_layers": 4, "first_k_dense_replace": 3}, [3]),
            ("ernie4_5_moe", {"num_hidden_layers": 6, "moe_layer_end_index": -1, "moe_layer_interval": 2}, [1, 3, 5]),
            ("ernie4_5_moe", {"num_hidden_layers": 6, "moe_layer_end_index": 3}, [1, 2, 3]),
            ("llama4_text", {"moe_layers": None, "num_hidden_layers": 6, "interleave_moe_layer_step": 3}, [2, 5]),
            ("llama4_text", {"num_hidden_layers": 4, "moe_layers": [3, 1, 9]}, [1, 3]),
            ("nemotron_h", {}, [1]),
            ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEM*-E"}, [1, 5]),
        ],
    )
    def test_moe_layers(self, case, changes, layers):
        config, _ = hf(case, **changes)
        assert family_for(config).moe_layers(config) == layers
        for other in set(range(-1, 7)) - set(layers):
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

    def test_an_infinite_number_that_no_layer_reads(self, tmp_path):
        """Python writes it so, beyond JSON; Nemotron 3 publishes it."""
        *_, layer, folders = saved("nemotron_h")
        folder = edit(folders["original"], tmp_path, config={"time_step_limit": [0.0, float("inf")]})
        assert "Infinity" in (folder / CONFIG).read_text()
        assert load_layer(folder, layer).config == load_layer(folders["original"], layer).config

    @pytest.mark.parametrize("case", ["deepseek_v3", "dots1", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"])
    def test_weights_are_renormalised_by_default_where_transformers_does(self, case):
        config, layer = hf(case)
        del config["norm_topk_prob"]
        expected = pytest.importorskip("transformers").AutoConfig.for_model(case).norm_topk_prob
        assert family_for(config).moe_config(config, layer).routing.renormalize is expected

    def test_hunyuan_lists_sizes_layer_by_layer(self):
        lists = {"num_experts": [4, 8], "moe_topk": [1, 2], "moe_intermediate_size": [32, 48]}
        config, layer = hf("hunyuan_v1_moe", **lists, num_shared_expert=[1, 2])
        found = family_for(config).moe_config(config, layer)
        assert (found.num_experts, found.top_k, found.intermediate_size) == (8, 2, 48)
        assert found.shared is not None
        assert found.shared.intermediate_size == 2 * 96

    def test_nested_llama4(self):
        config, layer = hf("llama4_text")
        text = {name: value for name, value in config.items() if name != "model_type"}
        outer = {"model_type": "llama4", "text_config": text, "dtype": "bfloat16"}
        family = family_for(outer)
        assert family.moe_layers(outer) == [0, 1]
        assert family.moe_config(outer, layer).weight_on_input
        assert family.module_path(1) == "language_model.model.layers.1.feed_forward"

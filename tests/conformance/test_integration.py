"""A transformers model gives the same logits when its MoE blocks run expert parallel, idle ranks included."""

from __future__ import annotations

from pathlib import Path

import pytest

from eprt.conformance.harness import launch
from eprt.models.tiny import write_tiny_checkpoint

pytest.importorskip("transformers", reason="the witness is transformers: pip install 'eprt[transformers]'")

import integration_jobs as jobs

# Experts compute in bfloat16 (8 bits); everything around them and the model compared with is float32.
TOLERANCE = 2e-2


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
def test_gpt_oss_in_mxfp4_gives_the_dequantized_models_logits(tmp_path: Path, dispatcher: str) -> None:
    directory = write_tiny_checkpoint(tmp_path / "tiny", hidden_size=64, intermediate_size=64)
    errors = launch(
        jobs.compare_logits, 4, directory=str(directory), dispatcher=dispatcher, executor="torch_grouped", packed=True
    )
    assert max(errors) <= TOLERANCE, errors
    assert min(errors[:2]) > 0.0  # something was computed


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v4"])
def test_saved_models_give_their_own_logits(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    common = {
        "vocab_size": jobs.VOCABULARY,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 96,
    }
    v4 = {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 16}
    torch.manual_seed(1)
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, num_experts=4)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.DeepseekV4Config(
            **{**common, **v4, "num_key_value_heads": 1},
            n_routed_experts=4,
            mlp_layer_types=["hash_moe", "moe"],
        )
        model = transformers.DeepseekV4ForCausalLM(config)
        for block in model.model.layers:
            if hasattr(block.mlp.gate, "tid2eid"):
                block.mlp.gate.tid2eid.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(jobs.VOCABULARY)]))
    model.save_pretrained(tmp_path / family)
    errors = launch(
        jobs.compare_logits, 4, directory=str(tmp_path / family), dispatcher="torch", executor="auto", packed=False
    )
    assert max(errors) <= 1e-5, errors  # float32 throughout

"""`eprt run` and `parallelize` on a checkpoint of each dialect, beside the same numbers in float32; and what
transformers loads around the experts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.cases import tiny_families
from support.cases.model_cases import packed, saved
from support.cases.packed_checkpoints import PACK, QUANT, edit
from support.jobs.integration_jobs import IDS, logits_from_files

from eprt.cli import main, run
from eprt.errors import CheckpointError, ConfigError
from eprt.integrations.transformers import load_without_experts, parallelize
from eprt.models import load_layer
from eprt.models.checkpoint import QUANT_CONFIG, SINGLE
from eprt.world import World

SHORT = ("pack_quantized", "gptq_act_order", "awq", "float_channel")
QUERY = "model.layers.0.self_attn.q_proj"
DIALECTS = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in QUANT if name in PACK]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_eprt_run(tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The verdict is the oracle's, which is given the plain numbers; and other ones, which it has to see."""
    folder, plain, layer = packed(tmp_path, dialect, {"dtype": "bfloat16"})
    words = ["run", "--model", str(folder), "--device", "cpu", "--world", "2", "--steps", "3", "--json"]
    monkeypatch.setattr(run, "load_layer", lambda _, layer: load_layer(plain, layer))
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["error"] <= result["tolerance"] == 1e-2
    known = load_layer(plain, layer)
    rolled = replace(known.experts, gate_up=known.experts.gate_up.map(lambda tensor: tensor.roll(1, dims=0)))
    monkeypatch.setattr(run, "load_layer", lambda *_: replace(known, experts=rolled))
    assert main(words[:-1]) == 1
    assert "FAIL: " in capsys.readouterr().out


@pytest.mark.parametrize("dialect", DIALECTS)
def test_parallelize(pools, tmp_path: Path, dialect: str) -> None:
    folder, plain, _ = packed(tmp_path, dialect, {"dtype": "float32"})
    with torch.no_grad():
        want = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(IDS).logits
    for found in pools(2).run(logits_from_files, folder=str(folder)):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("older", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_packed_attention_that_transformers_does_not_read(tmp_path: Path, older: bool) -> None:
    """It would take ModelOpt's codes without their scales."""
    name = f"{QUERY}.weight"
    folder, *_ = packed(tmp_path, "fp8_tensor")
    drop = ("quantization_config",) if older else ()
    edit(folder, tmp_path / "all", lambda held: held | {name: held[name].to(torch.float8_e4m3fn)}, drop=drop)
    if older:
        (tmp_path / "all" / QUANT_CONFIG).write_text('{"quantization": {"quant_algo": "FP8"}}')
    load_without_experts(folder)
    with pytest.raises(
        ConfigError, match="outside of the experts are packed by 'modelopt', which transformers doesn't"
    ):
        load_without_experts(tmp_path / "all")


@pytest.mark.parametrize(
    ("tensors", "config", "drop", "said"),
    [
        ({}, {}, f"{QUERY}.weight", f"{QUERY}.weight is missing; it would take wrong numbers: complete"),
        ({}, {"vocab_size": 72}, "", r"has shape \(64, 64\), expected \(72, 64\) by config.json, and 1 more"),
        ({f"{QUERY}.weight_scale": torch.ones(1)}, {}, "", f"{QUERY}.weight_scale belongs to a weight that "),
        ({f"{QUERY}.qweight": torch.ones(1).int()}, {"quantization_config": QUANT["gptq"]}, "", "GPTQ .*pip install"),
        ({}, {"hidden_act": "new"}, "", "make a Qwen3MoeForCausalLM by config.json: KeyError: 'new'"),
        ({}, {"rms_norm_eps": "x"}, "", "read its config.json: .*'rms_norm_eps' expected float"),
        ({}, {"quantization_config": "x"}, "", "quantization_config is 'x': expected an object"),
    ],
)
def test_what_transformers_cannot_load_or_would_make_up(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object], drop: str, said: str
) -> None:
    """It begins such weights with random numbers, which differ between ranks."""
    folder = edit(saved("qwen3_moe")[-1]["original"], tmp_path, tensors, config, (drop,))
    with pytest.raises((CheckpointError, ConfigError), match=f"^{folder}.*{said}"):
        load_without_experts(folder)


@pytest.mark.parametrize(("end", "refused"), [("slope_rate", False), ("expert_bias", True)])
def test_a_buffer_is_missed_unless_config_json_gives_it(tmp_path: Path, end: str, refused: bool) -> None:
    """MiniMax's decays come from its number of heads; a router's bias comes from training alone."""
    folder = tmp_path / "whole"
    tiny_families.tiny_model("lfm2_moe" if refused else "minimax").save_pretrained(folder)
    name = next(name for name in load_file(folder / SINGLE) if name.endswith(end))
    said = pytest.raises(CheckpointError, match=f"{name} is missing") if refused else nullcontext()
    with said:
        load_without_experts(edit(folder, tmp_path / "lacking", drop=(name,)))


def test_numbers_that_are_none_outside_of_the_experts(tmp_path: Path) -> None:
    norm = torch.ones(64)
    for number, refused in ((float("inf"), False), (float("nan"), True)):
        norm[3] = number
        changed = {"model.norm.weight": norm.bfloat16()}
        model = load_without_experts(edit(saved("qwen3_moe")[-1]["original"], tmp_path / str(number), changed))
        said = pytest.raises(ConfigError, match=r"1 of the .* hold NaN \(model.norm.weight: 1 of 64 numbers\)")
        with World.from_env("cpu") as world, said if refused else nullcontext():
            parallelize(model, world)

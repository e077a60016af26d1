"""Checkpoints of compressed-tensors, GPTQ and AWQ under vLLM (scripts/test_vllm.sh): served, and unpacked by vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support import engine_models
from support.cases import vllm_layouts
from support.cases.vllm_checkpoints import packed_model
from test_vllm import ranks_run

from eprt.integrations.engine.parameters import expert_weights
from eprt.integrations.vllm.parameters import layout_of
from eprt.quant import decode

SEED = 152
pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="runs under scripts/test_vllm.sh")


@pytest.mark.parametrize("dialect", ["gptq", "awq"])
def test_parameters_are_what_vllms_own_unpacking_makes_of_them(dialect: str) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    loaded = getattr(vllm_layouts, dialect)()
    unpack = getattr(int_wna16, f"_unpack_and_dequant_int4_{dialect}")
    weights = expert_weights(layout_of(loaded.method), loaded.parameters, interleaved=False)
    for name, matrix in (("w13", weights.gate_up), ("w2", weights.down)):
        words, scales, zeros = (loaded.parameters[f"{name}_{end}"] for end in ("qweight", "scales", "qzeros"))
        theirs = unpack(words, scales, None if dialect == "gptq" else zeros, True, torch.float32)
        assert torch.equal(decode(matrix, 1), theirs)


def serve(folder: Path, model: Path, dtype: str, dp: int, tp: int) -> tuple[list[list[int]], str]:
    """The tokens of vLLM's ranks under eprt, and the first rank's log."""
    prompts = engine_models.PROMPTS
    parts = [prompts[:1], prompts[1:]] if dp == 2 else [prompts]
    codes, logs, tokens = ranks_run(folder, model, dtype, dp, tp, "eprt", parts, dp == 2)
    assert codes == [0] * dp, "\n".join(log[-3000:] for log in logs)
    return [each for part in tokens for each in part], logs[0]


@pytest.mark.parametrize(
    ("dialect", "format", "dp", "tp"),
    [("pack_quantized", "int4", 2, 1), ("float_channel", "fp8_channel", 1, 2), ("nvfp4_packed", "nvfp4", 1, 1)],
    ids=["pack-quantized-dp2-ep", "float-channel-tp2-without-ep", "nvfp4-packed-one"],
)
def test_compressed_tensors_tokens_are_those_of_transformers(
    dialect: str, format: str, dp: int, tp: int, tmp_path: Path
) -> None:
    """vLLM loads the file's own tensors, eprt computes; transformers has the same numbers decoded."""
    want, lead = engine_models.by_transformers(packed_model(tmp_path / "model", dialect, engine_models.SIZES, seed=1))
    assert lead > 1e-4  # float32 on both sides, sums in another order
    tokens, log = serve(tmp_path, tmp_path / "model", "float32", dp, tp)
    assert tokens == want
    assert f"{format}, 8 experts, top-2" in log


@pytest.mark.parametrize(
    ("dialect", "dp", "tp"), [("gptq", 1, 2), ("awq", 2, 1)], ids=["gptq-tp2-without-ep", "awq-dp2-ep"]
)
def test_gptq_and_awq_tokens_are_those_of_transformers(
    dialect: str, dp: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes them in bfloat16 alone: few prompts, and of many seeds the one where no token and no expert is chosen
    by less than bf16's own differences."""
    monkeypatch.setattr(engine_models, "PROMPTS", [engine_models.PROMPTS[0], engine_models.PROMPTS[3]])
    want, lead = engine_models.by_transformers(packed_model(tmp_path / "model", dialect, engine_models.SIZES, SEED))
    assert lead > 0.04  # bf16's own differences from float32 reach 0.035 of these logits' deviation
    tokens, log = serve(tmp_path, tmp_path / "model", "bfloat16", dp, tp)
    assert tokens == want
    assert "int4, 8 experts, top-2" in log

"""Checkpoints whose experts are packed, under vLLM (scripts/test_vllm.sh): served, and unpacked by vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import vllm_layouts
from support.engine_models import PROMPTS, by_transformers, packed_model
from test_vllm import ranks_run, serve

from eprt.integrations.engine.parameters import expert_weights
from eprt.integrations.vllm.parameters import layout_of
from eprt.quant import decode

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


COMPRESSED = {"dtype": "float32", "seed": 1, "lead": 1e-4}  # float32 on both sides, sums in another order
# vLLM takes these in bfloat16 alone. Of many seeds the one whose best token leads the next by more than bf16's own
# differences from float32, which reach 0.035 of these logits' deviation. GPTQ's and AWQ's few prompts choose no expert
# by less, either.
BLOCKS = {"dtype": "bfloat16", "seed": 432, "lead": 0.04}
WORDS = {"dtype": "bfloat16", "seed": 152, "lead": 0.04, "prompts": [PROMPTS[0], PROMPTS[3]]}
HALF = WORDS | {"dtype": "float16"}  # as AutoAWQ writes models


ONLINE = WORDS | {"llm": {"quantization": "online", "quantization_config": {"moe": "fp8_per_tensor_static"}}}


@pytest.mark.parametrize(
    ("dialect", "format", "dp", "tp", "how"),
    [
        pytest.param("pack_quantized", "int4", 2, 1, COMPRESSED, id="pack-quantized-dp2-ep"),
        pytest.param("float_channel", "fp8_channel", 1, 2, COMPRESSED, id="float-channel-tp2-without-ep"),
        pytest.param("nvfp4_packed", "nvfp4", 1, 1, COMPRESSED, id="nvfp4-packed-one"),
        pytest.param("fp8_block", "fp8_block", 2, 1, BLOCKS, id="fp8-block-dp2-ep"),
        pytest.param("fp8_block", "fp8_block", 1, 2, BLOCKS, id="fp8-block-tp2-without-ep"),
        pytest.param("modelopt_fp8", "fp8_tensor", 2, 1, WORDS | {"seed": 55}, id="modelopt-fp8-dp2-ep"),
        pytest.param("online", "fp8_tensor", 2, 1, ONLINE | {"seed": 16}, id="online-fp8-dp2-ep"),
        pytest.param("gptq", "int4", 1, 2, WORDS, id="gptq-tp2-without-ep"),
        pytest.param("awq", "int4", 2, 1, HALF, id="awq-dp2-ep"),
    ],
)
def test_tokens_of_packed_experts_are_those_of_transformers(
    dialect: str, format: str, dp: int, tp: int, how: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM loads the file's own tensors, eprt computes; transformers has the same numbers decoded, in float32."""
    prompts = how.get("prompts", PROMPTS)
    want, lead = by_transformers(packed_model(tmp_path / "model", dialect, how["seed"]), prompts)
    assert lead > how["lead"]
    tokens, log = serve(tmp_path, tmp_path / "model", how["dtype"], dp, tp, prompts=prompts, **how.get("llm", {}))
    assert tokens == want
    assert f"{format}, 8 experts, top-2" in log


def test_new_weights_of_experts_that_are_made_fp8(tmp_path: Path) -> None:
    """They come in plain numbers, as the first ones did."""
    prompts, models = WORDS["prompts"], {"a": 16, "b": 1}
    of = {
        name: by_transformers(packed_model(tmp_path / name, "online", seed), prompts) for name, seed in models.items()
    }
    assert min(lead for _, lead in of.values()) > 0.03
    turns = {"reload": "b", "direct": "a", "layerwise": "b"}
    updates = [(way, tmp_path / name) for way, name in turns.items()]
    codes, logs, [tokens] = ranks_run(
        tmp_path, tmp_path / "a", "bfloat16", 1, 1, "eprt", [prompts], False, updates, **ONLINE["llm"]
    )
    assert codes == [0], logs[0][-3000:]
    assert tokens == [of[name][0] for name in ("a", *turns.values())]


def test_a_trainers_weights_behind_dummy_ones(tmp_path: Path) -> None:
    """RL frameworks start engines so. vLLM copies dummy numbers in FP8 into whole parameters."""
    model = tmp_path / "model"
    want, lead = by_transformers(packed_model(model, "fp8_block", BLOCKS["seed"]))
    assert lead > BLOCKS["lead"]
    updates: list[tuple[str, Path | str]] = [("direct", model), ("layerwise", model)]
    codes, logs, [tokens] = ranks_run(
        tmp_path, model, "bfloat16", 1, 1, "eprt", [PROMPTS], False, updates, load_format="dummy"
    )
    assert codes == [0], logs[0][-3000:]
    assert tokens[1:] == [want, want]

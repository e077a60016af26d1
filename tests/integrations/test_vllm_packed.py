"""vLLM's own unpacking of GPTQ's and AWQ's parameters is a witness for the plugin's (scripts/test_vllm.sh)."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.cases import vllm_layouts

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

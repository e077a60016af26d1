"""ExpertParallelMoE equals transformers' own MoE blocks on the same weights, however the world is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases.model_cases import MODELS, make_model
from support.cases.model_recipes import VOCABULARY
from support.jobs.transformers_jobs import PATHS, TOLERANCE, Sample, compare_blocks
from support.libraries import needs

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.conformance.cases import CONFIGS
from eprt.placement import ExpertPlacement
from eprt.support import Device

pytestmark = needs("transformers")

# (EP, MoE-TP, attention-TP) sizes
WORLDS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2), (4, 1, 2), (1, 2, 2), (2, 2, 2))
WORLDS += ((4, 2, 2),)
# Each has arithmetic that no other has.
DISTINCT = ["gpt_oss", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3", "deepseek_v4", "deepseek_v4_hash", "nemotron_h"]
TOKENS = (7, 0, 13, 1, 5, 2, 3, 4)  # of each data-parallel rank


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Every model's MoE block in every dtype. Made in one process: a rank would import transformers for seconds."""
    return [_sample(case, dtype, tmp_path_factory.mktemp(case)) for case in MODELS for dtype in TOLERANCE]


def _sample(case: str, dtype: torch.dtype, folder: Path) -> Sample:
    model, block, layer = make_model(case, dtype)
    # The family's own names, or transformers' stacked ones.
    model.save_pretrained(folder, save_original_format=dtype == torch.float32)
    inputs, expected = [], []
    for dp_rank, tokens in enumerate(TOKENS):
        generator = torch.Generator().manual_seed(100 + dp_rank)
        x = torch.randn(tokens, model.config.hidden_size, generator=generator).to(dtype)
        ids = torch.randint(VOCABULARY, (tokens,), generator=generator)
        inputs.append((x, ids))
        expected.append(_output(block, x, ids) if tokens else x)
    return Sample(case, case in DISTINCT, dtype, str(folder), layer, inputs, expected)


def _output(block: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, H] of transformers' module, some of which return their router's scores beside it."""
    found = block(x[None], *([ids[None]] if type(block).__name__.startswith("DeepseekV4") else []))
    return (found[0] if isinstance(found, tuple) else found).view(x.shape)


@pytest.mark.parametrize("sizes", WORLDS, ids=lambda sizes: "ep{}-moetp{}-attntp{}".format(*sizes))
def test_layer_equals_transformers_block(sizes: tuple[int, int, int], pools, samples: list[Sample]) -> None:
    ep, moe_tp, attention_tp = sizes
    arguments = {"samples": samples, "moe_tp": moe_tp, "attention_tp": attention_tp, "turn": WORLDS.index(sizes)}
    results = pools(ep * moe_tp).run(compare_blocks, **arguments, timeout_s=100.0)
    rows = [row for rank in results for row in rank]
    assert len(rows) == ep * moe_tp * len(TOLERANCE) * (len(DISTINCT) * (len(PATHS) - 1) + len(MODELS))
    wrong = [f"{what}: {error:.2e} > {tolerance:.0e}" for what, error, tolerance in rows if not error <= tolerance]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("runtime", "device", "ranks", "expected"),
    [
        (None, "sm90", 4, True),
        (RuntimeConfig(), "cpu", 4, None),
        (RuntimeConfig(), "sm90", 1, None),
        (RuntimeConfig(layer_graphs=False), "sm90", 4, False),
        (RuntimeConfig(dispatcher="torch"), "sm90", 4, False),  # reads sizes on the host
        (RuntimeConfig(validate="full"), "sm90", 4, False),
        (RuntimeConfig(dispatcher="symm", executor="cutedsl_nvfp4"), "sm90", 4, None),  # refused by the plan
    ],
)
def test_layers_of_a_model_get_graphs_where_they_can_have_some(runtime, device, ranks: int, expected) -> None:
    from eprt.integrations.transformers.parallelize import with_layer_graphs

    config = CONFIGS["silu_bf16"]
    parts: Any = SimpleNamespace(
        config=config,
        placement=ExpertPlacement(config.num_experts, ParallelConfig(ranks)),
        router=SimpleNamespace(token_table=None),
    )
    found = with_layer_graphs(runtime, parts, Device.parse(device))
    assert found == replace(runtime or RuntimeConfig(), layer_graphs=expected)
    parts.router.token_table = torch.zeros(1)
    assert with_layer_graphs(None, parts, Device.parse(device)).layer_graphs is None

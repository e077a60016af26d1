"""`generate(graphs=True)` on the GPUs of one host: decode steps captured and replayed, against the eager loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

import torch
from support.cases import tiny_families
from support.cases.gpu_ranks import SIZE, several_gpus, skip_if_refused
from support.cases.model_recipes import RECIPES, make_model
from support.jobs import generation_jobs as jobs

from eprt.config import RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.models import family_for

GRAPH_SAFE = [name for name, spec in DISPATCHERS.items() if spec.graph_safe]
# The last rank has no prompt, the first one two batches; the last prompt is longer than any bucket.
PROMPTS = [[[5, 17, 33, 8], [41, 9, 60], [12, 13, 14, 15, 16, 17, 18]], *[[[7, 3], [55, 54, 53]]] * (SIZE - 2), []]
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# Of the logits' deviation: bf16 over two layers whose GEMMs see batches of other sizes. On CPUs it is 0.025.
TOLERANCE = 0.12

pytestmark = several_gpus


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    found = make_model(RECIPES[request.param], torch.bfloat16)
    found.save_pretrained(folder)
    return folder, found.config.to_dict(), RECIPES[request.param].layer


def runtime_or_skip(model: tuple[Path, dict, int], dispatcher: str) -> RuntimeConfig:
    _, config, layer = model
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="torch_grouped", max_tokens_per_rank=64)
    skip_if_refused(family_for(config).moe_config(config, layer), runtime)
    return runtime


@pytest.mark.parametrize("dispatcher", GRAPH_SAFE)
def test_replayed_steps_choose_what_eager_steps_choose(pool, model, dispatcher: str) -> None:
    check_replayed(pool, model[0], runtime_or_skip(model, dispatcher))


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_omni_moe", "glm4v_moe", "ernie4_5_vl_moe"])
def test_replayed_steps_of_models_whose_positions_have_axes(pool, family: str, tmp_path: Path) -> None:
    """[3 or 4, rows, tokens] of them."""
    tiny_families.tiny_model(family).to(torch.bfloat16).save_pretrained(tmp_path)
    check_replayed(pool, tmp_path, RuntimeConfig(dispatcher="symm", executor="torch_grouped", max_tokens_per_rank=64))


def check_replayed(pool: Any, folder: Path, runtime: RuntimeConfig) -> None:
    arguments = {"folder": str(folder), "prompts": PROMPTS, "dtype": torch.bfloat16, "options": OPTIONS, "calls": 2}
    found = pool.run(jobs.replayed_and_eager, runtime=runtime, **arguments)
    for rank, each in enumerate(found):
        assert each["warned"] == []
        eager, (_, replayed) = each["eager"], each["replayed"]
        assert len(replayed["tokens"]) == len(PROMPTS[rank])
        prompts = 2 * (rank == 0) or int(rank < SIZE - 1)
        assert len(replayed["forwards"]) == prompts, "the host walks the model for prompts only"
        for tokens, wanted, scores, expected in zip(
            replayed["tokens"], eager["tokens"], replayed["scores"], eager["scores"], strict=True
        ):
            check_row(tokens, wanted, torch.stack(scores), torch.stack(expected))


def check_row(tokens: list[int], wanted: list[int], scores: torch.Tensor, expected: torch.Tensor) -> None:
    """The same scores as long as the same tokens were chosen, which only a near-tie ends."""
    same = next((step for step, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), len(wanted))
    compared = min(same + 1, len(wanted))
    limit = TOLERANCE * float(expected.std())
    assert (scores[:compared] - expected[:compared]).abs().max() <= limit
    if same < len(wanted):
        best = expected[same].topk(2).values
        assert float(best[0] - best[1]) <= 2 * limit, "no near-tie"
    assert same >= 2, "hardly anything was compared"


def test_a_pair_that_reads_sizes_on_the_host_runs_eagerly(pool, model) -> None:
    runtime = runtime_or_skip(model, "torch")
    arguments = {"folder": str(model[0]), "prompts": PROMPTS, "dtype": torch.bfloat16, "options": OPTIONS}
    for each in pool.run(jobs.replayed_and_eager, runtime=runtime, **arguments):
        (said,) = each["warned"]
        assert "dispatcher torch reads sizes on the host in every call" in said
        assert each["replayed"][0]["tokens"] == each["eager"]["tokens"]

"""Every family: a model in memory, its MoE blocks replaced, gives the logits it gave before, idle ranks included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cases.model_checkpoints import WRITERS
from support.cases.model_recipes import RECIPES, make_model
from support.jobs import integration_jobs as jobs

from eprt.config import RuntimeConfig
from eprt.models.tiny import write_tiny_checkpoint

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")


@pytest.mark.parametrize(("model", "dispatcher"), [("gpt_oss", "none"), *((model, "torch") for model in RECIPES)])
def test_logits_are_the_models_own(pools, model: str, dispatcher: str) -> None:
    world = 4
    results = pools(world).run(jobs.compare_logits, name=model, dispatcher=dispatcher)
    errors = [error for error, *_ in results]
    # float32 on both sides; attention and embeddings are the same code, the experts sum in another order.
    assert max(errors) <= 1e-5, errors
    assert [error for error, count in zip(errors, jobs.PROMPTS, strict=True) if count] != [0.0] * 3, "nothing compared"
    for _, layers, before, after in results:
        assert layers == RECIPES[model].moe_layers
        assert after < before, "each rank keeps its share of the experts only"


@pytest.mark.parametrize("model", RECIPES)
def test_logits_are_those_of_the_saved_checkpoint(pools, tmp_path: Path, model: str) -> None:
    """Experts, routers and shared experts from the files, in the names under which the family is published."""
    make_model(RECIPES[model], seed=2).save_pretrained(tmp_path)
    results = pools(2).run(jobs.compare_logits, name=model, dispatcher="torch", checkpoint=str(tmp_path))
    errors = [error for error, *_ in results]
    assert 0.0 < max(errors) <= 1e-5, errors


def test_an_idle_rank_has_the_tokens_dtype_whatever_the_routers_is(pools) -> None:
    """ERNIE 4.5's router is float32 in a bf16 model; ranks that differ in dtype would refuse each other."""
    results = pools(4).run(jobs.compare_logits, name="ernie4_5_moe", dispatcher="torch", dtype=torch.bfloat16)
    # bf16 on both sides of one MoE layer; each rank's share rounds once more.
    assert 0.0 < max(error for error, *_ in results) <= 1e-2


@pytest.mark.parametrize(("dispatcher", "dtype"), [("none", torch.float32), ("torch", torch.bfloat16)])
@pytest.mark.parametrize("model", WRITERS)
def test_a_published_checkpoint_gives_the_plain_models_logits(
    pools, tmp_path: Path, model: str, dispatcher: str, dtype: torch.dtype
) -> None:
    """MXFP4 experts from the files, as tests/gpu/test_layers.py runs them."""
    WRITERS[model](tmp_path, hidden=64, intermediate=96)
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="torch_grouped", max_tokens_per_rank=64)
    found = pools(4).run(jobs.compare_checkpoint_logits, folder=str(tmp_path), runtime=runtime, dtype=dtype)
    errors = [error for error, *_ in found]
    # The experts compute in bf16; attention, embeddings and heads are the same code on both sides.
    assert max(errors) <= 2e-2, errors
    assert min(error for error, count in zip(errors, jobs.PROMPTS, strict=True) if count) > 0.0, "nothing compared"


def test_what_cannot_be_parallelized_says_why(pools, tmp_path: Path) -> None:
    """On every rank the same, also where one rank alone has no checkpoint."""
    checkpoint = str(write_tiny_checkpoint(tmp_path / "tiny", num_layers=1))
    for found in pools(2).run(jobs.refusals, checkpoint=checkpoint):
        assert len(found) == 4
        assert (
            found[2] == f"ConfigError: {checkpoint} is a checkpoint of gpt_oss, the model is of qwen3_moe: give its own"
        )
        assert found[3].startswith("CheckpointError: rank 1: /no/such/checkpoint")
        assert found[0].startswith("ConfigError: config.json: model_type 'llama' is not supported")
        assert "Linear has no config: expected a transformers model" in found[1]

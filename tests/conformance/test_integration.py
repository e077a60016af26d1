"""transformers models whose MoE blocks were replaced give the same logits, idle ranks included."""

from __future__ import annotations

import integration_jobs as jobs
import pytest

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")


@pytest.mark.parametrize(("model", "dispatcher"), [("gpt_oss", "none"), *((model, "torch") for model in jobs.MODELS)])
def test_logits_are_the_models_own(pools, model: str, dispatcher: str) -> None:
    world = 4
    results = pools(world).run(jobs.compare_logits, name=model, dispatcher=dispatcher)
    errors = [error for error, *_ in results]
    # float32 on both sides; attention and embeddings are the same code, the experts sum in another order.
    assert max(errors) <= 1e-5, errors
    assert [error for error, count in zip(errors, jobs.PROMPTS, strict=True) if count] != [0.0] * 3, "nothing compared"
    for _, layers, before, after in results:
        assert layers == (1 if model in jobs.ONE_MOE_LAYER else 2)
        assert after < before, "each rank keeps its share of the experts only"


def test_what_cannot_be_parallelized_says_why(pools) -> None:
    for found in pools(2).run(jobs.refusals):
        assert len(found) == 3
        assert found[0].startswith("ConfigError: config.json: model_type 'llama' is not supported")
        assert "Linear has no config: expected a transformers model" in found[1]
        assert "idle_step needs a model that parallelize() has changed" in found[2]

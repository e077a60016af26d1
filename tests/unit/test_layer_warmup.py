"""What a layer tells its executor to prepare for: the rows and the top-k that its dispatcher hands over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases

from eprt.config import RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import UsageError
from eprt.layer import ExpertParallelMoE
from eprt.tokens import TopK
from eprt.world import World


@pytest.mark.parametrize(
    ("top_k", "sizes", "padded"), [(3, None, 3), (3, DISPATCHERS["flashinfer"].top_k_sizes, 4), (4, (1, 4), 4)]
)
def test_the_top_k_is_the_dispatchers(monkeypatch, top_k, sizes, padded):
    config = cases.make_config("f32", top_k=top_k)
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=24)
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)
        told = []
        monkeypatch.setattr(layer.executor, "warmup", lambda *given: told.append(given))
        monkeypatch.setattr(layer.dispatcher, "spec", replace(layer.dispatcher.spec, top_k_sizes=sizes))
        world.warmup(layer)
    assert told == [(24, padded)]


def test_a_layer_that_missed_the_warm_up_is_refused_and_works_after_one():
    config = cases.make_config("f32")
    flat = cases.make_flat(config, 3)
    hidden, topk = flat.hidden.data, TopK(flat.ids, flat.weights)
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=24)
        early, used, late = (
            ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime, layer=layer)
            for layer in range(3)
        )
        used(hidden, topk)
        world.warmup(early)
        for layer in (early, used):
            assert layer(hidden, topk).shape == hidden.shape
        with pytest.raises(UsageError, match=r"first call of a layer after World\.warmup"):
            late(hidden, topk)
        world.warmup(late)
        assert torch.equal(late(hidden, topk), early(hidden, topk))

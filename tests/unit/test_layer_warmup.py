"""What a layer tells its executor to prepare for: the rows and slots that its dispatcher hands over."""

from __future__ import annotations

from dataclasses import replace

import expert_cases as cases
import pytest

from eprt.config import RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.layer import ExpertParallelMoE
from eprt.world import World


@pytest.mark.parametrize(
    ("top_k", "sizes", "slots"), [(3, None, 3), (3, DISPATCHERS["flashinfer"].top_k_sizes, 4), (4, (1, 4), 4)]
)
def test_slots_are_the_dispatchers(monkeypatch, top_k, sizes, slots):
    config = cases.make_config("f32", top_k=top_k)
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=24)
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)
        told = []
        monkeypatch.setattr(layer.executor, "warmup", lambda *given: told.append(given))
        monkeypatch.setattr(layer.dispatcher, "spec", replace(layer.dispatcher.spec, top_k_sizes=sizes))
        world.warmup(layer)
    assert told == [(24, slots)]

"""Router logits in a world of one: an executor that takes them chooses the experts itself, and no TopK is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.sm100_cases import case
from support.stand_ins.sm100_kernels import FakeTrtllm

import eprt.layer
from eprt.config import MoEConfig, Routing, RuntimeConfig, SharedExpert
from eprt.conformance.oracle import relative_error
from eprt.errors import CapacityError, InputError, UsageError
from eprt.experts import EXECUTORS
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.layer import PHASES, ExpertParallelMoE
from eprt.routing import Router, route
from eprt.tokens import RouterLogits, TopK
from eprt.weights import ExpertWeights, LatentWeights, SharedExpertWeights
from eprt.world import World

GROUPED = Routing("grouped_sigmoid", num_groups=4, topk_groups=2, scaling_factor=2.5)
T, WIDE, I = 9, 160, 48


class OneRank:
    """A layer with everything around its experts, on the stand-in kernels. `made`: TopK that were made."""

    def __init__(self, monkeypatch, world: World, routing: Routing, **runtime) -> None:
        self.fake = FakeTrtllm()
        spec = replace(EXECUTORS["trtllm_gen"], devices=("cpu",), requirement=None)
        monkeypatch.setitem(EXECUTORS, "trtllm_gen", spec)
        monkeypatch.setattr(TrtllmGenExecutor, "kernels", self.fake.kernels())
        self.made: list[TopK] = []
        monkeypatch.setattr(eprt.layer, "route", lambda *a, **k: self.made.append(route(*a, **k)) or self.made[-1])
        config, _, weights = case("nvfp4", (128, 128), rank=0, world=1)
        config = replace(config, routing=routing, model_hidden_size=WIDE, shared=SharedExpert(I))
        self.layer = self._build(config, world, weights, RuntimeConfig("none", "trtllm_gen", 16, **runtime))
        self.x = self._draw(T, WIDE)
        self.phases: list[str] = []

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16() / 4

    def _build(
        self, config: MoEConfig, world: World, weights: ExpertWeights, runtime: RuntimeConfig
    ) -> ExpertParallelMoE:
        draw = self._draw
        bias = draw(config.num_experts).float() if config.routing == GROUPED else None
        return ExpertParallelMoE(
            config,
            world,
            weights,
            runtime=runtime,
            router=Router(draw(config.num_experts, WIDE), config.routing, config.top_k, correction_bias=bias),
            shared=SharedExpertWeights(draw(I, WIDE), draw(WIDE, I), draw(I, WIDE)),
            latent=LatentWeights(draw(128, WIDE), draw(WIDE, 128)),
        )

    def by_topk(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        config, bias = self.layer.config, self.layer.router.correction_bias
        return self.layer(x, route(logits, config.routing, config.top_k, correction_bias=bias))


@pytest.fixture
def world():
    with World.from_env("cpu") as world:
        yield world


@pytest.mark.parametrize("routing", [Routing("softmax_topk"), Routing("topk_softmax"), GROUPED], ids=lambda r: r.method)
@pytest.mark.parametrize("given", [True, False], ids=["logits", "router"])
def test_the_kernel_chooses_the_same_experts(monkeypatch, world, routing, given):
    rank = OneRank(monkeypatch, world, routing)
    layer, x, logits = rank.layer, rank.x, rank.layer.router.logits(rank.x)
    expected = rank.by_topk(x, logits.logits)
    assert "logits" not in rank.fake.calls
    assert [bool(use.support) for use in layer.plan.engines] == [True, True], "the plan says so, too"
    rank.fake.calls.clear()
    layer.observe = lambda phase: rank.phases.append(phase) or torch.no_grad()
    found = layer(x, logits if given else None, tokens_per_rank=T)
    assert rank.fake.calls == ["logits", "fp4"]
    assert not rank.made
    assert tuple(rank.phases) == PHASES
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert relative_error(found, expected) <= 1e-2
    assert layer(x[:0], RouterLogits(logits.logits[:0])).shape == (0, WIDE)


@pytest.mark.parametrize(
    ("routing", "runtime"),
    [
        (Routing("softmax_topk", scaling_factor=2.0), {}),
        (Routing("sqrt_softplus"), {}),
        (Routing(), {"validate": "full"}),
        (Routing(), {"payload": "nvfp4"}),
    ],
    ids=["scaled", "sqrt_softplus", "full_validation", "payload"],
)
def test_everything_else_is_a_topk(monkeypatch, world, routing, runtime):
    rank = OneRank(monkeypatch, world, routing, **runtime)
    logits = rank.layer.router.logits(rank.x)
    assert torch.equal(rank.layer(rank.x, logits), rank.by_topk(rank.x, logits.logits))
    assert len(rank.made) == 1
    assert "logits" not in rank.fake.calls
    assert [bool(use.support) for use in rank.layer.plan.engines] == [False, True], "the plan says so, too"


def test_calls_that_dispatch_refuses_are_refused(monkeypatch, world):
    rank = OneRank(monkeypatch, world, Routing(), strict_capacity=True)
    layer, logits = rank.layer, RouterLogits(torch.zeros(T, 8))
    with pytest.raises(CapacityError, match="16"):
        layer(rank._draw(17, WIDE), RouterLogits(torch.zeros(17, 8)))
    with pytest.raises(CapacityError, match="tokens_per_rank >= 9"):
        layer(rank.x, logits, tokens_per_rank=8)
    for rows in (True, 0, "9"):
        with pytest.raises(InputError, match="expected an int"):
            layer(rank.x, logits, tokens_per_rank=rows)
    layer.close()
    with pytest.raises(UsageError, match="closed"):
        layer(rank.x, logits)
    assert "logits" not in rank.fake.calls


def test_warm_up_runs_the_logits_kernel(monkeypatch, world):
    rank = OneRank(monkeypatch, world, GROUPED)
    world.warmup(rank.layer)
    assert "logits" in rank.fake.calls

"""Router logits: an executor that takes them chooses the experts itself, as the router would, and no TopK is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import make_config
from support.cases.sm100_cases import build, case
from support.stand_ins.trtllm_kernels import FakeTrtllm

import eprt.layer
from eprt.config import MoEConfig, Routing, RuntimeConfig, SharedExpert
from eprt.conformance.oracle import relative_error
from eprt.errors import CapacityError, ConfigError, InputError, UsageError
from eprt.experts import EXECUTORS, rules
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.layer import PHASES, ExpertParallelMoE
from eprt.routing import Router, route
from eprt.tokens import FlatTokens, Payload, RouterLogits, TopK
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
    assert [bool(support) for support in layer.plan.engines.values()] == [True, True], "the plan says so, too"
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
    assert [bool(support) for support in rank.layer.plan.engines.values()] == [False, True], "the plan says so, too"


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


@pytest.mark.parametrize(
    "routing",
    [
        Routing("softmax_topk"),
        Routing("softmax_topk", renormalize=False),
        Routing("topk_softmax"),
        GROUPED,
        Routing("grouped_sigmoid"),
    ],
    ids=lambda r: f"{r.method}-{r.renormalize}-{r.num_groups}",
)
@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8_tensor", "fp8_block", "mxfp8"])
def test_logits_kernels_equal_routing_then_the_routed_kernel(routing, weight_format):
    config, shard, weights = case(weight_format, (128, 128))
    config = replace(config, routing=routing)
    grouped = routing.method == "grouped_sigmoid"
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, config.num_experts, generator=generator)
    bias = torch.randn(config.num_experts, generator=generator) / 4 if grouped else None
    hidden = Payload.plain(torch.randn(9, config.hidden_size, generator=generator).to(torch.bfloat16))
    executor = build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)
    topk = route(logits, routing, config.top_k, correction_bias=bias)
    expected = executor(FlatTokens(hidden, topk.ids, topk.weights, config.num_experts))
    assert relative_error(executor.run_logits(hidden, logits, bias), expected) <= 1e-2


@pytest.mark.parametrize(
    ("routing", "num_experts", "top_k", "taken"),
    [
        (Routing("softmax_topk"), 8, 3, True),
        (Routing("softmax_topk", scaling_factor=2.0), 8, 3, False),
        (Routing("sqrt_softplus"), 8, 3, False),
        (Routing("hash"), 8, 3, False),
        (Routing("grouped_sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5), 256, 8, True),
        (Routing("grouped_sigmoid", renormalize=False, num_groups=8, topk_groups=4), 256, 8, False),
        (Routing("grouped_sigmoid", num_groups=16, topk_groups=4), 256, 8, False),
        (Routing("grouped_sigmoid", num_groups=4, topk_groups=2), 256, 8, False),
        (Routing("grouped_sigmoid"), 384, 9, False),
        (Routing("grouped_sigmoid"), 512, 22, True),
        (Routing("grouped_sigmoid"), 1024, 8, False),
    ],
)
def test_only_routings_that_the_logits_kernels_have_bypass_the_router(routing, num_experts, top_k, taken):
    config = make_config("nvfp4", num_experts=num_experts, top_k=top_k, routing=routing)
    assert rules.trtllm_logits(config) is taken


def test_a_routing_that_kernels_lack_is_refused():
    config, shard, weights = case("nvfp4", (128, 64))
    hidden = Payload.plain(torch.zeros(2, 128, dtype=torch.bfloat16))
    for routing in (Routing("sqrt_softplus"), Routing("softmax_topk", scaling_factor=2.0)):
        executor = build(TrtllmGenExecutor, FakeTrtllm(), replace(config, routing=routing), shard, weights)
        with pytest.raises(ConfigError, match=routing.method):
            executor.run_logits(hidden, torch.zeros(2, config.num_experts))
    executor = build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)
    with pytest.raises(InputError, match=r"expected \[2, 8\]"):
        executor.run_logits(hidden, torch.zeros(2, 3))
    assert executor.run_logits(Payload.plain(hidden.data[:0]), torch.zeros(0, 8)).shape == (0, 128)

"""Gate and choice of vLLM's runner, in eprt's place: against the formula, and what stays with vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.stand_ins.vllm import FusedTopKRouter, MoERunner, ReplicatedLinear

from eprt.integrations.vllm.routing import router_of, take_over

E, K, H, T = 16, 4, 64, 50


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def runner_of(**changes: Any) -> MoERunner:
    gate = ReplicatedLinear(changes.pop("weight", random(E, H, seed=1)), changes.pop("bias", None))
    gate.out_dtype = changes.pop("out_dtype", None)
    return MoERunner(gate, FusedTopKRouter(K, E, **changes))


def taken(runner: MoERunner) -> MoERunner:
    router = router_of(runner, H)
    assert router is not None
    take_over(runner, router)
    return runner


def by_formula(hidden: torch.Tensor, weight: torch.Tensor, renormalize: bool, logits: torch.dtype) -> Any:
    """vLLM's: logits rounded to the gate's dtype, softmax of all experts in float32, weights unrounded."""
    scores = (hidden.double() @ weight.double().T).to(logits).double().softmax(-1)
    weights, ids = scores.topk(K, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("logits", [torch.bfloat16, torch.float32])
def test_the_choice_is_vllms(renormalize: bool, logits: torch.dtype) -> None:
    out_dtype = None if logits is torch.bfloat16 else logits
    runner = taken(runner_of(renormalize=renormalize, out_dtype=out_dtype))
    hidden = random(T, H, seed=2)
    weights, ids = runner.choose(hidden)
    wanted, experts = by_formula(hidden, random(E, H, seed=1), renormalize, logits)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    # A logit on the edge of two bf16 numbers may be either: the sums are of float32 here, of float64 there.
    same = (ids.sort(-1).values == experts.sort(-1).values).all(-1)
    assert same.float().mean() > (0.9 if logits is torch.bfloat16 else 0.99)
    found, wanted = (each.sort(-1).values[same] for each in (weights.double(), wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2**-8 if logits is torch.bfloat16 else 1e-5)
    assert torch.equal(runner.router.recorded, ids)


def test_a_bias_counts() -> None:
    bias = torch.zeros(E, dtype=torch.bfloat16)
    bias[3] = 100
    _, ids = taken(runner_of(bias=bias)).choose(random(T, H, seed=2))
    assert (ids == 3).any(-1).all()


def test_new_weights_are_read_in_place_and_in_another_place() -> None:
    runner = runner_of(weight=random(E, H, seed=3))
    gate, hidden = runner.gate, random(T, H, seed=2)
    before = taken(runner).choose(hidden)
    wanted = taken(runner_of()).choose(hidden)
    assert not torch.equal(before[1], wanted[1])
    gate.weight.data.copy_(random(E, H, seed=1))
    assert all(map(torch.equal, runner.choose(hidden), wanted))
    gate.weight.data = random(E, H, seed=3)
    assert all(map(torch.equal, runner.choose(hidden), before))


def no_gate(runner: MoERunner) -> None:
    runner.gate = None


def quantised(runner: MoERunner) -> None:
    runner.gate.quant_method = type("Fp8LinearMethod", (), {})()


def another_gate(runner: MoERunner) -> None:
    runner.gate.__class__ = type("ColumnParallelLinear", (ReplicatedLinear,), {})


def gate_of_shared_experts(runner: MoERunner) -> None:
    runner._fse_fuse_gate = True


def bias_elsewhere(runner: MoERunner) -> None:
    runner.gate.skip_bias_add = True


def in_float32(runner: MoERunner) -> None:
    runner.gate.weight.data = runner.gate.weight.data.float()


def sigmoid(runner: MoERunner) -> None:
    runner.router.scoring_func = "sigmoid"


def another_choice(runner: MoERunner) -> None:
    runner.router.__class__ = type("GroupedTopKRouter", (FusedTopKRouter,), {})


def balanced_by_vllm(runner: MoERunner) -> None:
    runner.router.eplb_state = object()


def packed(runner: MoERunner) -> None:
    runner.gate.weight.data = torch.empty(0)


GATES = [no_gate, quantised, another_gate, gate_of_shared_experts, bias_elsewhere, in_float32, packed]


@pytest.mark.parametrize("changed", [*GATES, sigmoid, another_choice, balanced_by_vllm])
def test_what_stays_with_vllm(changed: Any) -> None:
    runner = runner_of()
    assert router_of(runner, H) is not None
    changed(runner)
    assert router_of(runner, H) is None


def test_a_layer_without_a_runner_has_no_router() -> None:
    assert router_of(None, H) is None

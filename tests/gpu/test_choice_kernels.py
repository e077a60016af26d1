"""Holds the kernel that chooses experts by given logits to the plain torch code of `eprt.routing`, on one GPU or
interpreted on the CPU: the logits are the same numbers, so the choice is exact."""

from __future__ import annotations

import pytest
import torch
from support.cases.router_cases import GROUPED, dense, extras
from support.stand_ins.kernel_device import DEVICE, generator, runs_kernels, sized, synchronize

from eprt import routing as plain
from eprt.config import Routing
from eprt.routing import launch as routing_launch

pytestmark = [pytest.mark.gpu, runs_kernels]

# routing, E, K, correction bias
METHODS = {
    "gpt-oss": (Routing("topk_softmax"), 128, 4, False),
    "qwen3": (Routing("softmax_topk"), 128, 8, False),
    "qwen3 as it is": (Routing("softmax_topk", renormalize=False, scaling_factor=1.5), 128, 8, False),
    "deepseek-v3": (GROUPED, 256, 8, True),
    "kimi-k2": (Routing("grouped_sigmoid", scaling_factor=2.827), 384, 8, True),
    "nemotron-h": (Routing("grouped_sigmoid", scaling_factor=5.0), 512, 22, True),
    "grouped as it is": (Routing("grouped_sigmoid", False, 3, 2, 1.0), 12, 5, False),
    "deepseek-v4": (Routing("sqrt_softplus", scaling_factor=1.5), 256, 6, True),
    "softplus as it is": (Routing("sqrt_softplus", renormalize=False), 77, 6, False),
    "llama4": (Routing("topk_sigmoid"), 128, 1, False),
    "deepseek-v2": (Routing("grouped_softmax", False, 8, 3, 16.0), 160, 6, False),
    "ernie": (Routing("grouped_softmax"), 64, 6, True),
    "hash": (Routing("hash", scaling_factor=1.5), 256, 6, False),
    "all experts": (Routing("softmax_topk"), 9, 9, False),
    "one expert": (Routing("topk_softmax"), 1, 1, False),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def distinct_logits(T, E, dtype):
    """No two alike in a row, and every range of the formulas: around 0, beyond softplus' threshold, deep below 0."""
    step = torch.arange(E, device=DEVICE) - E // 2
    step = torch.stack([step[torch.randperm(E, generator=generator(t), device=DEVICE)] for t in range(T)])
    scale = torch.tensor([0.0625, 0.125, 0.015625], device=DEVICE).repeat(T)[:T, None]
    return (step * scale).to(dtype)


def assert_same(found, wanted, E, dtype):
    """The same experts. Weights: within 1e-5 (a dozen float32 roundings), and one step where they are rounded to it."""
    synchronize()
    a, b = dense(found, E), dense(wanted, E)
    assert torch.equal(a != 0, b != 0)
    step = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(a, b, rtol=1e-5 + step, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_the_choice_is_torchs(name, dtype):
    routing, E, K, with_bias = METHODS[name]
    T = sized(300, 5)
    logits = distinct_logits(T, E, dtype)
    bias, token_ids, table = extras(routing, E, K, with_bias, T)
    found = routing_launch.choose(logits, routing, K, bias, token_ids, table)
    wanted = plain.route_torch(logits, routing, K, bias, token_ids, table)
    assert_same(found, wanted, E, dtype)
    if bias is None and routing.method != "hash":
        assert (found.weights[:, :-1] >= found.weights[:, 1:]).all()  # best first


def test_the_bias_counts_for_the_choice_and_not_for_the_weight():
    """By hand: sigmoid(0) = 0.5 everywhere, expert 5 and then 2 by their bias."""
    bias = torch.tensor([0.0, -1.0, 0.25, 0.0, 0.0, 0.5], device=DEVICE)
    found = routing_launch.choose(
        torch.zeros(2, 6, device=DEVICE), Routing("grouped_sigmoid", scaling_factor=3.0), 2, bias
    )
    assert found.ids.tolist() == [[5, 2]] * 2
    assert found.weights.tolist() == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("name", [name for name in METHODS if name != "hash"])
def test_of_equal_scores_the_lowest_experts_win(name):
    routing, E, K, _ = METHODS[name]
    logits = torch.zeros(3, E, device=DEVICE)
    logits[1] = -0.0
    logits[2, ::2] = -0.0  # equal to 0, whatever its bits
    found = routing_launch.choose(logits, routing, K)
    assert found.ids.tolist() == [list(range(K))] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_numbers_that_are_none_choose_experts_that_exist(name, value):
    routing, E, K, with_bias = METHODS[name]
    logits = distinct_logits(4, E, torch.float32)
    logits[0] = value
    logits[1, E // 2] = value
    logits[2, : E // 2] = value
    bias, token_ids, table = extras(routing, E, K, with_bias, 4)
    found = routing_launch.choose(logits, routing, K, bias, token_ids, table)
    assert found.ids.min() >= 0
    assert found.ids.max() < E
    assert all(len(set(row)) == K for row in found.ids.tolist())
    # A softmax over all experts makes all of them NaN, and a table doesn't look.
    if value != value and routing.method not in ("hash", "grouped_softmax"):
        assert E // 2 in found.ids[1].tolist()  # as in torch.topk, NaN is the largest
    clean = plain.route_torch(logits[3:], routing, K, bias, None if token_ids is None else token_ids[3:], table)
    assert_same(type(clean)(found.ids[3:], found.weights[3:]), clean, E, torch.float32)

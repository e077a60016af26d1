"""Routing against transformers' own routers, on the same weights and in the same dtype; then each refusal."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from eprt.config import MoEConfig, Routing
from eprt.errors import ConfigError, InputError
from eprt.routing import Router, route, warmup
from eprt.tokens import RouterLogits, TopK

T, E, K, H, V = 37, 16, 4, 32, 50
HF_CONFIG = SimpleNamespace(
    num_experts_per_tok=K,
    num_local_experts=E,
    num_experts=E,
    hidden_size=H,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    scoring_func="sqrtsoftplus",
    vocab_size=V,
)
GROUPED = Routing("grouped_sigmoid", num_groups=4, topk_groups=2, scaling_factor=2.5)

# transformers' module and class, our Routing, changes to the Hugging Face config (`weights`: to our Router)
ROUTERS = {
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", Routing("topk_softmax"), {}),
    "qwen3": ("qwen3_moe", "Qwen3MoeTopKRouter", Routing("softmax_topk"), {}),
    "qwen3_raw": ("qwen3_moe", "Qwen3MoeTopKRouter", Routing("softmax_topk", False), {"norm_topk_prob": False}),
    "qwen3_5": ("qwen3_5_moe", "Qwen3_5MoeTopKRouter", Routing("softmax_topk"), {}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter", GROUPED, {}),
    "deepseek_v3_raw": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        Routing("grouped_sigmoid", False, 4, 2, 2.5),
        {"norm_topk_prob": False},
    ),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4TopKRouter", Routing("sqrt_softplus", scaling_factor=2.5), {}),
    "deepseek_v4_hash": ("deepseek_v4", "DeepseekV4HashRouter", Routing("hash", scaling_factor=2.5), {}),
    "granite": ("granitemoe", "GraniteMoeTopKRouter", Routing("topk_softmax"), {}),
    "mixtral": ("mixtral", "MixtralTopKRouter", Routing("softmax_topk"), {"weights": "float32"}),
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        Routing("grouped_softmax", False, 4, 2, 2.5),
        {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2_greedy": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        Routing("grouped_softmax", False, scaling_factor=2.5),
        {"topk_method": "greedy"},
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHTopkRouter",
        Routing("grouped_sigmoid", scaling_factor=2.5),
        {"n_group": 1, "topk_group": 1},
    ),
}


def theirs_and_ours(name, dtype):
    module, cls, routing, changes = ROUTERS[name]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    generator = torch.Generator().manual_seed(7)
    theirs = getattr(modeling, cls)(SimpleNamespace(**{**vars(HF_CONFIG), **changes})).requires_grad_(False)
    for tensor in theirs.state_dict().values():
        if tensor.is_floating_point():
            # Wide enough that the correction bias changes choices.
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        else:
            tensor.copy_(torch.rand(V, E, generator=generator).argsort(dim=1)[:, :K])
    bias = getattr(theirs, "e_score_correction_bias", None)
    theirs.to(dtype)
    if bias is not None:
        theirs.e_score_correction_bias = bias.float()  # transformers keeps it in float32
    ours = Router(
        theirs.weight.data,
        routing,
        K,
        bias=getattr(theirs, "bias", None),
        correction_bias=getattr(theirs, "e_score_correction_bias", None),
        token_table=getattr(theirs, "tid2eid", None),
        weights=changes.get("weights", "logits"),
    )
    return theirs, ours


def dense(ids, weights):
    """[T, E] weight of each expert: equal whatever the order of the slots."""
    return torch.zeros(ids.shape[0], E).scatter(1, ids.long(), weights.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ROUTERS)
def test_equals_transformers(name, dtype):
    theirs, ours = theirs_and_ours(name, dtype)
    hidden = torch.randn(T, H, generator=torch.Generator().manual_seed(3)).to(dtype)
    token_ids = torch.arange(T) % V
    arguments = (hidden, token_ids) if ours.routing.method == "hash" else (hidden,)
    logits, weights, ids = theirs(*arguments)
    found = ours(*arguments)
    assert torch.equal(ours.logits(hidden).logits.float(), logits.float())
    assert torch.equal(dense(found.ids, found.weights), dense(ids, weights))
    assert found.ids.dtype == torch.int32
    assert found.weights.dtype == torch.float32
    found.check(K)
    none = ours(hidden[:0], token_ids[:0])
    assert none.ids.shape == none.weights.shape == (0, K)
    assert none.ids.dtype == torch.int32


FALLING, NEAR = [2.0, 1.0, 0.0, -1.0], [0.2, 1.0, -1.0, 0.9]
BY_HAND = [  # logits of one token, routing, correction bias, experts, their weights
    # A correction bias changes the choice and not the weight.
    (FALLING, Routing("grouped_sigmoid"), None, [0], [1.0]),
    (FALLING, Routing("grouped_sigmoid", False), [-1.0, 0.0, 0.0, 1.0], [3], [0.268941]),
    (FALLING, Routing("sqrt_softplus"), None, [0], [1.0]),
    (FALLING, Routing("sqrt_softplus", False), [-1.0, 0.0, 0.0, 1.0], [3], [0.559698]),  # sqrt(log(1 + e**-1))
    (
        torch.tensor([0.5, 0.3, 0.2]).log().tolist(),
        Routing("grouped_softmax"),
        [0.0, -1.0, 1.0],
        [0, 2],
        [5 / 7, 2 / 7],
    ),
    # Expert 0 is the best alone, but group 1 (experts 2, 3) wins on the sum of its two best.
    ([3.0, -9.0, 1.0, 1.5], Routing("grouped_sigmoid", num_groups=2, topk_groups=1), None, [2, 3], None),
    # A group of softmax scores counts as its best: by the sum of two it would be group 1.
    ([3.0, -9.0, 2.9, 2.9], Routing("grouped_softmax", False, num_groups=2, topk_groups=1), None, [0, 1], None),
    (FALLING, Routing("topk_sigmoid", False), None, [0, 1], [0.880797, 0.731059]),
    # Jitter 0.1: 0.9 is near 1.0 (0.1 of it) and 0.2 isn't; without 1.0 nothing is near 0.9. Jitter 0.45: 0.2 is near
    # both (0.8 of 1.0, 0.78 of 0.9).
    (NEAR, Routing("sparsemixer", False, jitter=0.1), None, [1, 3], [0.524979, 1.0]),
    (NEAR, Routing("sparsemixer", False, jitter=0.45), None, [1, 3], [0.424779, 0.668188]),
]


@pytest.mark.parametrize(("logits", "routing", "bias", "ids", "weights"), BY_HAND)
def test_by_hand(logits, routing, bias, ids, weights):
    bias = None if bias is None else torch.tensor(bias)
    found = route(torch.tensor([logits]), routing, len(ids), correction_bias=bias)
    order = found.ids[0].argsort()
    assert found.ids[0, order].tolist() == ids
    assert weights is None or found.weights[0, order].tolist() == pytest.approx(weights, abs=1e-6)


def test_what_the_weights_are_rounded_to():
    """Mixtral's stay float32 behind bf16 logits; ERNIE's are the tokens' dtype behind a float32 router."""
    hidden, weight = torch.randn(T, H).bfloat16(), torch.randn(E, H).bfloat16()

    def short(router):
        weights = router(hidden).weights
        return torch.equal(weights, weights.bfloat16().float())

    assert short(Router(weight, Routing(), K))
    assert not short(Router(weight, Routing(), K, weights="float32"))
    assert short(Router(weight.float(), Routing("grouped_softmax"), K, weights="tokens"))
    assert not short(Router(weight.float(), Routing("grouped_softmax"), K))


def test_a_bias_of_another_dtype_than_the_weight():
    hidden, weight, bias = torch.randn(T, H).bfloat16(), torch.randn(E, H).bfloat16(), torch.randn(E).bfloat16()
    known, found = (Router(weight, Routing("topk_softmax"), K, bias=each)(hidden) for each in (bias, bias.float()))
    assert torch.equal(found.ids, known.ids)
    assert torch.equal(found.weights, known.weights)


def test_scaling_is_applied_once_and_leading_dimensions_are_flattened():
    weight = torch.randn(E, H)
    hidden = torch.randn(2, 3, H)
    once = Router(weight, Routing("softmax_topk"), K)(hidden)
    scaled = Router(weight, Routing("softmax_topk", scaling_factor=3.0), K)(hidden)
    assert once.ids.shape == (6, K)
    assert torch.equal(scaled.weights, once.weights * 3.0)
    assert torch.allclose(once.weights.sum(1), torch.ones(6))


def test_router_moves_its_buffers():
    router = Router(torch.randn(E, H), Routing("hash"), K, token_table=torch.zeros(V, K, dtype=torch.long)).bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.token_table.dtype == torch.long
    assert list(router.parameters()) == []


LOGITS = torch.zeros(3, E)
IDS, TABLE = torch.tensor([0, 1, 2]), torch.zeros(V, K, dtype=torch.long)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ConfigError, "top_k 17", lambda: route(LOGITS, Routing(), E + 1)),
        (ConfigError, "top_k 0", lambda: route(LOGITS, Routing(), 0)),
        (InputError, "expected a float", lambda: route(LOGITS[0], Routing(), K)),
        (InputError, "expected a float", lambda: route(RouterLogits(LOGITS.int()), Routing(), K)),
        (InputError, "correction_bias", lambda: route(LOGITS, GROUPED, K, correction_bias=torch.zeros(3))),
        (ConfigError, "8 experts of the chosen", lambda: route(LOGITS, GROUPED, 9)),
        (ConfigError, "equal size", lambda: route(LOGITS, Routing("grouped_sigmoid", num_groups=16), 1)),
        (ConfigError, "8 experts of the chosen", lambda: route(LOGITS, Routing("grouped_softmax", False, 4, 2), 9)),
        (ConfigError, "sparsemixer routing: must be 2", lambda: route(LOGITS, Routing("sparsemixer"), 3)),
        (InputError, "needs token_ids", lambda: route(LOGITS, Routing("hash"), K, token_table=TABLE)),
        (InputError, "needs token_table", lambda: route(LOGITS, Routing("hash"), K, token_ids=IDS)),
        (InputError, "token_ids is", lambda: route(LOGITS, Routing("hash"), K, token_ids=IDS[:2], token_table=TABLE)),
        (InputError, "token_table is", lambda: route(LOGITS, Routing("hash"), 2, token_ids=IDS, token_table=TABLE)),
        (InputError, "span", lambda: route(LOGITS, Routing("hash"), K, token_ids=IDS + V - 2, token_table=TABLE)),
        (InputError, r"\[0, 50\)", lambda: route(LOGITS, Routing("hash"), K, token_ids=IDS - 1, token_table=TABLE)),
        (ConfigError, "expected \\[E, H\\]", lambda: Router(LOGITS[0], Routing(), K)),
        (ConfigError, "router bias", lambda: Router(LOGITS, Routing(), 1, bias=torch.zeros(4))),
        (ConfigError, "needs a token_table", lambda: Router(LOGITS, Routing("hash"), 1)),
        (ConfigError, "takes no token_table", lambda: Router(LOGITS, Routing(), 1, token_table=TABLE)),
        (ConfigError, "takes no correction_bias", lambda: Router(LOGITS, Routing(), 1, correction_bias=LOGITS[:, 0])),
        (ConfigError, "equal size", lambda: Router(LOGITS.T, Routing("grouped_sigmoid", num_groups=16), 1)),
        (ConfigError, "integer .V, 1.", lambda: Router(LOGITS.T, Routing("hash"), 1, token_table=TABLE)),
        (
            ConfigError,
            "16 to 16: expected 0 to 15",
            lambda: Router(LOGITS.T, Routing("hash"), K, token_table=TABLE + E),
        ),
        (ConfigError, "experts -1 to -1", lambda: Router(LOGITS.T, Routing("hash"), K, token_table=TABLE - 1)),
        (InputError, "hidden is", lambda: Router(LOGITS, Routing(), 1)(torch.zeros(2, E + 1))),
        (InputError, "router.to", lambda: Router(LOGITS, Routing(), 1)(torch.zeros(2, E).bfloat16())),
        (InputError, r"\(1,\).*: expected a contiguous bool \[2 or more\]", lambda: padded(torch.ones(1) > 0)),
        (InputError, r"padding is \(2,\), strides \(1,\), torch.int32 on cpu", lambda: padded(torch.ones(2).int())),
        (InputError, r"padding is \(2, 1\)", lambda: padded(torch.ones(2, 1) > 0)),
        (InputError, r"padding is \(2,\), strides \(2,\)", lambda: padded((torch.ones(4) > 0)[::2])),
        (InputError, "on meta: expected .* on cpu", lambda: padded(torch.ones(2, device="meta") > 0)),
    ],
)
def test_refusals(error, text, call):
    with pytest.raises(error, match=text):
        call()


def padded(marks: torch.Tensor) -> TopK:
    return Router(LOGITS, Routing(), 1)(torch.zeros(2, E), None, marks)


def test_a_token_that_padding_marks_has_no_expert():
    assert padded(torch.tensor([False, True, True])).ids[:, 0].tolist() == [0, LOGITS.shape[0]]


def test_a_change_in_place_is_brought_to_what_graphs_read():
    router, fused = Router(torch.randn(E, H), Routing(), K), Mock(copies=True)
    made_of = [(name, each, 0 if each is None else each._version) for name, each in router._buffers.items()]
    router._fused = made_of, fused
    router.refresh()
    fused.reread.assert_not_called()
    router.weight.mul_(2)
    router.refresh()
    router.refresh()
    fused.reread.assert_called_once_with(router.weight, None, None, None)


def test_warm_up_needs_no_gpu_and_hooks_see_the_choice():
    router = Router(torch.randn(E, H), Routing(), K)
    router.warmup(64, logits=True)
    warmup(MoEConfig(E, K, H, 8), router, 64, torch.device("cpu"), logits=True)
    seen = []
    router.register_forward_hook(lambda _, given, found: seen.append(found))
    found = router(torch.randn(3, H))
    assert seen == [found]

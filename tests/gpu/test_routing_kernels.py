"""Holds the router (GEMM and choice) to float64, to the plain torch code of `eprt.routing` and to transformers' own
routers, on one GPU or interpreted on the CPU.

Behind a GEMM the choice can't be exact, as every GEMM adds in its own order: no expert left out may beat a chosen one
by more than rounding.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.cases.router_cases import GROUPED, dense, extras
from support.stand_ins.kernel_device import DEVICE, cuda_only, generator, runs_kernels, sized, synchronize

from eprt import routing as plain
from eprt.config import MoEConfig, Routing
from eprt.routing import Router, warmup
from eprt.routing import launch as routing_launch
from eprt.routing.launch import FusedRouter, Rounding

pytestmark = [pytest.mark.gpu, runs_kernels]

# E, H, K, routing, dtype of weight, bias
SHAPES = {
    "gpt-oss-120b": (128, 2880, 4, Routing("topk_softmax"), torch.bfloat16, True),
    "qwen3-30b-a3b": (128, 2048, 8, Routing("softmax_topk"), torch.bfloat16, False),
    "deepseek-v3": (256, 7168, 8, GROUPED, torch.bfloat16, False),
    "deepseek-v3 f32 weight": (256, 7168, 8, GROUPED, torch.float32, False),
    "deepseek-v4": (256, 4096, 6, Routing("sqrt_softplus", scaling_factor=1.5), torch.bfloat16, False),
    "hash": (256, 4096, 6, Routing("hash", scaling_factor=1.5), torch.bfloat16, False),
    "nemotron-h": (512, 4096, 22, Routing("grouped_sigmoid", scaling_factor=5.0), torch.bfloat16, False),
    "hunyuan-a13b": (64, 4096, 8, Routing("softmax_topk"), torch.float32, False),
    "ernie": (64, 2560, 6, Routing("grouped_softmax"), torch.float32, False),
    "odd": (41, 77, 5, Routing("softmax_topk"), torch.bfloat16, True),
    "odd f32": (41, 1000, 5, Routing("grouped_sigmoid"), torch.float32, True),
}
TOKENS = sized([1, 8, 16, 17, 32, 33, 128, 129, 513, 2100, 4097, 8193], [1, 18])


class Case:
    """A router of random weights, its hidden states, and its scores in float64."""

    def __init__(self, name, T):
        self.E, H, self.K, self.routing, dtype, with_bias = SHAPES[name]
        H = sized(H, H if H < 2048 else H // 4)  # enough for two to four splits, the last of which is not full
        draw = generator(T)
        normal = lambda *shape: torch.randn(shape, generator=draw, device=DEVICE)  # noqa: E731
        self.hidden = normal(T, H).bfloat16()
        self.weight = (normal(self.E, H) * H**-0.5).to(dtype)
        self.bias = (normal(self.E) * 0.5).to(dtype) if with_bias else None
        grouped = self.routing.method in ("grouped_sigmoid", "grouped_softmax")
        choosing = grouped or self.routing.method == "sqrt_softplus"
        self.correction = normal(self.E) * 0.05 if choosing else None
        _, self.token_ids, self.table = extras(self.routing, self.E, self.K, False, T)
        self.logits_dtype = torch.float32 if grouped or dtype == torch.float32 else torch.bfloat16
        exact = self.hidden.double() @ self.weight.double().T
        self.exact = exact if self.bias is None else exact + self.bias.double()

    def fused(self, **changes):
        given = {"weight": self.weight, "bias": self.bias, "correction_bias": self.correction, **changes}
        given.setdefault("rounding", Rounding(self.logits_dtype, self.logits_dtype))
        return FusedRouter(routing=self.routing, top_k=self.K, token_table=self.table, **given)

    def regret(self, ids):
        """By how much the best expert (or group) left out beats the worst chosen one: [T], 0 if the choice is right."""
        method, scores = self.routing.method, self.exact
        group_regret = torch.zeros(len(scores), device=DEVICE, dtype=torch.float64)
        if method == "grouped_sigmoid":
            scores = scores.sigmoid() + self.correction.double()
            if self.routing.num_groups > 1:
                scores, group_regret = self._in_groups(scores, ids)
        elif method == "grouped_softmax":
            scores = scores.softmax(1) + self.correction.double()
        elif method == "sqrt_softplus":
            scores = torch.nn.functional.softplus(scores).sqrt() + self.correction.double()
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids.long(), True)
        worst = torch.where(chosen, scores, float("inf")).amin(1)
        return torch.maximum(torch.where(chosen, -float("inf"), scores).amax(1) - worst, group_regret)

    def _in_groups(self, scores, ids):
        """Scores, -inf outside the groups that were chosen, and by how much a group left out beats one that wasn't."""
        groups = scores.view(len(scores), self.routing.num_groups, -1)
        sums = groups.topk(2).values.sum(-1)
        kept = sums.topk(self.routing.topk_groups)
        best = torch.zeros_like(sums, dtype=torch.bool).scatter(1, kept.indices, True)
        hit = torch.zeros_like(best).scatter(1, ids.long() // groups.shape[2], True)
        worst = kept.values.amin(1, keepdim=True)
        regret = torch.where(hit, worst - sums, 0.0).amax(1).clamp(min=0)
        # Where a group was taken that isn't among the best, it took the place of the worst of them.
        taken = hit | (best & ~((sums == worst) & (hit & ~best).any(1, keepdim=True)))
        return torch.where(taken.repeat_interleave(groups.shape[2], 1), scores, -float("inf")), regret


# float32 sums of up to 7168 products that amount to about 1: rounded to 2^-24 of it as often as there are steps and
# pieces, and cut off at 2^-22 of it within a step, at each of its 8 to 32 additions. Scores are a quarter of it off,
# two of them count in a group. bf16 logits up to 8 are rounded by at most 2^-6 each, the root of softplus and the sum
# of both once more.
LOGITS = 1e-5


def tolerance(case):
    return LOGITS / 2 if case.logits_dtype == torch.float32 else 2**-4


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("name", SHAPES)
def test_router(name, T, record_property):
    """Logits against float64, the choice by them against torch's, and against float64."""
    case = Case(name, T)
    fused = case.fused()
    logits, found = fused.logits(case.hidden), fused.topk(case.hidden, case.token_ids)
    synchronize()
    assert (logits.shape, logits.dtype) == (case.exact.shape, case.logits_dtype)
    error = (logits.double() - case.exact).abs()
    record_property("largest error of a logit", float(error.max()))
    assert (error <= LOGITS + (2**-8 * case.exact.abs() if case.logits_dtype == torch.bfloat16 else 0)).all()
    if case.routing.method != "hash":
        assert case.regret(found.ids).max() <= tolerance(case)
    by_logits = plain.route_torch(logits, case.routing, case.K, case.correction, case.token_ids, case.table)
    a, b = dense(found, case.E), dense(by_logits, case.E)
    same = ((a != 0) == (b != 0)).all(1)
    # Equal bf16 logits are common, and torch takes any of them; of float32 ones the chosen are the same.
    assert same.float().mean() >= (1.0 if case.logits_dtype == torch.float32 else 0.8)
    torch.testing.assert_close(a[same], b[same], rtol=1e-5 if case.logits_dtype == torch.float32 else 2**-7, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_that_nobody_reads_get_no_expert(name):
    case = Case(name, 5)
    fused, padding = case.fused(), torch.tensor([False, True, False, True, True, False, True], device=DEVICE)
    found, marked = fused.topk(case.hidden, case.token_ids), fused.topk(case.hidden, case.token_ids, padding)
    synchronize()
    wanted = found.ids.masked_fill(padding[:5, None], case.E)
    assert torch.equal(marked.ids, wanted)
    assert torch.equal(marked.weights, found.weights)


@pytest.mark.parametrize("name", SHAPES)
def test_no_tokens_and_runs_alike(name):
    case = Case(name, sized(100, 3))
    fused = case.fused()
    none = fused.topk(case.hidden[:0], None if case.token_ids is None else case.token_ids[:0])
    assert none.ids.shape == none.weights.shape == (0, case.K)
    assert fused.logits(case.hidden[:0]).shape == (0, case.E)
    first, again = (fused.topk(case.hidden, case.token_ids) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.weights, again.weights)


@pytest.mark.parametrize("tokens", [16, 300])
def test_all_bits_of_a_float32_weight_count(tokens):
    weight = torch.randn(64, 300, generator=generator(1), device=DEVICE) * torch.logspace(-30, 30, 300, device=DEVICE)
    router = FusedRouter(weight, Routing("grouped_sigmoid"), 2, Rounding(torch.float32, torch.float32))
    columns = torch.arange(300, device=DEVICE)[-tokens:]
    found = router.logits(torch.eye(300, dtype=torch.bfloat16, device=DEVICE)[columns])
    assert torch.equal(found, weight.T[columns])


def test_one_bf16_part_is_not_enough():
    """What a float32 weight that is only rounded would do to the logits, and to the choice of enough tokens."""
    case = Case("deepseek-v3 f32 weight", sized(512, 4))
    full, rounded = case.fused(), case.fused(weight=case.weight.bfloat16())
    errors = [(router.logits(case.hidden).double() - case.exact).abs().max() for router in (full, rounded)]
    assert errors[0] <= LOGITS < 1e-3 < errors[1]
    assert case.regret(full.topk(case.hidden, None).ids).max() <= LOGITS / 2
    if sized(True, False):
        assert case.regret(rounded.topk(case.hidden, None).ids).max() > 1e-4


def test_a_bias_that_is_ignored_shows():
    case = Case("odd", sized(200, 9))
    right, wrong = (case.regret(case.fused(**given).topk(case.hidden, None).ids) for given in ({}, {"bias": None}))
    assert right.max() <= tolerance(case) < wrong.max()


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "ernie"])
def test_models_that_round_elsewhere(name):
    """Mixtral's way: bf16 logits, then float32; ERNIE's: float32 throughout, weights at last in the tokens' dtype."""
    case = Case(name, sized(64, 4))
    ernie = name == "ernie"
    given = (torch.float32, torch.float32, torch.bfloat16) if ernie else (torch.bfloat16, torch.float32)
    fused = case.fused(rounding=Rounding(*given))
    logits, found = fused.logits(case.hidden), fused.topk(case.hidden, None)
    assert logits.dtype == torch.float32
    if not ernie:
        assert torch.equal(logits, case.fused().logits(case.hidden).float())
    wanted = plain.route_torch(logits, case.routing, case.K, case.correction).weights
    ours, theirs = found.weights.sort(1).values, wanted.sort(1).values
    assert torch.equal(found.weights, found.weights.bfloat16().float()) is ernie
    torch.testing.assert_close(ours, theirs, rtol=1e-5 + (2**-8 if ernie else 0), atol=0)


def transformers_router(name, case):
    from types import SimpleNamespace

    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    classes = {
        "gpt-oss-120b": GptOssTopKRouter,
        "qwen3-30b-a3b": Qwen3MoeTopKRouter,
        "deepseek-v4": DeepseekV4TopKRouter,
    }
    config = SimpleNamespace(
        num_experts_per_tok=case.K,
        num_local_experts=case.E,
        num_experts=case.E,
        n_routed_experts=case.E,
        hidden_size=case.hidden.shape[1],
        norm_topk_prob=True,
        n_group=case.routing.num_groups,
        topk_group=case.routing.topk_groups,
        routed_scaling_factor=case.routing.scaling_factor,
        scoring_func="sqrtsoftplus",
    )
    router = classes.get(name, DeepseekV3TopkRouter)(config).requires_grad_(False).to(DEVICE)
    router.weight.data = case.weight
    if case.bias is not None:
        router.bias.data = case.bias
    if case.correction is not None:
        router.e_score_correction_bias = case.correction
    return router


@pytest.mark.parametrize(
    "name", ["gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v3 f32 weight", "deepseek-v4"]
)
def test_transformers_choice_on_weights_of_real_size(name, record_property):
    """The experts of the model's own router, where no two logits are closer than the two GEMMs' roundings."""
    pytest.importorskip("transformers")
    case = Case(name, sized(2048, 12))
    _, weights, ids = transformers_router(name, case)(case.hidden)
    found = case.fused().topk(case.hidden, None)
    synchronize()
    ours = dense(found, case.E)
    theirs = torch.zeros_like(ours).scatter(1, ids.long(), weights.float())
    same = ((ours != 0) == (theirs != 0)).all(1)
    record_property("tokens with other experts", int((~same).sum()))
    record_property("of", len(same))
    exact = case.logits_dtype == torch.float32
    regrets = [float(case.regret(chosen).max()) for chosen in (found.ids, ids)]
    record_property("largest regret, ours and theirs", regrets)
    # Where they differ, the experts at stake are as good as equal, for both.
    assert max(regrets) <= tolerance(case)
    assert same.float().mean() >= (0.998 if exact else 0.8)
    torch.testing.assert_close(ours[same], theirs[same], rtol=1e-5 if exact else 2**-5, atol=1e-12)


def router(case):
    given = {"bias": case.bias, "correction_bias": case.correction, "token_table": case.table}
    return Router(case.weight, case.routing, case.K, float32_logits=case.logits_dtype == torch.float32, **given)


def test_warm_up_and_logits_given_by_the_caller():
    """What a layer's warm-up calls, on a device with or without kernels."""
    case = Case("odd", 3)
    config = MoEConfig(case.E, case.K, 77, 8, routing=case.routing)
    for given in (router(case), None):
        warmup(config, given, 20, DEVICE, logits=True)


@cuda_only
@pytest.mark.parametrize("name", SHAPES)
def test_module_launches_the_kernels_and_follows_its_weights(name, monkeypatch):
    case = Case(name, 40)
    module = router(case)
    module.warmup(64, logits=True)
    monkeypatch.setattr(routing_launch, "CachedKernel", None)  # nothing compiles after warm-up
    monkeypatch.setattr(plain, "route_torch", None)
    seen = []
    hook = module.register_forward_hook(lambda _, given, found: seen.append(found))
    for T in (1, 16, 17, 40, 0):
        ids = None if case.token_ids is None else case.token_ids[:T]
        wanted = case.fused().topk(case.hidden[:T], ids)
        found = module(case.hidden[:T], ids)
        assert torch.equal(found.ids, wanted.ids)
        assert torch.equal(found.weights, wanted.weights)
        assert seen[-1] is found
    hook.remove()
    assert torch.equal(module.logits(case.hidden).logits, case.fused().logits(case.hidden))
    other = Case(name, 41)
    module.weight.copy_(other.weight)
    case.weight = other.weight
    assert torch.equal(module.logits(case.hidden).logits, case.fused().logits(case.hidden))


@cuda_only
@pytest.mark.parametrize("name", SHAPES)
def test_graph_replays_with_other_tokens(name):
    case, other = Case(name, 24), Case(name, 25)
    module = router(case)
    hidden = case.hidden.clone()
    ids = None if case.token_ids is None else case.token_ids.clone()
    module(hidden, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module(hidden, ids)
    hidden.copy_(other.hidden[:24])
    if ids is not None:
        ids.copy_(other.token_ids[:24])
    graph.replay()
    synchronize()
    wanted = module(hidden, ids)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.weights, wanted.weights)
    before = wanted.weights
    module.weight.copy_(other.weight)
    module.refresh()
    graph.replay()
    wanted = module(hidden, ids)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.weights, wanted.weights)
    assert not torch.equal(found.weights, before)


@pytest.mark.parametrize("name", ["deepseek-v3 f32 weight", "odd f32"])
def test_what_was_copied_is_brought_up_to_date_where_it_lies(name):
    case, other = Case(name, 8), Case(name, 9)
    case.weight = case.weight.T.contiguous().T  # which the kernel can't read
    fused, first = case.fused(), case.fused().topk(case.hidden, None)
    assert fused.copies
    at = fused._weight.data_ptr()
    case.weight.copy_(other.weight)
    case.bias = other.bias
    fused.reread(case.weight, case.bias, case.correction, case.table)
    found, wanted = fused.topk(case.hidden, None), case.fused().topk(case.hidden, None)
    assert fused._weight.data_ptr() == at != case.weight.data_ptr()
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.weights, wanted.weights)
    assert not torch.equal(found.weights, first.weights)


_ASK_FOR_A_ROW_THAT_IS_NOT_THERE = """
import torch
from eprt.config import Routing
from eprt.routing import route
table = torch.tensor([[0, 1], [2, {last}]], device="cuda")
token_ids = torch.tensor([0, {token}], device="cuda")
route(torch.zeros(2, 4, device="cuda"), Routing("hash"), 2, token_ids=token_ids, token_table=table)
torch.cuda.synchronize()
print("came through")
"""


@cuda_only
@pytest.mark.parametrize(
    ("token", "last", "text"),
    [(1, 3, "came through"), (2, 3, "a token id lies outside"), (-1, 3, "a token id lies outside"), (1, 4, "names an")],
)
def test_ids_outside_the_hash_table_end_the_call(token, last, text):
    """In a process of its own, whose CUDA context is lost."""
    code = _ASK_FOR_A_ROW_THAT_IS_NOT_THERE.format(token=token, last=last)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert text in done.stdout + done.stderr
    assert (done.returncode == 0) == (text == "came through")

"""Gate and choice of an engine's MoE block, in eprt's place: against the formula, and what stays with the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.stand_ins import sglang, vllm
from support.stand_ins.vllm import ReplicatedLinear
from torch import nn

from eprt.config import MoEConfig
from eprt.integrations.sglang import routing as sglang_routing
from eprt.integrations.vllm import routing as vllm_routing

E, K, H, T = 16, 4, 64, 50


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def experts_of(*, invariant: bool = False) -> Any:
    """An engine's module of experts that eprt runs, as far as its gate is concerned."""
    runtime = SimpleNamespace(batch_invariant=invariant)
    layer = SimpleNamespace(
        router=None,
        config=MoEConfig(E, K, H, 32),
        dispatcher=SimpleNamespace(runtime=runtime),
        start_compiling=lambda earlier: None,
    )
    binding = SimpleNamespace(name="layers.0", expert_parallel=False)
    bound = SimpleNamespace(layer=layer, state=SimpleNamespace(built=[layer]), binding=binding)
    moe = SimpleNamespace(is_sequence_parallel=True)  # whose padding isn't marked
    return SimpleNamespace(
        quant_method=SimpleNamespace(eprt=bound, moe=moe),
        moe_runner_config=SimpleNamespace(routed_scaling_factor=2.5),
        should_fuse_routed_scaling_factor_in_topk=False,
    )


class InVllm:
    def __init__(
        self, kind: type[Any], gate: Any, renormalize: bool = True, invariant: bool = False, router: Any = None
    ) -> None:
        router = router or vllm.FusedTopKRouter(K, E, renormalize=renormalize)
        self.config = vllm.host()
        self.block = kind(gate, router, experts_of(invariant=invariant))
        self.gate, self.choice, self.runner = gate, router, self.block.experts

    def take_over(self) -> bool:
        vllm_routing.take_over_gates(vllm.model_of(self.config, [self.block]))
        return self.runner.routed_experts.quant_method.eprt.layer.router is not None


class InSglang:
    def __init__(
        self, kind: type[Any], gate: Any, renormalize: bool = True, invariant: bool = False, **choice: Any
    ) -> None:
        self.block = kind(gate, sglang.TopK(K, renormalize=renormalize, **choice), experts_of(invariant=invariant))
        self.gate, self.choice = gate, self.block.topk.topk_config

    def take_over(self) -> bool:
        sglang_routing.take_over_gates(nn.ModuleList([self.block]))
        return self.block.experts.quant_method.eprt.layer.router is not None


MODELS: list[Any] = [
    (InVllm, vllm.HoldsGate),
    (InVllm, vllm.MLPBlock),
    (InSglang, sglang.Qwen3MoeSparseMoeBlock),
    (InSglang, sglang.GptOssSparseMoeBlock),
]
models = pytest.mark.parametrize(("engine", "kind"), MODELS, ids=[kind.__name__ for _, kind in MODELS])


def by_formula(hidden: torch.Tensor, weight: torch.Tensor, renormalize: bool, logits: torch.dtype) -> Any:
    """The engines': logits rounded to the gate's dtype, softmax of all experts in float32, weights unrounded."""
    scores = (hidden.double() @ weight.double().T).to(logits).double().softmax(-1)
    weights, ids = scores.topk(K, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


@models
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("logits", [torch.bfloat16, torch.float32])
def test_the_choice_is_the_engines(engine: Any, kind: Any, renormalize: bool, logits: torch.dtype) -> None:
    model = engine(kind, ReplicatedLinear(random(E, H, seed=1), None, logits), renormalize)
    assert model.take_over()
    hidden = random(T, H, seed=2)
    weights, ids = model.block.choose(hidden)
    wanted, experts = by_formula(hidden, random(E, H, seed=1), renormalize, logits)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    # A logit on the edge of two bf16 numbers may be either: the sums are of float32 here, of float64 there.
    same = (ids.sort(-1).values == experts.sort(-1).values).all(-1)
    assert same.float().mean() > (0.9 if logits is torch.bfloat16 else 0.99)
    found, wanted = (each.sort(-1).values[same] for each in (weights.double(), wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2**-8 if logits is torch.bfloat16 else 1e-5)


CORRECTION = torch.linspace(-0.2, 0.2, E).roll(5)


def by_groups(engine: str, groups: tuple[int, int], factor: float, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model whose experts are chosen by a sigmoid, `groups[1]` of `groups[0]` groups and a bias."""
    weight = random(E, H, seed=1).to(dtype)
    if engine == "sglang":
        gate = sglang.MoEGate(weight, CORRECTION)
        choice: dict[str, Any] = {"use_grouped_topk": True, "num_expert_group": groups[0], "topk_group": groups[1]}
        if groups[0] == 1:
            choice = {"scoring_func": "sigmoid"}
        choice |= {"apply_routed_scaling_factor_on_output": True, "routed_scaling_factor": factor}
        return InSglang(sglang.DeepseekV2MoE, gate, correction_bias=gate.e_score_correction_bias, **choice)
    gate = ReplicatedLinear(weight)
    gate.e_score_correction_bias = nn.Parameter(CORRECTION, requires_grad=False)
    kind = vllm.GroupedTopKRouter if groups[0] > 1 else vllm.FusedTopKBiasRouter
    return InVllm(vllm.HoldsGate, gate, router=kind(K, E, gate.e_score_correction_bias, groups, factor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [(4, 2), (1, 1)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_sigmoid_with_groups_and_a_bias_is_chosen_by(
    engine: str, groups: tuple[int, int], dtype: torch.dtype
) -> None:
    model = by_groups(engine, groups, 2.5, dtype)
    assert model.take_over()
    hidden = random(T, H, seed=2)
    weights, ids = model.block.choose(hidden)
    scores = (hidden.double() @ random(E, H, seed=1).double().T).sigmoid()
    biased = (scores + CORRECTION.double()).view(T, groups[0], -1)
    best = biased.topk(2, -1).values.sum(-1).topk(groups[1], -1).indices
    kept = torch.zeros(T, groups[0], 1, dtype=torch.bool).scatter_(1, best[:, :, None], True)
    experts = biased.masked_fill(~kept, -torch.inf).view(T, E).topk(K, -1).indices
    assert torch.equal(ids.long().sort(-1).values, experts.sort(-1).values)
    wanted = scores.gather(1, ids.long())
    torch.testing.assert_close(weights.double(), 2.5 * wanted / wanted.sum(-1, keepdim=True), rtol=1e-5, atol=0)


def test_the_factor_that_sglangs_runner_would_apply_is_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, unless its router has applied it, which the experts are told."""
    plain, scaled = by_groups("sglang", (4, 2), 1.0), by_groups("sglang", (4, 2), 1.0)
    assert plain.take_over()
    assert not plain.block.experts.should_fuse_routed_scaling_factor_in_topk
    monkeypatch.setattr(sglang_routing, "output_scale", lambda experts, device, all_to_all: 2.5)
    assert scaled.take_over()
    assert scaled.block.experts.should_fuse_routed_scaling_factor_in_topk
    hidden = random(T, H, seed=2)
    torch.testing.assert_close(scaled.block.choose(hidden)[0], 2.5 * plain.block.choose(hidden)[0])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_new_weights_come_with_a_new_bias(engine: str) -> None:
    model = by_groups(engine, (4, 2), 1.0)
    assert model.take_over()
    hidden = random(T, H, seed=2)
    before = model.block.choose(hidden)[1]
    model.gate.e_score_correction_bias.data = CORRECTION.flip(0)
    after = model.block.choose(hidden)[1]
    assert not torch.equal(before, after)
    model.gate.weight.data = random(E, H, seed=3)
    assert not torch.equal(model.block.choose(hidden)[1], after)


def test_float16_tokens_arent_read_as_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read bf16; a float32 gate may be a float16 model's."""
    model = by_groups("vllm", (4, 2), 1.0, torch.float32)
    monkeypatch.setattr("eprt.routing.Router.kernels", SimpleNamespace(topk=None))
    assert model.take_over()
    hidden = random(T, H, seed=2)
    ids = model.block.choose(hidden.half())[1]
    monkeypatch.setattr("eprt.routing.Router.kernels", None)
    other = by_groups("vllm", (4, 2), 1.0, torch.float32)
    assert other.take_over()
    assert (ids == other.block.choose(hidden)[1]).float().mean() > 0.95


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scoring_func", "softmax"),
        ("num_fused_shared_experts", 1),
        ("num_expert_group", 3),
        ("topk_group", 5),
        ("routed_scaling_factor", None),
    ],
)
def test_groups_that_stay_in_vllm(name: str, value: Any) -> None:
    model = by_groups("vllm", (4, 2), 1.0)
    setattr(model.choice, name, value)
    assert not model.take_over()


def test_what_vllm_records_is_what_eprt_chose() -> None:
    model = InVllm(vllm.HoldsGate, ReplicatedLinear(random(E, H, seed=1)))
    assert model.take_over()
    _, ids = model.block.choose(random(T, H, seed=2))
    assert model.choice.recorded is not None
    assert torch.equal(model.choice.recorded, ids)


@models
def test_a_bias_counts(engine: Any, kind: Any) -> None:
    bias = torch.zeros(E, dtype=torch.bfloat16)
    bias[3] = 100
    model = engine(kind, ReplicatedLinear(random(E, H, seed=1), bias))
    assert model.take_over()
    assert (model.block.choose(random(T, H, seed=2))[1] == 3).any(-1).all()


@models
def test_new_weights_are_read_in_place_and_in_another_place(engine: Any, kind: Any) -> None:
    model, other = (engine(kind, ReplicatedLinear(random(E, H, seed=seed))) for seed in (3, 1))
    assert model.take_over()
    assert other.take_over()
    hidden = random(T, H, seed=2)
    before, wanted = model.block.choose(hidden), other.block.choose(hidden)
    assert not torch.equal(before[1], wanted[1])
    model.gate.weight.data.copy_(random(E, H, seed=1))
    assert all(map(torch.equal, model.block.choose(hidden), wanted))
    model.gate.weight.data = random(E, H, seed=3)
    assert all(map(torch.equal, model.block.choose(hidden), before))


@models
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant_method", type("Fp8LinearMethod", (), {})()),
        ("__class__", type("ColumnParallelLinear", (ReplicatedLinear,), {})),
        ("skip_bias_add", True),
        ("weight", nn.Parameter(random(E, H, seed=1).half())),
        ("weight", nn.Parameter(random(H, E, seed=1).T)),
        ("weight", nn.Parameter(torch.empty(0))),  # packed
        ("use_intel_amx_backend", True),
    ],
)
def test_gates_that_stay(engine: Any, kind: Any, name: str, value: Any) -> None:
    gate = ReplicatedLinear(random(E, H, seed=1))
    setattr(gate, name, value)
    assert not engine(kind, gate).take_over()


@models
def test_batch_invariant_layers_stay(engine: Any, kind: Any) -> None:
    assert not engine(kind, ReplicatedLinear(random(E, H, seed=1)), invariant=True).take_over()


@pytest.mark.parametrize("kind", [vllm.HoldsGate, vllm.MLPBlock])
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("choice", "scoring_func", "sigmoid"),
        ("choice", "__class__", type("GroupedTopKRouter", (vllm.FusedTopKRouter,), {})),
        ("choice", "eplb_state", object()),
        ("runner", "_fse_fuse_gate", True),
    ],
)
def test_choices_that_stay_in_vllm(kind: Any, part: str, name: str, value: Any) -> None:
    model = InVllm(kind, ReplicatedLinear(random(E, H, seed=1)))
    setattr(getattr(model, part), name, value)
    assert not model.take_over()


@pytest.mark.parametrize(
    "change",
    [
        {"use_grouped_topk": True},
        {"scoring_func": "sigmoid"},
        {"correction_bias": torch.zeros(E)},
        {"custom_routing_function": print},
        {"num_fused_shared_experts": 1},
        {"shared_experts": SimpleNamespace(num_fused_shared_experts=1)},
        {"apply_routed_scaling_factor_on_output": True},
    ],
)
def test_choices_that_stay_in_sglang(change: dict[str, Any]) -> None:
    model = InSglang(sglang.Qwen3MoeSparseMoeBlock, ReplicatedLinear(random(E, H, seed=1)))
    vars(model.choice).update(change)
    assert not model.take_over()


def test_sglangs_newer_config_is_read() -> None:
    model = InSglang(sglang.Qwen3MoeSparseMoeBlock, ReplicatedLinear(random(E, H, seed=1)))
    del model.choice.num_fused_shared_experts
    model.choice.shared_experts = SimpleNamespace(num_fused_shared_experts=0)
    assert model.take_over()


def test_blocks_of_the_same_name_stay_in_sglang() -> None:
    """Those of mixtral_quant.py and of transformers' code have no `TopK`."""
    model = InSglang(sglang.Qwen3MoeSparseMoeBlock, ReplicatedLinear(random(E, H, seed=1)))
    del model.block.topk
    assert not model.take_over()


def test_a_factor_that_sglangs_model_looks_up_in_each_step_stays() -> None:
    model = by_groups("sglang", (4, 2), 2.5)
    model.block.experts.quant_method.eprt.binding.expert_parallel = True
    assert not model.take_over()


def test_what_is_compiled_with_eprts_experts_or_without_a_gate_has_a_key_of_its_own() -> None:
    """vLLM's graphs have what its own experts leave to them: a sum over ranks, say."""
    held, called = (InVllm(kind, ReplicatedLinear(random(E, H, seed=1))) for kind in (vllm.HoldsGate, vllm.MLPBlock))
    called.config.additional_config = {"eprt": {"strict": True}}
    assert held.take_over()
    assert called.take_over()
    names = ["layers.0"]
    assert held.config.additional_config == {vllm_routing.LAYERS: names}
    more = {vllm_routing.LAYERS: names, vllm_routing.GATES: names}
    assert called.config.additional_config == {"eprt": {"strict": True}} | more


def test_models_without_eprts_experts_stay() -> None:
    model = InVllm(vllm.HoldsGate, ReplicatedLinear(random(E, H, seed=1)))
    model.runner.routed_experts = SimpleNamespace(quant_method=object())
    vllm_routing.take_over_gates(model.block)
    assert type(model.block.gate) is ReplicatedLinear
    assert not InVllm(vllm.OtherBlock, ReplicatedLinear(random(E, H, seed=1))).take_over()

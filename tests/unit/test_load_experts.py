"""New weights in a layer that runs: the same tensors, the results of one that was built with them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import CPU, RUNTIME, make_config, make_flat, make_weights, shard_of
from support.cases.sm100_cases import build, calibrated, packed
from support.jobs import loading_jobs as jobs
from support.jobs.humming_jobs import humming_on_cpu, needs_humming
from support.stand_ins.cutedsl_kernels import FakeCuteDsl
from support.stand_ins.trtllm_kernels import FakeTrtllm

from eprt.config import MoEConfig
from eprt.conformance.oracle import shard_weights
from eprt.errors import ConfigError, UnsupportedError
from eprt.experts import EXECUTORS
from eprt.experts.blackwell.cutedsl import CuteDslExecutor
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.humming import HummingExecutor
from eprt.experts.in_place import leaves
from eprt.experts.reference import ReferenceExecutor
from eprt.experts.torch_grouped import GroupedExecutor
from eprt.ranks.launcher import WorldFailed, WorldPool
from eprt.weights import PLAIN, ExpertWeights

SLOTWISE = [
    (ReferenceExecutor, "f32"),
    (ReferenceExecutor, "mxfp4"),
    (GroupedExecutor, "bf16"),
    (TritonGroupedExecutor, "bf16"),
    (TritonGroupedExecutor, "fp8_block"),
    (TritonGroupedExecutor, "mxfp4"),
    (TritonGroupedExecutor, "nvfp4"),
    (TritonGroupedExecutor, "int4"),
    pytest.param(HummingExecutor, "mxfp4", marks=needs_humming),
    pytest.param(HummingExecutor, "fp8_block", marks=needs_humming),
]
WHOLE = [
    (TrtllmGenExecutor, FakeTrtllm, "nvfp4"),
    (TrtllmGenExecutor, FakeTrtllm, "fp8_block"),
    (CuteDslExecutor, FakeCuteDsl, "nvfp4"),
]


def a_case(weight_format: str, bias: bool) -> tuple[MoEConfig, ExpertWeights, ExpertWeights]:
    """(config, first weights, other weights) of ten experts: more than one for each piece."""
    config = replace(make_config(weight_format, bias=bias), num_experts=10, top_k=3, hidden_size=128)
    return config, make_weights(config, 1), make_weights(config, 2)


def rows_of(weights: ExpertWeights, rows: list[int]) -> ExpertWeights:
    return weights.map(lambda tensor: tensor[rows])


def mixed(old: ExpertWeights, new: ExpertWeights, slots: list[int]) -> ExpertWeights:
    """`old` with `new`'s experts in these slots."""
    both = ExpertWeights.map(old, lambda tensor: tensor.clone())
    for into, source in zip(_tensors(both), _tensors(new), strict=True):
        for slot in slots:
            into[slot] = source[slot]
    return both


def _tensors(weights: ExpertWeights) -> list[torch.Tensor]:
    found = [*weights.gate_up.tensors().values(), *weights.down.tensors().values()]
    return found + [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]


def bits(executor) -> dict[str, torch.Tensor]:
    """Everything that was made of the weights, as bytes."""
    return {n: t.clone().contiguous().view(-1).view(torch.uint8) for n, t in executor.slot_tensors().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a trainer may hold them: the last two dimensions the other way round in memory, and to be
    trained."""
    turned = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    return turned.requires_grad_(tensor.dtype in PLAIN)


@pytest.mark.parametrize(("kind", "weight_format"), SLOTWISE)
def test_loaded_experts_are_those_of_a_fresh_executor(kind, weight_format: str) -> None:
    with humming_on_cpu() if kind is HummingExecutor else nullcontext():
        config, old, new = a_case(weight_format, bias=True)
        shard, single = shard_of(config), [7, 2]
        executor, new = kind(config, shard, old.map(spread), CPU, RUNTIME), new.map(spread)
        held = executor.slot_tensors()
        at = {name: tensor.data_ptr() for name, tensor in held.items()}
        assert not any(tensor.requires_grad for tensor in held.values()), "a graph keeps the trainer's"
        first = bits(executor)
        for turn, weights in enumerate((new, old, new, old)):
            executor.load_experts(weights)
            assert same(bits(executor), first) == (turn % 2 == 1)
            assert same(bits(executor), bits(kind(config, shard, weights, CPU, RUNTIME)))
        executor.load_experts(rows_of(new, single), single)
        assert same(bits(executor), bits(kind(config, shard, mixed(old, new, single), CPU, RUNTIME)))
        assert at == {name: tensor.data_ptr() for name, tensor in executor.slot_tensors().items()}


@pytest.mark.parametrize(("kind", "fake", "weight_format"), WHOLE)
def test_executors_that_lay_out_all_experts_together(kind, fake, weight_format: str) -> None:
    config = replace(make_config(weight_format, num_experts=8, top_k=3, hidden_size=256, intermediate_size=192))
    shard = shard_of(config)
    old, new = (make_weights(config, seed) for seed in (1, 2))
    if weight_format == "nvfp4":
        old, new = calibrated(old, config, 1), calibrated(new, config, 2)
    executor, fresh, before = (build(kind, fake(), config, shard, weights) for weights in (old, new, old))
    executor.spec = EXECUTORS["trtllm_gen" if kind is TrtllmGenExecutor else "cutedsl_nvfp4"]
    flat = make_flat(config, dtype=torch.bfloat16)
    tokens = packed(flat, old) if weight_format == "nvfp4" else flat
    at = {n: t.data_ptr() for n, t in leaves(executor).items() if isinstance(t, torch.Tensor)}
    with pytest.raises(UnsupportedError, match="load all of this rank's at once"):
        executor.load_experts(rows_of(new, [1]), [1])
    assert torch.equal(executor(tokens), before(tokens))
    executor.load_experts(new)
    assert torch.equal(executor(tokens), fresh(tokens))
    assert not torch.equal(executor(tokens), before(tokens))
    executor.load_experts(old)
    assert torch.equal(executor(tokens), before(tokens))
    assert at == {n: leaves(executor)[n].data_ptr() for n in at}


def test_of_experts_only_a_part_lies_beside_the_layer(monkeypatch) -> None:
    config, old, new = a_case("f32", bias=False)
    executor = GroupedExecutor(config, shard_of(config), old, CPU, RUNTIME)
    made: list[int] = []
    prepare = GroupedExecutor._prepare
    monkeypatch.setattr(
        GroupedExecutor,
        "_prepare",
        lambda self, weights: (made.append(weights.num_local_experts), prepare(self, weights)),
    )
    executor.load_experts(new)
    assert made == [2] * 5


@needs_humming
def test_values_that_need_another_layout_are_refused_and_nothing_changes() -> None:
    with humming_on_cpu():
        config = replace(make_config("nvfp4"), hidden_size=128, intermediate_size=128)
        spread = make_weights(config, 1)
        up = spread.gate_up
        one = replace(spread, gate_up=replace(up, global_scale=up.global_scale[:, :1].expand(-1, 2).contiguous()))
        shard = shard_of(config)
        executor = HummingExecutor(config, shard, one, CPU, RUNTIME)
        before = bits(executor)
        with pytest.raises(ConfigError, match="different second scales"):
            executor.load_experts(spread)
        assert same(bits(executor), before)
        wide = HummingExecutor(config, shard, spread, CPU, RUNTIME)
        wide.load_experts(one)  # one scale, written twice
        assert not same(bits(wide), before)


def test_zero_points_of_fewer_groups_are_no_scales() -> None:
    """Both have as many words."""
    config, old, _ = a_case("int4", bias=False)

    def by_64(matrix):
        scales = matrix.scales[..., ::2].contiguous()
        return replace(matrix, scales=scales, zeros=torch.full(scales.shape, 7, dtype=torch.uint8))

    new = replace(old, gate_up=by_64(old.gate_up), down=by_64(old.down))
    executor, fresh = (TritonGroupedExecutor(config, shard_of(config), w, CPU, RUNTIME) for w in (old, new))
    assert [t.shape for t in bits(executor).values()] == [t.shape for t in bits(fresh).values()]
    before = bits(executor)
    for weights, slots in ((new, None), (rows_of(new, [3]), [3])):
        with pytest.raises(ConfigError, match=r"gate_up\.scale_and_zeros .* build the layer again"):
            executor.load_experts(weights, slots)
    assert same(bits(executor), before)


def test_weights_without_the_first_ones_input_scales_are_refused() -> None:
    """What the calls need of these would stay that of the first weights."""
    config = make_config("nvfp4", hidden_size=256, intermediate_size=192)
    weights, shard, runtime = make_weights(config), shard_of(config), replace(RUNTIME, token_format="flat")
    executor = build(CuteDslExecutor, FakeCuteDsl(), config, shard, calibrated(weights, config), runtime)
    executor.spec = EXECUTORS["cutedsl_nvfp4"]
    flat = make_flat(config, dtype=torch.bfloat16)
    before = executor(flat)
    with pytest.raises(ConfigError, match=r"input as None, the layer holds .* build the layer again"):
        executor.load_experts(weights)
    assert torch.equal(executor(flat), before)


def test_weights_of_another_size_or_format_are_refused() -> None:
    config, old, _ = a_case("f32", bias=False)
    executor = GroupedExecutor(config, shard_of(config), old, CPU, RUNTIME)
    with pytest.raises(ConfigError, match="expected"):
        executor.load_experts(rows_of(old, [1, 2]))
    with pytest.raises(ConfigError, match="weight_format"):
        executor.load_experts(make_weights(replace(config, weight_format="mxfp4")))


def test_tensor_parallel_parts_hold_the_bias_once() -> None:
    config, old, new = a_case("f32", bias=True)
    for rank in range(2):
        shard = shard_of(config, rank, 2, moe_tp_size=2)
        executor, fresh = (
            GroupedExecutor(config, shard, shard_weights(weights, config, shard), CPU, RUNTIME)
            for weights in (old, new)
        )
        executor.load_experts(shard_weights(new, config, shard))
        assert same(bits(executor), bits(fresh))


@pytest.mark.parametrize("dispatcher", ["torch", "none"])
@pytest.mark.parametrize("executor", ["reference", "torch_grouped"])
def test_a_layer_loads_whole_and_single_experts_between_steps(pools, dispatcher: str, executor: str) -> None:
    ranks = 1 if dispatcher == "none" else 2
    for right, stayed in pools(ranks).run(jobs.updated, dispatcher=dispatcher, executor=executor):
        assert right == [True] * 5
        assert stayed


def test_a_load_that_fails_half_way_refuses_calls_until_a_whole_one(pools) -> None:
    for told, refused, works in pools(2).run(jobs.half_loaded):
        assert told.startswith("CapacityError: rank 1 has no memory to prepare its experts anew")
        assert refused == ["UsageError: layer 0 holds experts of a load that failed half way: load all of them"] * 3
        assert works == [True, True]


def test_a_rank_killed_in_a_load_is_named_and_nobody_answers_with_mixed_weights(tmp_path) -> None:
    with WorldPool(3, grace_s=10) as pool, pytest.raises(WorldFailed, match="rank 1 was killed"):
        pool.run(jobs.killed_half_way, folder=tmp_path)
    for rank in (0, 2):
        told, seconds, after, broken = (tmp_path / str(rank)).read_text().split(maxsplit=3)
        assert (told, after) == ("RankLost", "RankLost")
        assert float(seconds) < 4.0  # a lost connection is known in one second; a loaded machine schedules late
        assert broken.startswith("layer 0 holds experts of a load that failed half way")


def test_columns_in_another_order_stay_in_it(pools) -> None:
    for found, told, built in pools(2).run(jobs.in_another_order):
        assert found == [True] * 3
        assert "hidden_order isn't that of the first weights" in told
        assert built.startswith("WorldMismatch")
        assert "hidden_order" in built


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("none", "load_experts got no weights"),
        ("twice", "experts [1, 1]: expected different numbers of experts, from 0 to 7"),
        ("unknown", "experts [8]: expected"),
        ("without", "1 experts and no weights"),
        ("kind", "load_experts got dict: expected ExpertWeights"),
        ("number", "experts 1: expected different numbers of experts, from 0 to 7"),
        ("mask", "experts [True]: expected different numbers of experts, from 0 to 7"),
        ("size", "gate_up.data is"),
        ("order", "hidden_order isn't that of the first weights"),
        ("list", "hidden_order: expected each of 16 columns"),
        ("empty", "gate_up.data is missing: Dense weights need a tensor"),
        ("bias", "down_bias is list: expected a tensor (5, 16)"),
        ("replica", "expert 0 is brought by ranks [0], and not by ranks [1], which hold it"),
        ("together", "reference lays out its experts together, so single ones can't be loaded"),
        ("other executor", "another can't replace its weights: build the layer again"),
        ("step", "load_experts inside step"),
    ],
)
def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(pools, wrong: str, says: str) -> None:
    for told, works in pools(2).run(jobs.refused, wrong=wrong):
        assert says in told
        kinds = {"step": "UsageError", "together": "UnsupportedError", "other executor": "UnsupportedError"}
        assert told.startswith(kinds.get(wrong, "ConfigError"))
        assert works

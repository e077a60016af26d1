"""Configurations validate themselves; placement, capacity and requirements give one verdict with value and remedy."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eprt.balance import plan_placement, rank_loads, read_counts, report, write_counts
from eprt.config import Activation, MoEConfig, ParallelConfig, Routing, RuntimeConfig
from eprt.dispatch.call import Capacity, check_rows
from eprt.errors import CapacityError, ConfigError, EprtError, InputError, RankLost, UsageError, WorldMismatch
from eprt.graphs import StepGraphs
from eprt.integrations.transformers import load_without_experts
from eprt.layer import ExpertParallelMoE
from eprt.models import Checkpoint, load_layer
from eprt.placement import ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan import make_plan
from eprt.ranks.launcher import WorldFailed
from eprt.rounding import ceil_div, next_power_of_2, round_up
from eprt.routing import Router
from eprt.support import Device, Requirement, version_key
from eprt.world.agree import fingerprint_of

SMALL = MoEConfig(num_experts=8, top_k=2, hidden_size=16, intermediate_size=32)


def test_which_activations_are_plain() -> None:
    assert all(activation.plain for activation in (Activation(), Activation("relu2")))
    assert not any(each.plain for each in (Activation(alpha=1.702), Activation(beta=1.0), Activation(limit=10.0)))


INCONSISTENT = [
    ({"top_k": 9}, "top_k 9 is larger than num_experts 8"),
    ({"top_k": 0}, "top_k 0: must be a positive integer"),
    ({"hidden_size": -1}, "hidden_size -1"),
    ({"num_experts": 8.0}, "num_experts 8.0"),
    ({"weight_format": "int3"}, "weight_format 'int3'"),
    ({"model_hidden_size": 0}, "model_hidden_size 0"),
    ({"routing": Routing("grouped_sigmoid", num_groups=3, topk_groups=1)}, "can't be split into 3 routing groups"),
    (
        {"top_k": 3, "routing": Routing("grouped_sigmoid", num_groups=4)},
        "top_k 3 is larger than the 2 experts of the 1 routing groups",
    ),
]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Activation("gelu"), "activation kind 'gelu'"),
        (lambda: Activation(limit=0.0), "activation limit 0.0"),
        (lambda: Activation(limit=float("inf")), "activation limit inf"),
        (lambda: Activation(alpha=float("nan")), "activation alpha nan: must be finite"),
        (lambda: RuntimeConfig(dispatcher=3), "dispatcher 3: expected a name"),
        (lambda: Routing(num_groups=2, topk_groups=3), "topk_groups 3"),
        (lambda: ParallelConfig(4, moe_tp_size=3), "moe_tp_size 3 doesn't divide world_size 4"),
        (lambda: ParallelConfig(0), "world_size 0"),
        (lambda: RuntimeConfig(max_tokens_per_rank=0), "max_tokens_per_rank 0"),
        (lambda: RuntimeConfig(validate="some"), "validate 'some'"),
        (lambda: Device.parse("gpu"), "expected 'cpu' or 'sm<number>'"),
        (lambda: Device("gpu", 90), "kind 'gpu': expected one of cpu, cuda"),
        (lambda: Device("cuda", "90"), "sm '90': expected int"),
        (lambda: Device.parse("sm9\u00b2"), "expected 'cpu' or 'sm<number>'"),
        (lambda: Device.parse("sm95"), "no GPU has this compute capability; known are sm50, .*sm89, sm90, sm100"),
        (lambda: RuntimeConfig(payload="fp4"), "payload 'fp4': expected one of f32, bf16, fp8_block, nvfp4"),
        (lambda: RuntimeConfig(combine_payload="fp4"), "combine_payload 'fp4': expected one of fp8"),
        (lambda: RuntimeConfig(token_format="slabs"), "token_format 'slabs': expected one of flat, expert_major"),
        (lambda: RuntimeConfig(max_tokens_per_rank=2.5), "max_tokens_per_rank 2.5: must be a positive integer"),
        (lambda: Routing("sigmoid"), "routing method 'sigmoid'"),
        (lambda: Routing(scaling_factor=float("nan")), "scaling_factor nan: must be finite"),
        (lambda: ParallelConfig(4, moe_tp_size=True), "moe_tp_size True"),
        (lambda: RuntimeConfig(count_load="false"), "count_load 'false': expected bool"),
        (lambda: Activation(alpha="1.7"), "alpha '1.7': expected float"),
        (lambda: Routing(num_groups=2.0), "num_groups 2.0: expected int"),
        (lambda: dataclasses.replace(SMALL, activation="swiglu"), "activation 'swiglu': expected Activation"),
        *((lambda change=change: dataclasses.replace(SMALL, **change), says) for change, says in INCONSISTENT),
    ],
)
def test_a_value_outside_its_range_is_refused(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_placement([1] * 8, ParallelConfig(2), 10.0), "num_slots 10.0: expected int"),
        (lambda: plan_placement([1] * 8, 2, 10), "parallel 2: expected ParallelConfig"),
        (lambda: plan_placement(["1"] * 8, ParallelConfig(2), 10), r"\['1'\] among them"),
        (lambda: rank_loads([1] * 8, [0] * 8), r"placement \[0, 0.*: expected ExpertPlacement"),
        (lambda: report([[1] * 8], [None]), r"placements \[None\]: expected a sequence of ExpertPlacement"),
        (lambda: write_counts("c.json", {0: [1.5]}), r"counts are {0: \[1.5\]}: expected whole numbers"),
        (lambda: write_counts("c.json", [[1]]), r"counts \[\[1\]\]: expected a mapping to a sequence of int"),
        (lambda: read_counts(None), "path is NoneType: expected str or Path"),
        (lambda: PlacementFile.read(3), "path 3: expected str or Path"),
        (lambda: ExpertPlacement(8, 2), "parallel 2: expected ParallelConfig"),
        (
            lambda: ExpertPlacement(8, ParallelConfig(2), [1.0] * 8),
            r"slots are \[1.0, .*: expected the expert's number",
        ),
        (lambda: ExpertPlacement(8, ParallelConfig(2)).shard(2), "rank 2: expected 0 to 1"),
        (lambda: make_plan(SMALL, ParallelConfig(2), {}, Device("cpu")), "runtime is dict: expected RuntimeConfig"),
        (
            lambda: make_plan(SMALL, ParallelConfig(2), RuntimeConfig(), torch.device("cpu")),
            "device is torch.device: expected Device",
        ),
        (lambda: Device.parse(90), "text 90: expected str"),
        (lambda: load_layer("m", 0, parallel=2), "parallel 2: expected ParallelConfig or None"),
        (lambda: load_without_experts(None), "path_or_hub_id is NoneType: expected str or Path"),
        (lambda: Checkpoint(b"m"), "directory is bytes: expected str or Path"),
        (lambda: Router([[1.0]], Routing(), 1), r"weight \[\[1.0\]\]: expected Tensor"),
        (lambda: Router(torch.ones(8, 16), Routing(), 2, weights="bf16"), "'bf16': expected one of logits, float32"),
        (lambda: StepGraphs("world", [], print, {}), "world 'world': expected World"),
        (lambda: ExpertParallelMoE(SMALL, None, None), "world is NoneType: expected World"),
    ],
)
def test_an_argument_of_another_kind_is_refused(call, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_numbers_and_paths_of_other_libraries_are_taken(tmp_path) -> None:
    parallel = ParallelConfig(2)
    plan = plan_placement(torch.tensor([9] + [1] * 7), parallel, np.int64(10))
    assert plan == plan_placement(np.array([9] + [1] * 7), parallel, 10) == plan_placement([9] + [1] * 7, parallel, 10)
    assert ExpertPlacement(2, parallel, [1, 0]) == ExpertPlacement(2, parallel, np.array([1, 0]))
    assert hash(ExpertPlacement(2, parallel, [1, 0])) == hash(ExpertPlacement(2, parallel, (1, 0)))
    write_counts(os.path.join(tmp_path, "c.json"), {0: torch.tensor([1, 2])})
    assert read_counts(tmp_path / "c.json") == {0: (1, 2)}


def test_errors_belong_to_both_families() -> None:
    for kind in (ConfigError, InputError, CapacityError, UsageError, WorldMismatch, RankLost, WorldFailed):
        assert issubclass(kind, EprtError)
        assert issubclass(kind, ValueError if kind in (ConfigError, InputError, CapacityError) else RuntimeError)


def test_fingerprints_tell_layers_apart() -> None:
    variants = [
        SMALL,
        dataclasses.replace(SMALL, top_k=3),
        dataclasses.replace(SMALL, activation=Activation(limit=7.0)),
        dataclasses.replace(SMALL, routing=Routing(scaling_factor=2.0)),
        dataclasses.replace(SMALL, weight_format="mxfp4"),
    ]
    settings = variants[3].settings()
    names = ("routing.scaling_factor", "num_experts", "activation.kind", "shared")
    assert [settings[name] for name in names] == ["2.0", "8", "swiglu", "None"]
    found = [fingerprint_of(config.settings()) for config in variants]
    assert len(set(found)) == len(variants)
    assert found[0] == fingerprint_of(dataclasses.replace(SMALL).settings())
    assert all(0 <= number < 2**63 for number in found)


@given(ep=st.integers(1, 8), moe_tp=st.integers(1, 4), per_rank=st.integers(1, 5))
def test_shards_cover_every_expert_once_per_moe_tp_slice(ep: int, moe_tp: int, per_rank: int) -> None:
    parallel = ParallelConfig(ep * moe_tp, moe_tp_size=moe_tp)
    placement = ExpertPlacement(ep * per_rank, parallel)
    shards = [placement.shard(rank) for rank in range(parallel.world_size)]
    held = [(e, s.moe_tp_rank) for s in shards for e in range(s.first_expert, s.end_expert)]
    assert sorted(held) == sorted(itertools.product(range(ep * per_rank), range(moe_tp)))


def test_a_slice_that_does_not_divide_is_refused() -> None:
    shard = ExpertPlacement(6, ParallelConfig(4, moe_tp_size=2)).shard(3)
    assert (shard.first_expert, shard.num_local_experts, shard.moe_tp_rank) == (3, 3, 1)
    with pytest.raises(ConfigError, match="intermediate_size 5 doesn't divide by moe_tp_size 2"):
        shard.slice_intermediate(5)


class TestCapacity:
    CAPACITY = Capacity(64, bytes_per_token=1000)

    def test_derived_and_given_rows(self) -> None:
        assert self.CAPACITY.agree([0, 0, 0], 0) == 1
        assert self.CAPACITY.agree([3, 64, 0], 0) == 64
        assert self.CAPACITY.agree([3, 5], 8) == 8

    def test_a_batch_to_be_cut_may_be_larger(self) -> None:
        assert self.CAPACITY.agree([3, 650], 0, cut=True) == 650
        assert self.CAPACITY.agree([3, 65], 80, cut=True) == 80
        with pytest.raises(CapacityError, match="rank 0 has 90 tokens, the agreed tokens_per_rank is 80"):
            self.CAPACITY.agree([90, 65], 80, cut=True)

    def test_over_capacity_names_knob_value_need_and_bytes(self) -> None:
        with pytest.raises(CapacityError, match=r"rank 1 has 65 .* 64: set RuntimeConfig.max_tokens_per_rank >= 65"):
            self.CAPACITY.agree([3, 65], 0)
        with pytest.raises(CapacityError, match=r"tokens_per_rank is 80.*80,000 bytes a rank"):
            check_rows(80, self.CAPACITY, capturing=False, cut=False)


def test_versions_compare_as_numbers() -> None:
    order = ["0.6", "0.6.2", "0.6.18rc1", "0.7.2.post1", "0.10.0+cu130", "1.2"]
    assert sorted(order, key=version_key) == order


def test_a_requirement_names_the_fix() -> None:
    missing = Requirement("no_such_module_here", ("no-such",), "1.0").check()
    assert not missing
    assert missing.reason == "no_such_module_here is not installed: pip install 'no-such>=1.0'"
    old = Requirement("torch", ("torch",), "999.0").check()
    assert not old
    assert "is older than 999.0" in old.reason
    new = Requirement("torch", ("torch",), "2.0", below="2.1").check()
    assert not new
    assert "no longer has what is called here: pip install 'torch>=2.0,<2.1'" in new.reason
    assert Requirement("torch", ("torch",), "2.0").check()
    assert Requirement("torch", ("torch",), "2.0", below="999.0").check()


def test_whole_numbers_are_rounded_up() -> None:
    for n in range(1, 300):
        assert next_power_of_2(n) == 2 ** math.ceil(math.log2(n))
        assert [ceil_div(n, b) for b in (1, 2, 7, 256)] == [math.ceil(n / b) for b in (1, 2, 7, 256)]
        assert [round_up(n, b) for b in (1, 2, 7)] == [next(m for m in range(n, 400) if m % b == 0) for b in (1, 2, 7)]
    assert ceil_div(0, 8) == 0
    assert next_power_of_2((1 << 40) + 1) == 1 << 41

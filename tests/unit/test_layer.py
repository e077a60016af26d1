"""The layer's refusals: what is wrong on one rank is the same typed error on all, and leaves the layer usable."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.builders import told_alike
from support.cases import expert_cases as cases
from support.jobs import layer_jobs as jobs
from torch._subclasses.fake_tensor import FakeTensorMode

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.dispatch.call import check_hidden, check_output
from eprt.errors import CapacityError, ConfigError, InputError, UsageError
from eprt.layer import ExpertParallelMoE
from eprt.layer.slots import ChosenSlots, Slices
from eprt.placement import ExpertLoad, ExpertPlacement
from eprt.tokens import TopK
from eprt.world import World

COUNTED = {"count_load": True}

# kind -> what every rank must be told, and how the layer is built.
REFUSED = {
    "no_tensor": ("InputError: rank 1: hidden_states is a list", {}),
    "routing_of_another_kind": ("InputError: rank 1: routing is a tuple", {}),
    "topk_ids_that_are_a_list": ("InputError: rank 1: topk_ids is list", {}),
    "logits_that_are_a_list": ("InputError: rank 1: router logits is list", {}),
    "nested": ("InputError: rank 1: hidden_states is a nested tensor", {}),
    "sparse": ("InputError: rank 1: hidden_states is (4, 16) torch.float32", {}),
    "sparse_ids": ("InputError: rank 1: topk_ids is a torch.sparse_coo tensor: expected a dense one", COUNTED),
    "sparse_weights": ("InputError: rank 1: topk_weights is a torch.sparse_coo tensor: expected a dense one", COUNTED),
    "nested_ids": ("InputError: rank 1: topk_ids is a nested tensor: expected a dense one", COUNTED),
    "sparse_logits": ("InputError: rank 1: router logits is a torch.sparse_coo tensor", COUNTED),
    "sparse_token_ids": ("InputError: rank 1: token_ids is a torch.sparse_coo tensor", COUNTED),
    "ids_on_meta": ("InputError: rank 1: topk_ids is on meta", COUNTED),
    "logits_on_meta": ("InputError: rank 1: topk_ids is on meta", COUNTED),
    "whole_numbers_as_logits": ("InputError: rank 1: router logits", COUNTED),
    "complex_logits": ("InputError: rank 1: router logits", COUNTED),
    "no_router": ("InputError: rank 1: the layer has no router", {"router": False}),
    "routing_for_more_tokens": ("InputError: rank 1: topk_ids is (5, 2)", {"attention_tp": 2}),
    "routing_for_fewer_tokens": ("InputError: rank 1: topk_ids is (3, 2)", {"attention_tp": 2}),
    "logits_for_more_tokens": ("InputError: rank 1: router logits is (5, 8)", {"attention_tp": 2}),
    "logits_for_other_experts": ("InputError: rank 1: router logits is (4, 7)", {}),
    "token_ids_for_more_tokens": ("InputError: rank 1: token_ids must be a tensor of 4 ids", {}),
    "bf16_for_a_float32_shared_expert": (
        "InputError: rank 1: hidden_states is (4, 24) torch.bfloat16",
        {"latent": True},
    ),
    "other_number_of_group_tokens": (
        "WorldMismatch: the ranks disagree about this call (group_tokens)",
        {"attention_tp": 2},
    ),
    "agreed_is_text": ("InputError: rank 1: tokens_per_rank '4': expected an int", {"attention_tp": 2}),
    "agreed_is_a_fraction": ("InputError: rank 1: tokens_per_rank 4.5: expected an int", {}),
    "agreed_is_true": ("InputError: rank 1: tokens_per_rank True: expected an int", {}),
    "agreed_is_less_than_a_group_has": (
        "CapacityError: rank 1: hidden_states holds 4 tokens, the agreed tokens_per_rank is 3: pass "
        "tokens_per_rank >= 4",
        {"attention_tp": 2},
    ),
    "agreed_over_a_groups_capacity": (
        "CapacityError: rank 1: tokens_per_rank is 65, 33 for each of 2 attention-TP ranks, over the capacity of 32",
        {"attention_tp": 2, "strict_capacity": True},
    ),
    "agreed_over_int64": ("InputError: rank 1: tokens_per_rank 9223372036854775808: expected at most 2^31 - 1", {}),
}


# What rank 1 has that isn't as the config says, and what every rank must be told.
UNBUILDABLE = [
    ("executor", "UnsupportedError: rank 1: no dispatcher/executor pair can run this layer"),
    ("router", "ConfigError: rank 1: the router has (experts, hidden, top_k)"),
    ("routing", "ConfigError: rank 1: the router has Routing(method='softmax_topk', renormalize=False"),
    ("weights", "ConfigError: rank 1: gate_up"),
    ("layer", "ConfigError: rank 1: layer 'a': expected the layer's number"),
    ("experts_none", "ConfigError: rank 1: experts is NoneType: expected ExpertWeights"),
    ("order_list", "ConfigError: rank 1: hidden_order: expected each of 16 columns of the hidden states once"),
    ("order_meta", "ConfigError: rank 1: hidden_order: expected each of 16 columns of the hidden states once"),
    ("matrix_list", "ConfigError: rank 1: down.data is list: Dense weights need a tensor"),
    ("shared_width", "ConfigError: rank 1: shared.down is (24, 7): the config says (24, 8)"),
    ("shared_gate", "ConfigError: rank 1: shared.gate is missing: expected a tensor (8, 24)"),
    ("shared_output_gate", "ConfigError: rank 1: shared.output_gate is given: the config has none"),
    ("shared_dtype", "ConfigError: rank 1: shared.down is torch.bfloat16: expected torch.float32, as the others"),
    ("shared_half", "ConfigError: rank 1: shared.up is torch.float16: expected bfloat16 or float32"),
    ("shared_dict", "ConfigError: rank 1: shared is dict: expected SharedExpertWeights"),
    ("shared_list", "ConfigError: rank 1: shared.up is list: expected a tensor (8, 24)"),
    ("shared_meta", "ConfigError: rank 1: shared.up is on the meta device, which holds no numbers: load the weights"),
    ("router_meta", "ConfigError: rank 1: router weight is on the meta device, which holds no numbers: load the"),
    ("shared_alone", "ConfigError: rank 1: the shared expert takes torch.bfloat16 tokens, the latent projection takes"),
    ("latent_swapped", "ConfigError: rank 1: latent.into is (24, 16): the config says (16, 24)"),
    ("latent_bias", "ConfigError: rank 1: latent.out_of_bias is (16,): the config says (24,)"),
    ("latent_dict", "ConfigError: rank 1: latent is dict: expected LatentWeights"),
    ("latent_dtype", "ConfigError: rank 1: latent.out_of is torch.bfloat16: expected torch.float32, as the others"),
]


@pytest.mark.parametrize("kind", REFUSED | jobs.BAD)
def test_a_bad_call_on_one_rank_is_the_same_error_on_all(pools, kind: str) -> None:
    says, layer = REFUSED[kind]
    assert told_alike(pools(4).run(jobs.one_bad_rank, kind=kind, **layer)).startswith(says)


def test_of_two_errors_everybody_hears_that_of_the_lower_rank(pools) -> None:
    assert told_alike(pools(4).run(jobs.two_bad_ranks)).split(":")[1] == " rank 1"


def test_a_long_text_is_cut_at_a_whole_character(pools) -> None:
    (told,) = set(pools(2).run(jobs.long_error))
    assert told == "InputError: rank 1: " + "x" * 2034 + "\N{SNOWMAN}"


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
@pytest.mark.parametrize("change", jobs.OUTPUTS)
def test_an_executor_that_returns_something_else_is_named_on_all_ranks(pools, dispatcher: str, change: str) -> None:
    told = told_alike(pools(2).run(jobs.bad_expert_output, dispatcher=dispatcher, change=change))
    assert told.startswith("InputError: rank 1: expert_output is ")


@pytest.mark.parametrize(
    ("other", "differing", "values"),
    [
        ({"max_tokens_per_rank": 64}, "max_tokens_per_rank", [["32"], ["64"]]),
        ({"payload": "fp8_block"}, "payload", [["None"], ["fp8_block"]]),
        ({"dispatcher": "none"}, "dispatcher", [["torch"], ["none"]]),
        ({"validate": "full"}, "validate", [["cheap"], ["full"]]),
        (
            {"max_tokens_per_rank": 64, "payload": "fp8_block"},
            "max_tokens_per_rank, payload",
            [["32", "None"], ["64", "fp8_block"]],
        ),
    ],
)
def test_ranks_that_build_differently_are_told_which_settings_differ(pools, other, differing, values) -> None:
    """Before any memory is sized from them, and the next layer can be built."""
    title, header, *ranks = told_alike(pools(2).run(jobs.built_differently, other=other)).splitlines()
    assert title.startswith(f"WorldMismatch: the ranks disagree about this call (fingerprint, {differing})")
    assert header.split() == ["rank", "fingerprint", *differing.split(", ")]
    assert [row.split()[2:] for row in ranks] == values


@pytest.mark.parametrize(("change", "says"), UNBUILDABLE)
def test_a_layer_that_one_rank_cannot_build_is_refused_on_all(pools, change, says) -> None:
    assert told_alike(pools(2).run(jobs.unbuildable_on_rank_1, change=change)).startswith(says)


def test_every_spoiled_weight_is_tested() -> None:
    assert set(jobs.SPOILED) < {change for change, _ in UNBUILDABLE}


def test_a_closed_layer_is_the_first_thing_wrong_on_every_rank(pools) -> None:
    found = pools(2).run(jobs.closed_layer_with_bad_input, timeout_s=20)
    assert found == ["UsageError: torch: the dispatcher is closed; make a new one"] * 2


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (jobs.closed_on_one_rank, "UsageError: rank 1: torch: the dispatcher is closed"),
        (jobs.combined_again_on_one_rank, "UsageError: rank 1: combine on a handle that is already combined"),
        (
            jobs.unnumbered_layers_in_another_order,
            "WorldMismatch: the ranks disagree about this call (fingerprint, dispatchers_before)",
        ),
        (jobs.warmed_up_on_one_rank, "WorldMismatch: the ranks disagree about this call (operation)"),
        (
            jobs.refused_on_rank_1,
            "ConfigError: rank 1: torch: combine_payload fp8: brings outputs back in the tokens' own format only",
        ),
    ],
)
def test_what_one_rank_does_otherwise_is_the_same_error_on_all(pools, job, says: str) -> None:
    assert told_alike(pools(2).run(job, timeout_s=20)).startswith(says)


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
def test_experts_outputs_may_lie_column_by_column(pools, dispatcher: str) -> None:
    assert pools(2).run(jobs.output_by_columns, dispatcher=dispatcher) == [True] * 2


def test_a_layer_that_was_cast_takes_tokens_of_its_new_dtype_alone(pools) -> None:
    for rank, (told, error, told_of_half) in enumerate(pools(2).run(jobs.cast_layer)):
        assert told.endswith("the shared expert takes torch.bfloat16 tokens; use hidden_states.to(torch.bfloat16)"), (
            rank
        )
        assert error < 2e-2, "bf16 instead of float32"
        assert told_of_half.endswith("the shared expert takes torch.float16 tokens; use layer.to(torch.bfloat16)"), rank


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
def test_tokens_that_require_grad_and_autocast_on_one_rank_change_nothing(pools, dispatcher: str) -> None:
    assert pools(2).run(jobs.grads_and_autocast_on_rank_1, dispatcher=dispatcher) == [(True, True)] * 2


@pytest.mark.parametrize("dispatcher", ["none", "torch"])
@pytest.mark.parametrize(
    ("attention_tp", "latent", "counts", "rounds"),
    [
        (1, False, [0, 9, 3, 4], 3),
        (1, True, [17, 0, 0, 0], 5),
        (1, False, [4, 0, 1, 4], 1),
        (1, False, [0, 0, 0, 0], 1),
        (2, True, [9, 17], 3),
        (2, False, [0, 8], 1),
    ],
)
def test_a_batch_over_the_capacity_is_cut(pools, attention_tp, latent, counts, rounds, dispatcher) -> None:
    """ceil(R / capacity) rounds on every rank, idle ones too; the shared expert runs once, on the whole."""
    found = pools(4).run(
        jobs.cut_batches, counts=counts, attention_tp=attention_tp, latent=latent, dispatcher=dispatcher
    )
    assert [seen for _, seen in found] == [[(rounds, rounds, 1, 1)]] * 4
    assert max(error for error, _ in found) < 1e-5


def test_token_ids_go_with_their_tokens_through_all_rounds(pools) -> None:
    assert max(pools(2).run(jobs.cut_hash_routing)) < 1e-5


@pytest.mark.parametrize(
    ("top_k", "sizes", "padded"), [(3, None, 3), (3, DISPATCHERS["flashinfer"].top_k_sizes, 4), (4, (1, 4), 4)]
)
def test_the_top_k_is_the_dispatchers(monkeypatch, top_k, sizes, padded):
    config = cases.make_config("f32", top_k=top_k)
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=24)
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)
        told = []
        monkeypatch.setattr(layer.executor, "warmup", lambda *given: told.append(given))
        monkeypatch.setattr(layer.dispatcher, "spec", replace(layer.dispatcher.spec, top_k_sizes=sizes))
        world.warmup(layer)
    assert told == [(24, padded)]


def test_routing_is_warmed_up_for_the_models_experts_not_for_slots(monkeypatch):
    config = cases.make_config("f32")
    slots = (*range(config.num_experts), 0, 1)  # two experts twice
    weights = cases.make_weights(config).map(lambda tensor: torch.cat([tensor, tensor[:2]]))
    told = []
    monkeypatch.setattr("eprt.layer.warming.warmup_routing", lambda config, *_, **__: told.append(config))
    with World.from_env("cpu") as world:
        placement = ExpertPlacement(config.num_experts, world.parallel, slots)
        runtime = RuntimeConfig(executor="reference")
        layer = ExpertParallelMoE(config, world, weights, runtime=runtime, placement=placement)
        assert layer.dispatcher.config.num_experts == len(slots)
        world.warmup(layer)
    assert told == [config]


def test_a_bucket_over_a_strict_capacity_refuses_no_batch_within_it():
    """Buckets are the World's: graphs of other layers may have larger ones."""
    config = cases.make_config("f32")
    hidden, ids = torch.ones(7, config.hidden_size), torch.zeros(7, config.top_k, dtype=torch.int32)
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=6, strict_capacity=True)
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)
        world.add_buckets((8,))
        with world.step(5):
            assert layer(hidden[:5], TopK(ids[:5], ids[:5].float())).shape == (5, config.hidden_size)
        with world.step(7), pytest.raises(CapacityError, match="tokens_per_rank is 7 tokens, over the capacity of 6"):
            layer(hidden, TopK(ids, ids.float()))
        world.add_buckets((256,))
        graphed = replace(runtime, max_tokens_per_rank=200, layer_graphs=True)
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=graphed)
        hidden, ids = torch.ones(190, config.hidden_size), torch.zeros(190, config.top_k, dtype=torch.int32)
        assert layer(hidden, TopK(ids, ids.float()), tokens_per_rank=190).shape == hidden.shape
        with pytest.raises(CapacityError, match="tokens_per_rank is 201 tokens, over the capacity of 200"):
            layer(hidden, TopK(ids, ids.float()), tokens_per_rank=201)


@pytest.mark.parametrize("capturing", [False, True])
def test_ids_are_not_read_while_a_graph_is_captured(capturing, monkeypatch):
    """On a device whose numbers can't be read."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(ExpertLoad, "add", lambda *_: None)
    world: Any = SimpleNamespace(device=torch.device("meta"), rank=0, padding=None, parallel=ParallelConfig())
    config = cases.make_config()
    how = {"one_replica": False, "count_load": True}
    slots = ChosenSlots(config, world, Slices(world), ExpertPlacement(4, ParallelConfig()), **how)
    chosen = TopK(torch.zeros(4, 2, dtype=torch.int32, device="meta"), torch.zeros(4, 2, device="meta"))
    with nullcontext() if capturing else pytest.raises(RuntimeError, match="meta tensors"):
        assert slots.of(chosen, 4, check_values=True) is chosen


@pytest.mark.parametrize("index", [0, 1])
def test_tensors_on_another_gpu_of_the_process_are_refused(index: int) -> None:
    """A kernel on this GPU would read that one's memory before it is written. No GPU is needed to name one."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, ids = torch.empty(2, 4, device="cuda:1"), torch.empty(2, 1, dtype=torch.int32, device="cuda:1")
    here: Any = torch.device("cuda", index)
    world: Any = SimpleNamespace(device=torch.device("meta"), rank=0, padding=None, parallel=ParallelConfig())
    slots = ChosenSlots(
        cases.make_config(top_k=1), world, Slices(world), ExpertPlacement(4, ParallelConfig()), one_replica=False,
        count_load=True,
    )  # fmt: skip
    world.device = here
    for check in (
        lambda: check_hidden(hidden, 4, here, meaning="the model's hidden", flat=True),
        lambda: check_output(hidden, (2, 4), here),
        lambda: slots.of(TopK(ids, ids.view(torch.float32)), 2, check_values=False) if index == 0 else None,
    ):
        with nullcontext() if index == 1 else pytest.raises(InputError, match=r"on cuda:1: .*on cuda:0"):
            check()


def test_a_placement_in_another_world_is_named():
    config = cases.make_config("f32")
    with World.from_env("cpu") as world:
        placement = ExpertPlacement(config.num_experts, ParallelConfig(2))
        with pytest.raises(ConfigError, match=r"sizes \(2, 1\), the world has \(1, 1\): make it with world.parallel"):
            ExpertParallelMoE(config, world, cases.make_weights(config), placement=placement)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_layer_cannot_be_copied(copied) -> None:
    """In a world of one, compiled code of a copy called the original."""
    config = cases.make_config("f32")
    with World.from_env("cpu") as world:
        layer = ExpertParallelMoE(
            config, world, cases.make_weights(config), runtime=RuntimeConfig(executor="reference")
        )
        with pytest.raises(UsageError, match="a World, and what holds one, as layers do, can't be copied or pickled"):
            copied(layer)


def test_a_layer_that_missed_the_warm_up_is_refused_and_works_after_one():
    config = cases.make_config("f32")
    flat = cases.make_flat(config, 3)
    hidden, topk = flat.hidden.data, TopK(flat.ids, flat.weights)
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=24)
        early, used, late = (
            ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime, layer=layer)
            for layer in range(3)
        )
        assert not early.state_dict(), "experts are as the executor reads them"
        used(hidden, topk)
        world.warmup(early)
        for layer in (early, used):
            assert layer(hidden, topk).shape == hidden.shape
        with pytest.raises(UsageError, match=r"first call of a layer after World\.warmup"):
            late(hidden, topk)
        world.warmup(late)
        assert torch.equal(late(hidden, topk), early(hidden, topk))


def test_none_and_torch_grouped(pools) -> None:
    """On the pretended GPU `test_host_cost.py` counts them for symm and triton_grouped."""
    for files in pools(2).run(jobs.files_entered):
        assert len(files) <= 20, files

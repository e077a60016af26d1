"""Step graphs and layer graphs on gloo ranks: everything but the capture, which tests/gpu/test_step_graphs.py has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import expert_cases as cases
from support.jobs import lost_rank_jobs
from support.jobs import step_graph_jobs as jobs
from support.jobs.conformance_jobs import PAIRS
from support.jobs.step_graph_jobs import BUCKETS, LAYERS, SCHEDULE, TOLERANCE

from eprt.config import Routing, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.graphs import LayerGraphs, StepGraphs
from eprt.graphs.recording import Pool, Recording, refusal
from eprt.layer import ExpertParallelMoE
from eprt.ranks.launcher import WorldFailed, launch
from eprt.routing import Router
from eprt.tokens import TopK
from eprt.world import World

SIZE = 4


def runtime(dispatcher: str = "none", token_format: str = "flat", **options) -> RuntimeConfig:
    return RuntimeConfig(dispatcher=dispatcher, token_format=token_format, max_tokens_per_rank=32, **options)


def padded(counts: list[int]) -> int:
    """Rows of a forward in that step: the bucket, or 0 for an eager step."""
    return next((rows for rows in BUCKETS if rows >= max(counts)), 0)


def forwards(rank: int) -> list[int]:
    """Rows of each forward that a rank's host makes: padded where a bucket fits, none where it is idle."""
    mine = [(counts[rank], padded(counts)) for counts in SCHEDULE]
    return [rows or count for count, rows in mine if count]


def check(found: list[tuple[list[list[float]], list[int], int]], dtype: torch.dtype, size: int = SIZE) -> None:
    assert len(found) == size
    for errors, *_ in found:
        assert max(max(each, default=0.0) for each in errors) <= TOLERANCE[dtype], errors
    busy = [sum(bool(each) for each in errors) for errors, *_ in found]
    assert busy == [sum(counts[rank] > 0 for counts in SCHEDULE) for rank in range(size)], "nothing compared"


@pytest.mark.parametrize(
    ("pair", "dtype"),
    [*((pair, torch.float32) for pair in PAIRS), (PAIRS[0], torch.bfloat16)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_decode_loop_gives_what_the_eager_loop_gives(pools, pair: tuple[str, str], dtype: torch.dtype) -> None:
    """Changing counts, buckets and idle ranks, with a cache that betrays a padded row which touched a live slot."""
    found = pools(SIZE).run(jobs.decode, runtime=runtime(*pair), dtype=dtype)
    check(found, dtype)
    for rank, (_, rows, slots) in enumerate(found):
        assert rows == forwards(rank), "an idle rank walks nothing, a padded batch has its bucket's rows"
        top_k = jobs.config_of(dtype).top_k
        assert slots == LAYERS * top_k * sum(counts[rank] for counts in SCHEDULE), "padded rows name no expert"


def test_a_rank_that_runs_eagerly_understands_ranks_that_do_not(pools) -> None:
    """It takes the bucket for R, as they do; its own rows aren't padded."""
    found = pools(SIZE).run(jobs.decode, runtime=runtime(), dtype=torch.float32, eager_rank=2)
    check(found, torch.float32)
    assert found[2][1] == [count for counts in SCHEDULE if (count := counts[2])]


def test_a_rank_without_an_idle_step_runs_the_forward_on_empty_rows(pools) -> None:
    found = pools(SIZE).run(jobs.decode, runtime=runtime(), dtype=torch.float32, idle=False)
    check(found, torch.float32)
    for rank, (_, rows, slots) in enumerate(found):
        assert rows == [padded(counts) or counts[rank] or BUCKETS[0] for counts in SCHEDULE]
        assert slots == LAYERS * jobs.config_of(torch.float32).top_k * sum(counts[rank] for counts in SCHEDULE)


def test_a_second_capture_leaves_the_caches_alone(pools) -> None:
    """It calls forward on rows without tokens, not on those of the step before."""
    check(pools(SIZE).run(jobs.decode, runtime=runtime(), dtype=torch.float32, captured_again=2), torch.float32)


def test_attention_tp_groups_pad_their_slices_alike(pools) -> None:
    found = pools(SIZE).run(jobs.decode, runtime=runtime(), dtype=torch.float32, attention_tp=2)
    for errors, *_ in found:
        assert max(max(each, default=0.0) for each in errors) <= TOLERANCE[torch.float32], errors
    top_k, tokens = jobs.config_of(torch.float32).top_k, [sum(counts[group] for counts in SCHEDULE) for group in (0, 1)]
    sent = [slots for *_, slots in found]
    assert [sent[0] + sent[1], sent[2] + sent[3]] == [LAYERS * top_k * count for count in tokens]


@pytest.mark.parametrize("in_steps", [True, False])
@pytest.mark.parametrize("own_rank", [-1, 1])
def test_layers_with_graphs_of_their_own_give_what_layers_without_give(pools, in_steps: bool, own_rank: int) -> None:
    """`own_rank` gives its layer a routing, so that it runs eagerly where the others replay."""
    settings = {"runtime": runtime("torch", layer_graphs=True), "dtype": torch.float32}
    found = pools(SIZE).run(jobs.decode_by_layers, **settings, in_steps=in_steps, own_rank=own_rank)
    for rank, (errors, own_errors, replays) in enumerate(found):
        assert max(errors + own_errors) <= 1e-5, "the same executor on both sides: float32 in another order"
        assert len(own_errors) == (len(SCHEDULE) if rank == own_rank else 0)
        assert replays == LAYERS * len(SCHEDULE) - len(own_errors), "R is a bucket in every step"


def test_what_step_graphs_refuse(pools) -> None:
    """The same on every rank, also where one alone is wrong; the next call works."""
    by_rank = pools(2).run(jobs.refusals)
    expected = {
        "no buckets": "ConfigError: buckets []: expected at least one positive int",
        "no inputs": "ConfigError: StepGraphs without inputs",
        "two rows": "ConfigError: input token is (2,) on cpu: expected one row, [1, ...]",
        "a row that is a list": "ConfigError: inputs['token'] [0]: expected Tensor",
        "one bucket alone": "ConfigError: buckets 4: expected a sequence of int",
        "a layer that is none": "ConfigError: layers hold ReLU: expected each ExpertParallelMoE that forward calls",
        "buckets differ": "WorldMismatch: the ranks disagree about this call (fingerprint, buckets)",
        "before capture": "UsageError: StepGraphs before capture()",
        "output of other rows": "ConfigError: forward returned (1, 3) for 4 rows: expected tensors [4, ...]",
        "output of no row in the second bucket": "ConfigError: forward returned () for 2 rows",
        "after half a capture": "UsageError: StepGraphs before capture()",
        "output of no tensor": "ConfigError: forward returned int for 4 rows",
        "another dtype on rank 1": "InputError: rank 1: input token is (3,) torch.int32: expected (3,) torch.int64",
        "a list on rank 1": "InputError: rank 1: input token is a list: expected a tensor (3,) torch.int64",
        "a row too few on rank 1": "InputError: rank 1: input position is (3,) torch.int64: expected (4,) torch.int64",
        "a missing input": "InputError: inputs are token: expected position, token",
        "more than the step was told": "InputError: a call of 3 tokens in a step that this rank began with",
        "capture in a step": "UsageError: StepGraphs.capture() inside a step",
        "a layer with some of the rows": "InputError: a layer inside a batch of 4 padded rows got 2",
        "the next call": "True",
        "after close": "UsageError: StepGraphs after its world or a layer was closed",
    }
    for found in by_rank:
        assert found.keys() == expected.keys()
        for what, said in expected.items():
            # The rank whose own input is wrong names no rank where it raises by itself.
            assert said.replace("rank 1: ", "") in found[what].replace("rank 1: ", ""), (what, found[what])


def test_inputs_that_require_gradients_leave_none_behind() -> None:
    """In place, each step would hang another node onto the graph of the inputs that stay."""
    with World.from_env("cpu") as world:
        doubled = torch.nn.Linear(3, 3)
        graphs = StepGraphs(world, [], lambda x: doubled(x), {"x": torch.zeros(1, 3)}, buckets=(1, 4))
        graphs.capture()
        x = torch.ones(2, 3, requires_grad=True)
        for num_tokens in (2, 1):
            assert not graphs(num_tokens, x=x[:num_tokens]).requires_grad
        assert not graphs._inputs["x"].requires_grad


def test_the_calls_of_a_capture_that_broke_off_are_no_steps() -> None:
    """The next step would compare them with those of ranks that broke off elsewhere."""
    config = cases.make_config("f32")
    with World.from_env("cpu") as world:
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=RuntimeConfig())

        def forward(x: torch.Tensor) -> torch.Tensor:
            ids = torch.zeros(len(x), config.top_k, dtype=torch.int32)
            layer(x, TopK(ids, ids.float()))
            raise RuntimeError("operation not permitted")

        graphs = StepGraphs(world, [layer], forward, {"x": torch.zeros(1, config.hidden_size)}, buckets=(1,))
        with pytest.raises(RuntimeError, match="not permitted"):
            graphs.capture()
        assert not world.take_call_log().calls


def test_a_capture_takes_the_smaller_buckets_of_other_graphs() -> None:
    """R may be rounded up to one of those. Before that capture such a step is run eagerly, on rows that aren't
    padded."""
    config, rows = cases.make_config("f32"), list[int]()
    with World.from_env("cpu") as world:
        runtime = RuntimeConfig(executor="reference", max_tokens_per_rank=8)
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            ids = torch.zeros(len(x), config.top_k, dtype=torch.int32)
            return layer(x, TopK(ids, ids.float()))

        row = {"x": torch.zeros(1, config.hidden_size)}
        many, few = (StepGraphs(world, [layer], forward, row, buckets=buckets) for buckets in ((8,), (1, 4)))

        def rows_of(call: Callable[[], Any]) -> list[int]:
            rows.clear()
            call()
            return list(rows)

        def step(num_tokens: int) -> torch.Tensor:
            return many(num_tokens, x=torch.ones(num_tokens, config.hidden_size))

        assert rows_of(many.capture) == [8]
        assert rows_of(few.capture) == [4, 1]
        assert rows_of(lambda: step(0)) == [1]
        assert rows_of(lambda: step(3)) == [3]
        assert rows_of(many.capture) == [8, 4, 1]
        assert rows_of(lambda: step(0)) == [1]
        assert rows_of(lambda: step(3)) == [4]
        assert step(0).shape == (0, config.hidden_size)
        assert step(3).shape == (3, config.hidden_size)


class _Layer:
    """What `refusal` reads of a layer."""

    def __init__(self, dispatcher: str, executor: str, full: bool = False) -> None:
        self.plan = type("Plan", (), {"dispatcher": dispatcher, "executor": executor})()
        self.dispatcher = type("Dispatcher", (), {"full_validation": full})()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_pair_is_captured_or_refused_as_its_rows_say(dispatcher: str, executor: str) -> None:
    reason = refusal(_Layer(dispatcher, executor))
    assert (dispatcher in reason) is not DISPATCHERS[dispatcher].graph_safe
    assert (executor in reason) is not EXECUTORS[executor].graph_safe
    assert 'validate="full"' in refusal(_Layer(dispatcher, executor, full=True))


def test_a_rank_lost_in_a_step_is_named() -> None:
    """Within LIMIT_S of its end, which its peers see. The Worlds' own patience is longer: four ranks that build layers
    on a busy machine are silent for seconds."""
    patience_s = 4 * lost_rank_jobs.LIMIT_S
    settings = {"runtime": runtime(), "victim": lost_rank_jobs.VICTIM, "limit_s": patience_s, "waits": True}
    with pytest.raises(WorldFailed) as failure:
        launch(jobs.lost_in_replay, SIZE, grace_s=lost_rank_jobs.LIMIT_S + 2, **settings)
    assert lost_rank_jobs.unheard(failure.value, may_exit=False) == []


def test_a_capture_after_a_step_in_which_one_rank_replayed_and_another_did_not(pools) -> None:
    """What the hosts called in that step differs; the next step compares neither that nor the capture's own calls."""
    assert pools(2).run(jobs.captured_after_unequal_calls) == [True, True]


def test_a_world_closes_before_its_graphs() -> None:
    assert launch(jobs.closes_before_its_graphs, 2, runtime=runtime()) == ["UsageError"] * 2


@pytest.mark.parametrize("router", ["none", "hash", "float32"])
def test_layer_graphs_record_only_calls_that_the_layer_takes(monkeypatch: pytest.MonkeyPatch, router: str) -> None:
    """None where a call has to bring its routing or token ids; with a router that takes float32, those of float32."""
    monkeypatch.setattr(Pool, "shared", lambda _: Pool)  # else nothing is called on CPUs
    monkeypatch.setattr(Recording, "of", lambda call, *_: Recording(call))
    config, own, given = cases.make_config("f32"), None, None
    K, E, H = config.top_k, config.num_experts, config.hidden_size
    if router == "none":
        given = TopK(torch.zeros(3, K, dtype=torch.int32), torch.ones(3, K))
    else:
        table = {"token_table": torch.arange(K)[None]} if router == "hash" else {}
        config = replace(config, routing=Routing("hash" if table else "softmax_topk"))
        own = Router(torch.zeros(E, H), config.routing, K, **table)
    runtime = RuntimeConfig(dispatcher="none", executor="reference", layer_graphs=True)
    with World.from_env("cpu") as world:
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime, router=own)
        world.warmup(layer)
        ids = torch.zeros(3, dtype=torch.int64)
        assert layer(torch.ones(3, H), given, token_ids=ids, tokens_per_rank=3).isfinite().all()
        assert bool(layer.graphs._captured) is (router == "float32")


def test_a_step_over_the_largest_bucket_has_its_inputs_where_graphs_have_theirs() -> None:
    with World.from_env("cpu") as world:
        graphs = StepGraphs(world, [], lambda x: x, {"x": torch.zeros(1, 3)}, buckets=(1,))
        graphs.capture()
        world.device = torch.device("meta")
        assert graphs(2, x=torch.ones(2, 3)).is_meta


class OneRank:
    """What graphs ask of a World."""

    device, generation, padding = torch.device("cpu"), 0, None

    def resource(self, _: Any, make: Callable[[], Any]) -> Any:
        return make()

    def add_buckets(self, _: Any) -> None: ...

    def raise_if_lost(self) -> None: ...

    def finish_device_work(self, check: Callable[[], None]) -> None: ...


def test_garbage_lends_its_memory_to_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a pool up with its last graph; to capture into it afterwards fails an assertion inside torch."""
    handles = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(Pool, "of", classmethod(lambda cls, _: cls()))
    monkeypatch.setattr(Recording, "of", classmethod(lambda cls, call, pool, _: cls(call, pool)))
    world: Any = OneRank()
    layer: Any = SimpleNamespace(dispatcher=None)

    def captured() -> Any:
        graphs = LayerGraphs(world, layer, lambda x, _: x, width=8, capacity=4)
        graphs.capture()
        return graphs

    def pools_of(graphs: Any) -> set[int]:
        return {recording.pool.handle for recording in graphs._captured.values()}

    first, second = captured(), captured()
    assert pools_of(first) == pools_of(second) == {0}, "layers of a World share"
    first.itself, second.itself = first, second
    del first, second
    assert pools_of(captured()) == {1}

"""The plugin's hook, on two gloo ranks, in a stand-in for vLLM: what a layer goes through from its making on."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import torch
from support.jobs import vllm_jobs as jobs
from support.ports import free_port
from support.processes import run_python
from support.stand_ins.vllm import host

from eprt.config import ParallelConfig
from eprt.errors import ConfigError, UsageError
from eprt.integrations.engine import balancing
from eprt.integrations.engine.ranks import EXIT_S
from eprt.integrations.engine.settings import placement_of
from eprt.integrations.engine.sleeping import Kept
from eprt.integrations.vllm import _share_handlers, register
from eprt.integrations.vllm.state import PluginState
from eprt.integrations.vllm.supported import balance_options
from eprt.integrations.vllm.worker import watch_config, watch_worker
from eprt.layer import ExpertParallelMoE
from eprt.placement import EMPTY, ExpertPlacement
from eprt.placement.file import PlacementFile


def wanted(layer: int, rank: int) -> torch.Tensor:
    """The formula of a SwiGLU expert in float64, from all ranks' experts."""
    return jobs.formula(layer, *jobs.tokens(rank))


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    # Inputs are exact; bf16 holds the inner values, the sums and the output: three roundings of 2^-9.
    torch.testing.assert_close(found.double(), want, rtol=0, atol=float(want.abs().max()) * 3 * 2**-8)


def test_a_layer_from_its_making_to_its_call(pools) -> None:
    for rank, found in enumerate(pools(2).run(jobs.two_layers)):
        for layer, output in enumerate(found["outputs"]):
            close(output, wanted(layer, rank))
        for padded in (found["padded"], found["split"]):  # rows that vLLM marks as padding reach no expert
            close(padded[:1], wanted(0, rank)[:1])
            assert not padded[1:].any()
        assert found["classes"] == ["UnquantizedFusedMoEMethod"] * 2  # vLLM's weight loaders go by the name
        assert found["monolithic"] is False
        assert found["ids"] == torch.int32
        assert found["left_in_vllm"] == 0  # vLLM's copies of the experts are gone
        assert found["cold"] == 2
        assert found["warm"] == (0, True)  # one warm-up, at the first call, for both
        close(found["again"], wanted(0, rank))
        assert found["float16"].dtype == torch.float16
        assert torch.equal(found["float16"].float(), found["again"].half().float())  # these tokens are both numbers'
        assert found["monolithic_call"].startswith("UsageError")
        assert found["left"] == ["NotImplementedError: no kernel on this machine"] * 2
        assert list(found["reasons"].values()) == [["layers.3"]] * 2
        assert "MoeWNA16Method" in next(iter(found["reasons"]))
        assert "its method isn't made without a kernel of vLLM's: another kernel is needed" in found["reasons"]


def test_gates_of_layers_that_eprt_runs_are_eprts(pools) -> None:
    """The experts compute with what eprt has chosen; batch-invariant layers keep vLLM's choice. What vLLM compiled with
    a gate in its graph has another key than what it compiles without."""
    for rank, found in enumerate(pools(2).run(jobs.routed)):
        assert found["gates"] == {False: [True, True, False], True: [False, False, False]}
        assert found["compiled"] == {False: ["layers.1"], True: None}
        hidden, _, _ = jobs.tokens(rank)
        for number in (0, 1):
            layer = found[number]
            close(layer["output"], jobs.formula(number, hidden, layer["weights"], layer["ids"]))
        assert torch.equal(found[0]["ids"], found[1]["ids"])
        assert torch.equal(found["padded"][:1], found[0]["ids"][:1])
        assert (found["padded"][1:] == jobs.E).all()  # no expert


@pytest.mark.parametrize("placed", [False, True])
def test_new_weights_come_into_a_layer_in_every_way_that_vllm_has(pools, placed: bool, tmp_path: Path) -> None:
    """Layerwise reload, and a trainer's own `load_weights` into freed parameters: whole, copied, single experts, one
    half."""
    path = str(tmp_path / "placement.json") if placed else ""
    if placed:
        PlacementFile(jobs.E, 2, {3: (7, 6, 5, 4, 4, 0, 3, 2, 1, 0, 7, EMPTY)}).write(path)
    for rank, found in enumerate(pools(2).run(jobs.reloaded, path=path)):
        for number, output in enumerate(found["outputs"]):
            close(output, wanted(number, rank))
        assert len(found["outputs"]) == (5 if placed else 6)
        assert "a part wasn't loaded (local expert 0: w13_weight); load whole experts" in found["first"]
        assert found["stayed"]
        assert found["freed"] == 0
        assert "of 1 experts a part wasn't loaded (local expert 0: w13_weight (w3)); load whole" in found["lacking"]
        assert ("rank 1: " in found["lacking"]) == placed  # the others have theirs, and wait for no one
        assert found["then"] == found["lacking"]
        assert found["call"].startswith("UsageError: model.layers.3.mlp.experts holds old weights")


def test_what_sleep_takes_comes_back_with_new_weights(pools, tmp_path: Path) -> None:
    """Twice, all tensors that a layer's loading made are overwritten; slots and counters are as they were."""
    path = str(tmp_path / "placement.json")
    PlacementFile(jobs.E, 2, {3: (7, 6, 5, 4, 4, 0, 3, 2, 1, 0, 7, EMPTY)}).write(path)
    for rank, found in enumerate(pools(2).run(jobs.slept, path=path)):
        for output in found["outputs"]:
            close(output, wanted(0, rank))
        assert found["said"] == ["UsageError: layer 0: its experts were given away (sleep level 2): load all weights "
                                 "before the next call"] * 2  # fmt: skip
        assert found["counted"] == 3 * jobs.TOKENS[rank] * jobs.K
        assert found["lost"] > 5


@pytest.mark.parametrize(
    ("offloaded", "lost"),
    [(("weights", "runtime"), False), ("weights", False), (("kv_cache",), True), ((), True), (None, True)],
)
def test_sleep_past_the_worker_is_noticed(monkeypatch: pytest.MonkeyPatch, offloaded: Any, lost: bool) -> None:
    """SkyRL's `skyrl_sleep_for_weight_sync` has the allocator discard weights; the worker's own `sleep` does, too."""
    allocator = type("CuMemAllocator", (), {"sleep": lambda *_, **__: None, "wake_up": lambda *_: None})
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=allocator))
    allocator.get_instance = lambda: SimpleNamespace(pointer_to_data={})
    tensor, layer = torch.ones(1), Mock()
    monkeypatch.setattr(Kept, "save", lambda kept, *_: kept._copies.append((tensor, tensor.clone())))
    state = PluginState()
    state.built.append(layer)
    watch_worker(state)
    allocator().sleep(offload_tags=offloaded)
    assert layer.refuse_calls.called == lost
    tensor.zero_()
    allocator().wake_up(["kv_cache"])
    assert tensor.item() == 0
    allocator().wake_up(["weights"])
    assert tensor.item() == float(lost)


def test_a_trainers_worker_is_told_once_how_experts_come(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """NeMo-RL's reshard and prime-rl's kernel format write into parameters, and fail with a shape of (0,)."""
    current = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls="trainer.Extension"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(get_tp_group=Mock))
    for name in ("runtime_config", "gathered_ranks", "require_lost_in_sleep", "captures_graphs"):
        monkeypatch.setattr(f"eprt.integrations.vllm.state.{name}", Mock())
    monkeypatch.setattr("eprt.integrations.vllm.state._current", lambda: current)
    state = PluginState()
    monkeypatch.setattr(state, "reports", lambda: True)
    monkeypatch.setattr(state, "bind_layer", lambda *_, **__: state.bindings.append(Mock()))
    with caplog.at_level(logging.INFO, logger="vllm.eprt"):
        for name in ("layers.0", "layers.1"):
            state.bind(name, Mock(), Mock())
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("eprt: trainer.Extension can send experts through `model.load_weights` or vLLM's reload")


def test_a_model_without_its_experts_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Mock()
    worker = type("Worker", (), {"save_sharded_state": lambda _, path: saves(path)})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=worker))
    state = PluginState()
    watch_worker(state)
    worker().save_sharded_state("dense")
    state.built.append(Mock())
    with pytest.raises(UsageError, match=r"experts of 1 layers, .*VLLM_PLUGINS=none"):
        worker().save_sharded_state("experts")
    saves.assert_called_once_with("dense")


def test_an_engine_that_ends_in_its_process_leaves_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends the worker of an `LLM` that is deleted (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), perhaps after the next has
    begun, and frees its model."""
    wrapper = type("WorkerWrapperBase", (), {"init_device": lambda _: None, "shutdown": lambda _: None})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", SimpleNamespace(WorkerWrapperBase=wrapper))
    state = PluginState()
    watch_config(state.begin, state.end)
    first, second = wrapper(), wrapper()
    for worker in (first, second):
        worker.vllm_config = host(device_config=SimpleNamespace(device_type="cuda"))
        worker.init_device()
    state.built.append(Mock())
    first.shutdown()
    assert state.built
    second.shutdown()
    assert not state.built


def test_a_process_that_shares_memory_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Mock()
    worker = type("Worker", (), {"checkpoint_prepare": lambda _: stores()})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=worker))
    state = PluginState()
    watch_worker(state)
    for sizes, stored in (((), 1), ((1,), 2), ((1, 4), 2)):
        state.worlds = {size: Mock(size=size) for size in sizes}
        with pytest.raises(UsageError, match="with 3 others") if 4 in sizes else nullcontext():
            worker().checkpoint_prepare()
        assert stores.call_count == stored


def test_vllms_weight_checker_sees_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of each, of new weights too; a reset leaves none of the old ones."""
    kinds = {"compute_weight_checksums": lambda _: {"dp0:norm": "1"}, "reset_weights": lambda _: None}
    kinds |= {"_weight_checksum_prefix": lambda _: "dp0:", "get_model": lambda _: model}
    worker = type("Worker", (), kinds)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=worker))
    model, experts, layer, state = torch.nn.Linear(1, 1), {"down": torch.ones(2, 3)}, Mock(broken=""), PluginState()
    layer.executor.slot_tensors.return_value = experts
    model.quant_method = SimpleNamespace(eprt=SimpleNamespace(layer=layer, binding=SimpleNamespace(name="layers.0")))
    watch_worker(state)
    first = worker().compute_weight_checksums()
    assert first.keys() == {"dp0:norm", "dp0:layers.0.down"}
    assert worker().compute_weight_checksums() == first
    loaded = Mock(finish=Mock(side_effect=lambda: experts["down"].mul_(2)))
    state.unfinished.append(loaded)  # it is in vLLM's parameters until the next step
    assert worker().compute_weight_checksums() != first
    worker().reset_weights()
    assert not experts["down"].any()


@pytest.mark.parametrize(
    ("tokens", "launcher", "ranks", "forward"),
    [(3, "mp", 2, True), (None, "mp", 2, True), (0, "mp", 2, False), (0, "external_launcher", 2, True),
     (0, "external_launcher", 1, False)],
)  # fmt: skip
def test_steps_that_run_the_model_are_counted(
    monkeypatch: pytest.MonkeyPatch, tokens: int | None, launcher: str, ranks: int, forward: bool
) -> None:
    """A rank without work runs it in a dummy batch, or, behind an external launcher, in a step of no tokens."""
    parallel = SimpleNamespace(distributed_executor_backend=launcher, data_parallel_size=ranks)
    worker = type("Worker", (), {"execute_model": lambda *_: None, "execute_dummy_batch": lambda _: None})
    worker.vllm_config = SimpleNamespace(parallel_config=parallel)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=worker))
    state: Any = Mock()
    watch_worker(state)
    one: Any = worker()
    if tokens is None:
        one.execute_dummy_batch()
    else:
        one.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens))
    state.before_step.assert_called_once_with(forward=forward)


@pytest.mark.parametrize(
    ("redundant", "placed", "invariant"), [(0, False, False), (4, False, False), (0, True, False), (4, False, True)]
)
def test_experts_follow_what_is_hot_while_vllm_steps(
    pools, tmp_path: Path, redundant: int, placed: bool, invariant: bool
) -> None:
    """Two layers, one moved a step, by counts of all ranks; then new weights come to where the experts lie by now. A
    file may say that they begin in order. Batch invariance bears no replicas, so experts move among as many slots."""
    options: Any = {"placement": str(tmp_path / "p.json")} if placed else {"batch_invariant": invariant}
    PlacementFile(jobs.E, 2, {None: tuple(range(jobs.E))}).write(tmp_path / "p.json")
    first, second = pools(2).run(jobs.balanced, redundant=redundant, steps=44, **options)
    for found in (first, second):
        assert found["worst"] < 3 * 2**-8  # three roundings to bf16, as in `close`
        assert found["changes"] >= 3
        assert found["moved"] > 3
        assert found["addresses"] == 1
        spread = [0, 1, 2, 3, EMPTY, EMPTY, 4, 5, 6, 7, EMPTY, EMPTY]
        in_order = spread if redundant and not invariant else [1, 0, 2, 3, 4, 5, 6, 7]
        assert found["first"] == (tuple(in_order),) * 2
    assert (first["changes"], first["moved"]) == (second["changes"], second["moved"])


def test_every_layer_of_a_plan_moves_before_the_next_plan() -> None:
    """Where a plan is due at each step, the first layer alone would move, again and again. The plan is that of experts
    in order."""
    parallel = ParallelConfig(2)
    world, placement = Mock(parallel=parallel), ExpertPlacement(4, parallel, (2, 1, 0, 3))
    layers: Any = [Mock(placement=placement, config=Mock(num_experts=4), world=world) for _ in range(3)]
    with (
        patch.object(balancing, "gather_load", return_value=torch.tensor([[10, 2, 6, 6]] * 3)) as planned,
        patch.object(balancing, "rebalance") as moved,
    ):
        moved.return_value.slots = 2
        one = balancing.Balancing(balancing.BalanceConfig(step_interval=1), Mock())
        for _ in range(7):
            one.before_step(layers)
    plan = [ExpertPlacement(4, parallel)]
    assert moved.call_args_list == [call(world, [layer], plan) for layer in layers * 2]
    assert planned.call_count == 2


def test_balancing_that_finds_no_expert_parallel_layer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for spread in (True, False):
        state = PluginState(balancing=Mock())
        state.bindings.append(Mock(expert_parallel=spread))
        with patch("eprt.integrations.engine.state.describe", return_value=""):
            state.report()
        assert ("nothing balances experts" in caplog.text) != spread


def test_experts_that_do_not_divide_stay_with_vllm(pools) -> None:
    said = "8 experts and 1 redundant ones don't divide by 2 ranks"
    assert pools(2).run(jobs.undivided) == [{said: ["layers.0"]}] * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"window": 3}, "window"),
        ({"window_size": 0}, "window_size: 0: expected a number of at least 1$"),
        ({"log_balancedness": 1}, "log_balancedness: 1: expected true or false$"),
        (False, r"eplb: \['False'\]: expected window_size"),
    ],
)
def test_bad_options_of_balancing_are_named(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        balance_options(SimpleNamespace(additional_config={"eprt": {"eplb": given}}))


def test_vllms_own_flag_becomes_eprts(caplog: pytest.LogCaptureFixture) -> None:
    """Unless a flag leaves all layers to vLLM: then its own balancing stays on, and says why eprt is out."""
    for more, taken in (({}, True), ({"lora_config": object()}, False)):
        config = host(parallel_config__enable_eplb=True, **more)
        config.parallel_config.enable_expert_parallel, config.parallel_config.data_parallel_size = True, 2
        eplb = {"window_size": 5, "step_interval": 7, "num_redundant_experts": 4, "log_balancedness": False}
        config.parallel_config.eplb_config = SimpleNamespace(**eplb)
        config.device_config = SimpleNamespace(device_type="cuda")
        state = PluginState()
        state.built.append(Mock())  # of an earlier engine of this process
        state.plans[()] = Mock()
        state.begin(config)
        assert not state.built
        assert not state.plans
        assert (state.balancing is not None) == taken
        assert config.parallel_config.enable_eplb != taken
        assert config.parallel_config.eplb_config.num_redundant_experts == (0 if taken else 4)
        if state.balancing is not None:
            assert vars(state.balancing.config) == eplb


@pytest.mark.parametrize("on", [False, True])
def test_a_memory_plan_of_vllms_own_experts_is_not_eprts(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """vLLM keeps one a configuration (`v1/worker/startup_plan.py`), in whose hash no plugin is."""
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace(VLLM_ENABLE_STARTUP_PLAN=on))
    config = host(device_config=SimpleNamespace(device_type="cuda"), additional_config={"eprt": {"strict": True}})
    PluginState().begin(config)
    assert (config.additional_config != {"eprt": {"strict": True}}) == on
    assert config.additional_config["eprt"] == {"strict": True}


def test_the_next_engine_of_a_process_reads_its_placement_file_again(tmp_path: Path) -> None:
    path, state, parallel = tmp_path / "p.json", PluginState(), ParallelConfig(2)
    for slots in ((3, 2, 1, 0), (0, 2, 1, 3)):
        PlacementFile(4, 2, {None: slots}).write(path)
        state.forget()
        found = placement_of({"placement": str(path)}, "layers.3", 4, parallel)
        assert found == ExpertPlacement(4, parallel, slots)


@pytest.mark.parametrize(("dense", "dp_size"), [(False, 1), (True, 1), (False, 2)])
def test_ranks_without_expert_parallelism_compute_parts_of_the_sum(pools, dense: bool, dp_size: int) -> None:
    """Also as the draft of a dense model, beside which vLLM makes no EP group. Each data-parallel rank gets the sums of
    its own tokens, which vLLM's router has seen alone: vLLM's mask of padding is theirs."""
    found = pools(2).run(jobs.tensor_parallel, dense=dense, dp_size=dp_size)
    sums = [rank["output"] for rank in found] if dp_size > 1 else [found[0]["output"] + found[1]["output"]]
    for rank, whole in enumerate(sums):
        close(whole, wanted(0, rank))
    for rank in found:
        assert rank["output"][0].any()
        assert not rank["padded"][1:].any()
        assert torch.equal(rank["padded"][0], rank["output"][0])
        assert rank["internal"]
        assert (rank["reduced"], rank["ranks"]) == (False, [1])
        assert "on one of 2 ranks whose outputs are summed: none + " in rank["line"]


@pytest.mark.parametrize("unfit", ["", "--enable-eplb moves experts in vLLM 0.99: install another"])
@pytest.mark.parametrize("strict", [False, True])
def test_what_eprt_cannot_follow_leaves_layers_to_vllm(pools, strict: bool, unfit: str) -> None:
    first, second = pools(2).run(jobs.left, strict=strict, unfit=unfit)
    assert first == second
    error, reasons = first
    if strict:
        assert error.startswith("ConfigError: eprt: layers.0 would fall back to vLLM, and eprt.strict is set: --enable")
        assert not reasons
    else:
        assert error == "NotImplementedError: no kernel on this machine"  # vLLM makes its own method
        assert list(reasons.values()) == [["layers.0"]]
        assert next(iter(reasons)).startswith("--enable-eplb moves experts")


def test_experts_lie_where_a_placement_file_says(pools, tmp_path: Path) -> None:
    """Backwards, two of them twice, of which one on its own rank, and a slot without any."""
    slots = (7, 6, 5, 4, 4, 0, 3, 2, 1, 0, 7, EMPTY)
    PlacementFile(jobs.E, 2, {3: slots}).write(tmp_path / "placement.json")
    for rank, found in enumerate(pools(2).run(jobs.placed, path=str(tmp_path / "placement.json"))):
        close(found["output"], wanted(0, rank))
        assert found["slots"] == slots
        assert found["held"] == 6
        assert "8 experts on 12 slots by the placement file, top-2" in found["line"]
        assert found["no layer"].startswith("ConfigError: the placement file has no layer 4: it has 3")
        assert "a placement file can't say which it is" in found["no number"]
        assert found["other experts"].startswith("ConfigError: the placement file is for 8 experts, layer 3 has 16")
        assert found["drafts"] == [None] * 3


def test_ranks_whose_placement_files_differ_hear_so_before_any_expert_travels(pools, tmp_path: Path) -> None:
    for rank, slots in enumerate([(*reversed(range(8)), 0, 1), (*range(8), 3, 2)]):
        PlacementFile(jobs.E, 2, {3: slots}).write(tmp_path / f"{rank}.json")
    first, second = pools(2).run(jobs.other_files, folder=tmp_path)
    assert first == second
    assert all(said.startswith("WorldMismatch") for said in first), first
    assert "placement" in first[0]


@pytest.mark.parametrize("weight_format", ["bf16", "mxfp4", "nvfp4", "fp8_block"])
def test_experts_of_every_format_travel_whole(pools, weight_format: str) -> None:
    assert pools(2).run(jobs.spread_experts, weight_format=weight_format) == [[], []]


def test_input_scales_that_one_rank_lacks_are_used_by_none(pools) -> None:
    """vLLM holds this rank's experts alone; ranks that know of others would send more tensors, or refuse to start."""
    scales = {"gate_up": True, "down": False}
    assert pools(2).run(jobs.scales_missing_on_one_rank) == [[scales] * 2] * 2


def test_kernels_compile_while_vllm_loads_what_comes_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first layer of each kind."""
    started: list[tuple[Any, bool]] = []

    class Layer(ExpertParallelMoE):
        def __init__(self, config: str, *_: Any, **__: Any) -> None:
            torch.nn.Module.__init__(self)
            self.config: Any = config
            self.dispatcher = self.executor = self.router = None

    monkeypatch.setattr("eprt.integrations.engine.state.ExpertParallelMoE", Layer)
    monkeypatch.setattr("eprt.layer.compile_kernels", lambda of, *_, wait: started.append((of, wait)))
    state = PluginState()
    for config in ("wide", "wide", "narrow", "wide"):
        state.build(Mock(config=config, placement=None), Mock())
    assert started == [("wide", False), ("narrow", False)]
    assert [layer.config for layer in state.cold] == ["wide", "wide", "narrow", "wide"]


def test_a_line_appears_once_in_vllms_log(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's logger passes nothing on; the root's handlers, which some libraries make, would show it again."""
    theirs, own = logging.Logger("vllm"), logging.getLogger("eprt.of.this.test")
    theirs.addHandler(seen := BufferingHandler(8))
    theirs.propagate = False
    _share_handlers(theirs, own)
    own.warning("compiling")
    assert ([record.msg for record in seen.buffer], caplog.messages) == (["compiling"], [])


def test_no_version_of_vllm_is_kept_from_starting(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Here there is none at all: nothing to hook into."""
    for found in ("0.99.0", "0.32.0"):
        monkeypatch.setattr("eprt.integrations.vllm._installed", lambda found=found: found)
        caplog.clear()
        register()
        assert "every layer is left to vLLM: the plugin doesn't fit this vLLM: No module named" in caplog.text


WORKERS = """
import multiprocessing, os, signal, sys, time
from types import SimpleNamespace
import torch
import torch.distributed as dist
from eprt.integrations.vllm import state

def worker(rank, port, end):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ep = SimpleNamespace(device=torch.device("cpu"), cpu_group=dist.group.WORLD)
    state.make_world(ep, SimpleNamespace(world_size=1, cpu_group=None), "same tokens")
    if rank == 1:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    try:
        dist.barrier()
    except RuntimeError:  # as of a collective of vLLM's own
        time.sleep(0.05)  # vLLM's way to its end
        print(time.monotonic(), flush=True)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=worker, args=(rank, *sys.argv[1:])) for rank in range(2)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    print(time.monotonic())
"""


@pytest.mark.parametrize(("end", "named", "seconds"), [("killed", 1, 2 * EXIT_S), ("left", 0, EXIT_S)])
def test_a_worker_that_ends_names_the_dead_rank_first(tmp_path: Path, end: str, named: int, seconds: float) -> None:
    """And waits for that alone: beside a peer that has left in order it ends at once."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    done = run_python(script, free_port(), end, cwd=tmp_path)
    assert done.stderr.count("eprt: rank 1 exited: process ") == named, done.stderr
    told = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 prints such
    began, ended = map(float, told)
    assert ended - began < seconds

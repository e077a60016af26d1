"""World: coordinates, host-owned groups, shared memory, what opens and closes. test_fault_trials.py has lost ranks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.jobs import world_jobs as jobs
from support.ports import free_port
from support.processes import Python

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import make_dispatcher
from eprt.errors import ConfigError, InputError, UsageError
from eprt.ranks.launcher import launch
from eprt.world import World, collectives, groups
from eprt.world.collectives import Collectives, Membership
from eprt.world.lifecycle import SharedResources


@pytest.mark.parametrize(
    ("attention_tp", "moe_tp", "expected"),
    [
        (1, 1, [(0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 2, 0), (3, 0, 3, 0)]),
        (2, 1, [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 2, 0), (1, 1, 3, 0)]),
        (4, 2, [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 1, 0), (0, 3, 1, 1)]),
    ],
)
def test_coordinates_follow_the_meshes(pools, attention_tp: int, moe_tp: int, expected: list) -> None:
    assert pools(4).run(jobs.coordinates, attention_tp=attention_tp, moe_tp=moe_tp) == expected


@pytest.mark.parametrize(("cores", "yields"), [(4, True), (3, False)])
def test_ranks_that_share_cores_sleep_at_once(monkeypatch, cores: int, yields: bool) -> None:
    monkeypatch.setattr(collectives, "CORES", cores)
    waits = Mock()
    monkeypatch.setattr(collectives.os, "sched_yield", waits.sched_yield)
    monkeypatch.setattr(collectives.time, "sleep", waits.sleep)
    next(Collectives(Membership(0, 4, torch.device("cpu"), ParallelConfig(4)), 60.0)._pauses(range(4)))
    assert (waits.sched_yield.called, waits.sleep.called) == (yields, not yields)


def test_around_a_default_group_that_was_started_without_torchrun(tmp_path: Path) -> None:
    found = launch(jobs.around_a_file, 4, path=str(tmp_path / "store"))
    assert found == [(rank, 4, True) for rank in (3, 2, 1, 0)]


def test_a_group_before_torch_distributed_is_refused() -> None:
    with pytest.raises(UsageError, match="call init_process_group first"):
        World.from_group(None, "cpu")


def test_the_gpu_of_a_host_engine_is_the_one_it_made_current(monkeypatch) -> None:
    """Its processes may all have LOCAL_RANK 0, or none. torch.cuda is played here."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with World.from_group(dist.group.WORLD, "cpu") as world:
            assert world.device == torch.device("cpu")
        if not torch.cuda.is_available():
            for device in ("cuda", "cuda:0"):
                with pytest.raises(ConfigError, match=f"'{device}': 0 CUDA devices here"):
                    World.from_group(dist.group.WORLD, device)
        mesh = SimpleNamespace(ndim=1, mesh_dim_names=("dp",), device_type="cuda", get_group=lambda: dist.group.WORLD)
        mesh.get_coordinate = lambda: [0]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail(f"set_device({index})"))
        for make, expected in (
            (lambda: World.from_mesh(mesh), 3),
            (lambda: World.from_group(dist.group.WORLD, "cuda"), 3),
            (lambda: World.from_group(dist.group.WORLD, "cuda:1"), 1),
        ):
            world = make()
            assert world.device == torch.device("cuda", expected)
            world.close()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_does_not_come_to_the_group_of_a_mesh_is_named() -> None:
    words = "RankLost: ranks [1] of 2 didn't come within 4 s of start-up; look at their logs. Restart the job."
    assert launch(jobs.absent_from_a_mesh, 3) == [("", True), (words, True), ("", True)]


def test_ranks_of_a_mesh_meet_where_torch_makes_groups_without_waiting() -> None:
    assert launch(jobs.slow_to_meet_for_a_mesh, 3) == [0, 2, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_size_that_is_wrong_on_one_rank_is_told_to_the_other(victim: int) -> None:
    found = launch(jobs.wrong_on_one_rank, 2, victim=victim)
    error = "ConfigError: attention_tp_size 3 doesn't divide world_size 2; use a divisor"
    assert found.pop(victim) == (error, True)
    assert found == [(f"RankLost: rank {victim} raised: {error}; others still wait for it. Restart the job.", True)]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, (None, "")),
        (3, (1, "needs all ranks on one NVLink host, one host has 1 of 3")),
        (4, (2, "needs all ranks on one NVLink host, one host has 2 of 4")),
    ],
)
def test_what_needs_one_host_is_refused_beyond(size: int, expected: tuple[int | None, str]) -> None:
    assert launch(jobs.on_hosts_of_two, size) == [expected] * size


def test_around_groups_and_meshes_of_a_host_engine() -> None:
    found = launch(jobs.around_host_groups, 4)
    for rank, (pair, summed, square, line, default, refused) in enumerate(found):
        assert pair == (rank % 2, 2)
        assert summed is True
        assert square == (rank // 2, rank % 2, rank // 2, rank % 2)
        assert line == default == (rank, 4)
        assert refused == ["ConfigError"] * 4


def test_resources_are_counted_and_lazy_work_after_warmup_is_an_error(pools) -> None:
    for log in pools(2).run(jobs.resources_and_warmup):
        assert log[:5] == ["made", "made another", "one user left", "freed buffer", "warm False"]
        assert log[5].startswith("compiling after World.warmup()")


def test_use_after_close_is_a_typed_error_and_a_new_world_works() -> None:
    for found in launch(jobs.use_after_close, 2):
        assert [line.split(":")[0] for line in found] == ["UsageError"] * 7
        assert all("closed" in line for line in found)


def test_too_few_open_files_are_named_on_all_ranks() -> None:
    other, mine = launch(jobs.without_descriptors, 2)
    assert mine.startswith("ConfigError: at most")
    assert mine.endswith("raise `ulimit -n`")
    assert other.startswith("RankLost: rank 1 raised: ConfigError: at most")
    for left in (3, 9):  # of which torch would end the process, or say that a peer is silent
        other, mine = launch(jobs.few_descriptors, 2, left=left)
        assert mine.endswith("2 ranks take 28 more; raise `ulimit -n`")
        assert other.startswith(f"RankLost: rank 1 raised: {mine}")


def test_a_closed_world_gives_its_threads_and_descriptors_back() -> None:
    for opened, closed in launch(jobs.worlds_come_and_go, 2):
        # Of two Worlds: one gloo device of the default group, which control groups share, and one for each mesh.
        if torch.__version__ >= "2.11":  # earlier ones give their threads no names
            assert [held["gloo_tcp_loop"] for held in opened] == [3, 3, 3]
        assert not any(name.startswith(("gloo", "pt_gloo")) for held in closed for name in held)
        assert closed == closed[:1] * 3


@pytest.mark.parametrize(
    ("job", "found"),
    [
        (jobs.two_worlds_and_their_hooks, [[True, True]] * 2),  # Worlds close in any order
        (jobs.forked_child_leaves, ["exit 0"] * 2),  # a forked child is not the rank
        (jobs.split_of_a_second_default_group, [[1, 1]] * 2),  # torch alone ends by SIGSEGV there
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_all_ranks_find(job, found: list) -> None:
    assert launch(job, len(found)) == found


def test_a_world_of_one_needs_no_process_group() -> None:
    with World.from_env("cpu") as world:
        assert (world.rank, world.size, world.group) == (0, 1, None)
        assert world.gather_control(torch.tensor([5])).tolist() == [[5]]
    with pytest.raises(ConfigError, match="attention_tp_size 3 doesn't divide world_size 1"):
        World.from_env("cpu", attention_tp_size=3)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="0 CUDA devices"):
            World.from_env("cuda")


def test_without_torchrun_worlds_follow_each_other_on_a_port() -> None:
    assert launch(jobs.without_torchrun, 3, port=free_port()) == ["closed"] * 3


def test_a_resource_made_in_inference_mode_can_be_written_to_outside() -> None:
    with World.from_env("cpu") as world:
        with torch.inference_mode():
            made = world.resource("memory", lambda: torch.zeros(2))
        assert made.fill_(1.0).tolist() == [1.0, 1.0]


def test_close_ends_the_graphs_that_hold_its_collectives() -> None:
    """Without it NCCL waits for them for ever: tests/gpu/test_step_graphs.py."""
    graph = Mock()
    with World.from_env("cpu") as world:
        world.graphs.add(graph)
        world.graphs.add(Mock())  # that nobody keeps
        gc.collect()
        assert len(world.graphs) == 1
    graph.reset.assert_called_once_with()


def test_one_resource_that_cannot_close_keeps_no_other_open() -> None:
    held, freed = SharedResources(), []

    def fail(value: str) -> None:
        raise ArithmeticError(value)

    for name, closer in (("oldest", freed.append), ("broken", fail), ("newest", freed.append)):
        held.acquire(name, lambda name=name: name, closer)
    with pytest.raises(ArithmeticError, match="broken"):
        held.close()
    assert freed == ["newest", "oldest"]
    with pytest.raises(ArithmeticError, match="no memory"):
        held.acquire("late", lambda: fail("no memory"), None)
    assert held.acquire("late", lambda: "made", None) == "made"


def test_where_headers_are_not_compared_a_refusal_waits_for_nobody() -> None:
    """A GPU world whose R is given: peers go straight to payload, so a meeting would wait for the timeout."""
    world = World(Membership(0, 2, torch.device("cpu"), ParallelConfig(2)), timeout_s=20.0)
    world.gather_words = lambda words: [tuple(words)] * 2  # the peer builds the same
    world.compares_headers = lambda full: False
    dispatcher = make_dispatcher("none", world, MoEConfig(8, 2, 16, 8), RuntimeConfig())
    world.gather_words = lambda _: pytest.fail("the ranks met")
    with pytest.raises(InputError, match="no router"):
        dispatcher.refuse(InputError("no router"), 4)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "RANK='4', WORLD_SIZE='4'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT=''"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK='one'"),
        *(({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}, f"MASTER_PORT='{port}'") for port in ("99999", "0")),
        *(
            (
                {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", name: value},
                f"{name}='{value}'.*: expected a number",
            )
            for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
            for value in ("x", "-1", "", "9" * 30)
        ),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK='first'"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_refused(monkeypatch, environment: dict, says: str) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        World.from_env("cpu")


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), float("inf"), 1e300, "60", None, True])
def test_what_is_no_timeout_is_refused(timeout_s: object) -> None:
    for make in (
        lambda: World.from_env("cpu", timeout_s=timeout_s),
        lambda: World.from_group(None, "cpu", timeout_s=timeout_s),
        lambda: World.from_mesh(None, timeout_s=timeout_s),
        lambda: World(Membership(0, 1, torch.device("cpu"), ParallelConfig()), timeout_s),
    ):
        with pytest.raises(ConfigError, match=r"timeout_s .*: expected seconds above 0"):
            make()


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:x", ["cpu"], "cpu" + "\0"])
def test_what_is_no_device_is_refused(device: object) -> None:
    for make in (lambda: World.from_env(device), lambda: groups.host_device(device)):
        with pytest.raises(ConfigError, match=r"device .*: expected 'cpu' or 'cuda'"):
            make()


@pytest.mark.parametrize("thing", [None, 3, World])
def test_what_cannot_be_warmed_up_is_refused_on_all_ranks(pools, thing: object) -> None:
    for told in pools(2).run(jobs.warmed_up, thing=thing):
        assert told.startswith("InputError: rank 1: warmup got")


FORKED = """
import os, sys, time, warnings
import torch.distributed as dist
from eprt.world import World

world = World.from_env("cpu", timeout_s=20)
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of the threads
child = os.fork()
if child == 0:
    ends = sys.argv[1]
    if ends == "closes":
        world.close()
    elif ends == "destroys":
        dist.destroy_process_group()
    elif ends == "forgets":
        del world
    sys.exit(7)  # the ordinary way
deadline = time.monotonic() + 30
while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.02)
if not ended[0]:
    os.kill(child, 9)
world.barrier()
world.close()
sys.exit(os.waitstatus_to_exitcode(ended[1]) != 7 if ended[0] else "the child hangs")
"""


@pytest.mark.parametrize(
    "ends", ["runs out", *(pytest.param(ends, marks=pytest.mark.long) for ends in ("closes", "destroys", "forgets"))]
)
def test_a_forked_child_that_ends_the_ordinary_way_ends(tmp_path: Path, ends: str) -> None:
    (script := tmp_path / "rank.py").write_text(FORKED)
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [Python(script, ends, env=os.environ | meet | {"RANK": str(rank)}) for rank in range(2)]
    assert [(rank.communicate(timeout=90)[1], rank.returncode) for rank in ranks] == [("", 0)] * 2


LATE = """
import contextlib, os, torch, torch.distributed as dist
from eprt.world import World

dist.init_process_group("gloo")
if dist.get_rank() == 0:  # it serves the store, which rank 1 needs until it is through init_process_group
    dist.recv(torch.empty(1), 1)
    os._exit(0)
dist.send(torch.ones(1), 0)
with contextlib.suppress(RuntimeError):
    dist.recv(torch.empty(1), 0)
World.from_group(None, "cpu", timeout_s=2.0)
"""


def test_a_rank_that_comes_to_a_host_engines_store_after_its_end_does_not_wait_for_it() -> None:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [Python("-c", LATE, env=os.environ | meet | {"RANK": rank}) for rank in "01"]
    said = [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks][1]
    assert "RankLost: the control store gave no answer for 1 s: torch.distributed's store is stopped" in said[0]
    assert said[1] == 75

"""Jobs for test_world.py and test_shared_exchange.py."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import resource
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from eprt.config import MoEConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS, make_dispatcher
from eprt.support import Device
from eprt.tokens import TopK
from eprt.world import World, rendezvous
from eprt.world.groups import make_splittable
from eprt.world.shared_exchange import open_exchange
from support.builders import caught, said

CONFIG = MoEConfig(num_experts=8, top_k=2, hidden_size=16, intermediate_size=8)
COORDINATES = ("dp_rank", "attention_tp_rank", "ep_rank", "moe_tp_rank")


def _step(dispatcher, tokens: int) -> None:
    ids = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % 8
    sent = dispatcher.dispatch(torch.ones(tokens, 16), TopK(ids, torch.ones(tokens, 2)))
    dispatcher.combine(torch.zeros(sent.tokens.num_rows, 16), sent.handle)


def coordinates(context, attention_tp: int, moe_tp: int) -> tuple[int, ...]:
    world = context.world(attention_tp_size=attention_tp, moe_tp_size=moe_tp)
    own = tuple(getattr(world, name) for name in COORDINATES)
    attention, moe = world.attention_mesh, world.moe_mesh
    places = [(attention, "dp"), (attention, "attention_tp"), (moe, "ep"), (moe, "moe_tp")]
    assert tuple(mesh.get_local_rank(name) for mesh, name in places) == own
    return own


def around_host_groups(context) -> list[object]:
    """Worlds around groups and meshes of a host engine leave them usable after close."""
    host = context.world()  # stands for the engine's own initialisation
    found: list[object] = []
    pair = [[0, 1], [2, 3]][context.rank // 2]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[context.rank // 2]
    with World.from_group(mine, "cpu") as world:
        found.append((world.rank, world.size))
        _step(make_dispatcher("torch", world, CONFIG, RuntimeConfig()), 3)
    total = torch.tensor([context.rank])
    dist.all_reduce(total, group=mine)
    found.append(int(total) == sum(pair))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for make, names in (
        (lambda: World.from_mesh(mesh, attention_tp_dim="tp", moe_tp_size=2), COORDINATES),
        (lambda: World.from_mesh(init_device_mesh("cpu", (4,)), timeout_s=30.0), ("rank", "size")),
        (lambda: World.from_group(None, "cpu"), ("rank", "size")),  # torch's name for its default group
    ):
        with make() as world:
            found.append(tuple(getattr(world, name) for name in names))
            _step(make_dispatcher("none", world, CONFIG, RuntimeConfig()), 3)
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # with ranks that the pairs don't hold
    other = DeviceMesh("cpu", [2, 3] if context.rank < 2 else [0, 1], _init_backend=False)
    refused = [
        lambda: World.from_mesh(mesh, attention_tp_dim="dp"),
        lambda: World.from_mesh(other, timeout_s=5.0),
        *(lambda crossed=each: World.from_group(mine, "cpu", attention_tp_group=crossed) for each in crossed),
    ]
    found.append([caught(each)[0] for each in refused])
    host.barrier()
    return found


def wrong_on_one_rank(context, victim: int) -> tuple[str, bool]:
    started = time.monotonic()
    found = said(lambda: World.from_env("cpu", attention_tp_size=3 if context.rank == victim else 1, timeout_s=30.0))
    return found, time.monotonic() - started < 10.0


def absent_from_a_mesh(context) -> tuple[str, bool]:
    """Rank 2 of a host engine's three doesn't come to the World of a mesh of ranks 1 and 2."""
    host = context.world()
    mesh = DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("dp", "tp"))
    started, found = time.monotonic(), ""
    if context.rank == 1:
        found = said(lambda: World.from_mesh(mesh, attention_tp_dim="tp", timeout_s=4.0))
    soon = time.monotonic() - started < 7.0  # torch's own limit is 8 s
    host.barrier()
    return found, soon


def slow_to_meet_for_a_mesh(context) -> int:
    """The last rank sees what the others wrote half a second later, and torch makes a group without waiting for all
    its ranks, as it does with NCCL."""
    host, made = context.world(), dist.new_group([1, 2])
    mesh, size = DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("dp", "tp")), 0
    look = mock.patch.object(rendezvous, "_LOOK_S", 0.5 if context.rank == 2 else 0.05)
    with look, mock.patch.object(dist, "new_group", return_value=made):
        if context.rank:
            with World.from_mesh(mesh, attention_tp_dim="tp", timeout_s=6.0) as world:
                size = world.size
    host.barrier()
    return size


def around_a_file(context, path: str) -> tuple[int, int, bool]:
    """torch.distributed as a host starts it without torchrun: ranks meet in a file."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    last = context.size - 1 - context.rank  # numbered by nothing but what it says here
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=last, world_size=context.size)
    with World.from_env("cpu", timeout_s=20) as world:
        _step(make_dispatcher("torch", world, CONFIG, RuntimeConfig()), 1 + world.rank)
        found = world.rank, world.size
    total = torch.tensor([1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return *found, int(total) == context.size


def on_hosts_of_two(context) -> tuple[int | None, str]:
    """What the World knows of its hosts, and what the plan says of symm there."""
    with (
        mock.patch("socket.gethostname", return_value=f"host{context.rank // 2}"),
        World.from_env("cpu", timeout_s=20) as world,
    ):
        verdict = DISPATCHERS["symm"].supports(CONFIG, world.parallel, RuntimeConfig(), Device.parse("sm90"))
        return world.parallel.ranks_per_host, verdict.reason


def resources_and_warmup(context) -> list[str]:
    world = context.world()
    log: list[str] = []
    for _ in range(2):
        world.resource(
            ("buffer", 7), lambda: log.append("made") or "buffer", lambda value: log.append(f"freed {value}")
        )
    world.resource(("buffer", 8), lambda: log.append("made another") or "other")
    world.release(("buffer", 7))
    log.append("one user left")
    world.release(("buffer", 7))
    world.release(("buffer", 7))
    world.require_cold("compiling")

    class Layer:
        def warmup(self) -> None:
            log.append(f"warm {world.warm}")

    world.warmup(Layer())
    log.append(caught(lambda: world.require_cold("compiling"))[1])
    world.warm = False
    return log


def use_after_close(context) -> list[str]:
    found = []
    world = context.world(timeout_s=20.0)
    dispatcher = make_dispatcher("none", world, CONFIG, RuntimeConfig())
    world.close()
    world.close()
    one, all_ = torch.ones(1), torch.ones(context.size)
    each = [1] * context.size
    for call in (
        world.barrier,
        lambda: _step(dispatcher, 1),
        lambda: world.resource("x", lambda: 1),
        lambda: world.all_gather(all_, one),
        lambda: world.reduce_scatter(one, all_),
        lambda: world.all_to_all(all_, all_.clone(), each, each),
        lambda: world.gather_attention_tp(one),
    ):
        found.append(said(call))
    again = context.world(timeout_s=20.0)
    _step(make_dispatcher("none", again, CONFIG, RuntimeConfig()), 1)
    return found


def without_descriptors(context) -> str:
    """What a World says whose rank 1 can't open one more file."""
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    broken = mock.patch("eprt.world.init_default_group", side_effect=full)
    with broken if context.rank == 1 else contextlib.nullcontext():
        return said(lambda: World.from_env("cpu", timeout_s=30.0))


def few_descriptors(context, left: int) -> str:
    """What a World says whose rank 1 may open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + left, before[1]))
    found = said(lambda: World.from_env("cpu", timeout_s=30.0))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return found


def split_of_a_second_default_group(context) -> list[int]:
    """Worlds one after another; each one's default group, split as DeviceMesh does on GPUs."""
    found: list[int] = []
    for name in ("first", "second"):
        with context.world():
            default = dist.distributed_c10d._get_default_group()
            make_splittable(default)
            part = default.split_group([context.rank], None, None, f"{name} {context.rank}", "")
            found.append(part.size())
    return found


def without_torchrun(context, port: int) -> str:
    """Plain processes with RANK, WORLD_SIZE and MASTER_PORT: rank 0 serves the store that all depend on."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    for _ in range(3):
        with World.from_env("cpu", timeout_s=20) as world:
            world.barrier()
            time.sleep(0.1 * context.rank)  # rank 0 is the first to close
    return "closed"


def two_worlds_and_their_hooks(context) -> list[bool]:
    """Closed in the order they were made; the one that is left still hears of an uncaught exception."""
    context.world()
    before = sys.excepthook
    first, second = (World.from_group(dist.group.WORLD, "cpu", timeout_s=20) for _ in range(2))
    first.close()
    heard = sys.excepthook == second._lifecycle.on_exception
    second.barrier()
    second.close()
    return [heard, sys.excepthook == before]


def forked_child_leaves(context) -> str:
    """A child process that ends as Python processes do, with this rank's exit hooks in its memory; what it calls
    doesn't reach the peers."""
    world = context.world()
    child = os.fork()
    if child == 0:
        if caught(world.barrier)[0] != "UsageError":
            os._exit(3)
        world._lifecycle.at_exit()
        world._guard.leave("left")
        os._exit(bool(world._guard._ending))
    _, status = os.waitpid(child, 0)
    world.barrier()
    return f"exit {os.waitstatus_to_exitcode(status)}"


def worlds_come_and_go(context) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """What this process holds while each of three pairs of Worlds is open, and after it closed."""
    opened, closed = [], []
    kept = []  # nothing is left to the garbage collector
    gc.disable()
    for sizes in ({}, {}, {"attention_tp_size": 2}):
        with World.from_env("cpu", timeout_s=20) as first, World.from_env("cpu", timeout_s=20, **sizes) as second:
            _step(make_dispatcher("torch", second, CONFIG, RuntimeConfig()), 3)
            opened.append(_held())
            kept += [first, second]
        closed.append(_settled())
    gc.enable()
    return opened, closed


def _settled() -> dict[str, int]:
    """The store that rank 0 serves hears a little later that a rank has closed its connection."""
    before, now = {}, _held()
    while before != now:
        time.sleep(0.3)
        before, now = now, _held()
    return now


def _held() -> dict[str, int]:
    """Open descriptors of this process, and its threads by name."""
    found = {"descriptors": len(os.listdir("/proc/self/fd"))}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            found[name] = found.get(name, 0) + 1
    return found


def warmed_up(context, thing: object) -> str:
    """What each rank is told where rank 1 warms up `thing`; a barrier works afterwards."""
    world = context.world()
    told = said(lambda: world.warmup(thing if context.rank == 1 else mock.Mock()))
    world.barrier()
    return told


# ---- test_shared_exchange.py ----------------------------------------------------------------------------------------


def many_exchanges(context, rounds: int) -> tuple[bool, bool]:
    """Words that every rank can foretell, with ranks that come late in turn."""
    world, right = context.world(), True
    for number in range(rounds):
        late = random.Random(number)
        if late.random() < 0.02 and late.randrange(world.size) == world.rank:
            sum(range(200_000))
        words = [[(number << 40) - rank, rank - number, -(1 << 63), (1 << 63) - 1] for rank in range(world.size)]
        right = right and world.gather_words(words[world.rank]) == [tuple(row) for row in words]
    return world.shares_words, right


def opened_exchange(context, folders: list[str]) -> tuple[bool, list[str], list[int]]:
    """(whether this rank shares memory, what is left in its folder, modes of files on the way as rank 0 saw them)"""
    world, folder = context.world(), Path(folders[context.rank])
    modes: list[int] = []

    def gather(x):
        if context.rank == 0:  # who makes the file and removes it: for another rank it may go between name and mode
            modes.extend(path.stat().st_mode & 0o777 for path in folder.glob("eprt-*"))
        return world.gather_control(x)

    made = open_exchange(world.rank, world.size, gather, folder)
    right = made is None or made.gather([world.rank], world._pauses(range(world.size))) == [
        (rank,) for rank in range(world.size)
    ]
    assert right
    world.barrier()
    if made is not None:
        made.close()
    return made is not None, [path.name for path in folder.glob("eprt-*")] if folder.exists() else [], modes


def on_two_hosts(context) -> tuple[bool, list[tuple[int, ...]]]:
    with (
        mock.patch("socket.gethostname", return_value=f"host{context.rank}"),
        World.from_env("cpu", timeout_s=20) as world,
        world.step(3 + context.rank, words=(7,)) as step,
    ):
        return world.shares_words, [step.tokens, *step.words]

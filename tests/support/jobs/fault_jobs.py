"""Jobs and scripts for test_faults.py."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from eprt.conformance.faults.job import CheckedLayer
from eprt.tokens import TopK
from eprt.world import World, groups
from eprt.world.guard import Guard
from eprt.world.links import Links
from eprt.world.rendezvous import Rendezvous
from support.builders import NOTHING, die, said, stop_for

LIMIT_S = 3.0  # of the Worlds here: half of it is the silent limit


def meets_without_torchrun(context, port: int, victim: int, fate: str, place: str) -> str:
    """Plain processes; rank 0 serves the store. The victim dies or stops in that place of the start, or after it; the
    others step until they hear of it."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    end = die if fate == "dies" else lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    here = context.rank == victim
    with mock.patch(f"eprt.world.{place}", end) if here and place else nullcontext():
        world = World.from_env("cpu", timeout_s=LIMIT_S)
    if here:
        end()
    return _step_until_lost(world)


def outlives_the_store(context, port: int, server: int, what: str) -> str:
    """As under torchrun, whose agent serves the store and is stopped or killed."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    world = World.from_env("cpu", timeout_s=LIMIT_S)
    world.barrier()
    if context.rank == 1:
        os.kill(server, getattr(signal, what))
    return _step_until_lost(world)


def loses_the_store_at_once(context, port: int, server: int, what: str) -> None:
    """The store is stopped or killed between this rank's connection to it and its first question."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    connect = groups._job_store

    def lose(*arguments: Any) -> dist.TCPStore:
        store = connect(*arguments)
        os.kill(server, getattr(signal, what))
        time.sleep(0.5)
        return store

    os.environ["WORLD_SIZE"] = "2"
    with mock.patch("eprt.world.groups._job_store", lose):
        World.from_env("cpu", timeout_s=LIMIT_S)


def loses_the_store_once_ranks_met(context, port: int, server: int, what: str) -> None:
    """The store is stopped or killed before this rank's guard connects to it."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")

    def lose(met: Rendezvous, *arguments: Any) -> Guard:
        if context.rank == 0:
            met.store.wait(["rank 1 met"])
            os.kill(server, getattr(signal, what))
        else:
            met.store.set("rank 1 met", "")
        time.sleep(1.0)
        return groups.start_guard(met, *arguments)

    with mock.patch("eprt.world.start_guard", lose):
        World.from_env("cpu", timeout_s=LIMIT_S)


def is_stopped_and_goes_on(context, victim: int) -> str:
    """The victim wakes up after the others' verdict."""
    world = context.world(timeout_s=LIMIT_S)
    with _stopped_in_a_beat(world, LIMIT_S) if context.rank == victim else nullcontext():
        return _step_until_lost(world)


def all_are_stopped_and_go_on(context) -> str:
    """As by Ctrl-Z and `fg`, for longer than a silent rank or store is waited for."""
    world = context.world(timeout_s=LIMIT_S)
    with _stopped_in_a_beat(world, 0.8 * LIMIT_S) as beat:
        while beat.call_count < 3:
            time.sleep(0.05)
        world.barrier()
    return "healthy"


@contextmanager
def _stopped_in_a_beat(world: World, seconds: float) -> Iterator[mock.Mock]:
    """Stops this process in the middle of its guard's next beat, while the store owes it an answer."""
    guard = world._guard
    assert guard is not None
    guard._watch.stop()

    def stop_once() -> None:
        if beat.call_count == 1:
            guard._watch._asked_at = time.monotonic()
            stop_for(seconds)
        Guard._beat(guard)

    with mock.patch.object(guard, "_beat", side_effect=stop_once) as beat:
        yield beat


def two_of_one_name(context) -> str:
    """Two hosts whose names and namespace numbers are equal: rank 1's process number is nobody's on rank 0's."""
    with (
        mock.patch("eprt.world.process.boot_id", return_value=f"boot {context.rank}"),
        mock.patch("eprt.world.process.os.getpid", return_value=2**22 + context.rank),
        World.from_env("cpu", timeout_s=20) as world,
    ):
        time.sleep(1.5)
        world.barrier()
    return "healthy"


def garbage_for_the_guard(context) -> str:
    """What a stranger may do to the guards' ports, and a peer may say; the job goes on. `attack_jobs` has the store."""
    world = context.world(timeout_s=20)
    guard = world._guard
    assert guard is not None
    if context.rank == 1:
        for address in guard.met.addresses.values():
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(4096)):
                with socket.create_connection(address) as stranger:
                    stranger.sendall(said)
        garbage = [5, {"beat": "x"}, {"beat": [1, 2, 3]}, {"verdict": [[99], "exited", "x"]}, {"case": []}, [], None]
        for message in garbage:
            guard._thread.do(lambda message=message: guard._links.send_all(message))
    time.sleep(1.0)
    world.barrier()
    return str(guard.verdict)


def a_verdict_with_control_characters(context) -> str:
    world = context.world(timeout_s=LIMIT_S)
    if context.rank == 1:
        raise ArithmeticError("\x1b[31mred\x07\r" + "x" * 100_000)
    return _step_until_lost(world)


def two_die_at_once(context) -> str:
    world = context.world(timeout_s=LIMIT_S)
    world.barrier()
    if context.rank == 1:  # and not each by itself: they may get a core at different moments
        os.kill(world._guard.met.members[3].pid, signal.SIGKILL)
        die()
    return _step_until_lost(world)


def _step_until_lost(world: World) -> str:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        world.barrier()
        time.sleep(0.01)
    return NOTHING


def combines_twice_on_one_rank(context) -> list[object]:
    """Rank 1 alone combines once more, and the others go on: nobody is one exchange out of step afterwards."""
    world = context.world(timeout_s=20)
    job = CheckedLayer(world, "torch")
    layer = job.layer
    hidden, topk = torch.ones(2, 32), TopK(torch.tensor([[0, 4], [1, 5]], dtype=torch.int32), torch.ones(2, 2))
    sent = layer.dispatcher.dispatch(hidden, topk)
    output = layer.executor(sent.tokens)
    layer.dispatcher.combine(output, sent.handle)
    found: list[object] = []
    if context.rank == 1:
        found.append(said(lambda: layer.dispatcher.combine(output, sent.handle)))
    for step in range(4):
        job.step(step)
    layer.close()
    return [*found, "right"]


def is_cut_off(context, victim: int) -> str:
    """Nothing that the guards say reaches the victim or leaves it, while gloo, by another way, still works."""
    world = context.world(timeout_s=LIMIT_S)
    world.barrier()
    if context.rank == victim:
        links = world._guard._links
        links.send = lambda *_, **__: None
        links.heard = lambda *_: None
    return _step_until_lost(world)


def is_blocked(context, victim: int) -> str:
    """What the victim sends to the port of rank 0's guard is dropped."""
    connect = Links._connect

    async def drop(links: Links, peer: int, address: tuple[str, int]) -> None:
        if (context.rank, peer) != (victim, 0):
            await connect(links, peer, address)

    with mock.patch.object(Links, "_connect", drop):
        return _step_until_lost(context.world(timeout_s=LIMIT_S))


def sits_in_a_kernel(context, victim: int) -> None:
    """As on a GPU whose kernel waits for a rank that died: no verdict wakes the host."""
    world = context.world(timeout_s=LIMIT_S)
    assert world._guard is not None
    world._guard._exit_after_s = 2.0
    world.barrier()
    if context.rank == victim:
        die()
    time.sleep(60)

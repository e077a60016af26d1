"""Jobs for test_ranks.py, test_cli.py and test_tune.py: above all what each faulty rank does while the others wait for
it in a gloo collective."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from eprt.errors import RankLost
from eprt.world import shared_exchange
from support.builders import die


def echo(context, word="hi"):
    return (word, context.rank, context.size, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])


def pid(context):
    return os.getpid()


def dies_before_it_shares(context, path):
    """The file that ranks are to share is there, and its maker ends before any of them has mapped it."""
    Path(path).write_text(str(os.getpid()))
    with mock.patch.object(shared_exchange.mmap, "mmap", side_effect=die):
        shared_exchange.open_exchange(0, 1, lambda mine: mine[None])


def named_semaphore(context):
    """The name of a semaphore where "forkserver" is Python's own way of starting processes, as from 3.14 on."""
    forkserver = multiprocessing.get_context("forkserver")
    with mock.patch.object(multiprocessing.context._default_context, "_default_context", forkserver):
        return multiprocessing.Semaphore()._semlock.name


def hash_seed(context):
    return hash("a word")


def frozen(context):
    """How many objects its collections leave out, and how many they look through."""
    return gc.get_freeze_count(), len(gc.get_objects())


def threads(context):
    return torch.get_num_threads()


def total(context):
    """Sum of ranks through gloo, so that the group is really there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    value = torch.tensor([context.rank + 1])
    dist.all_reduce(value)
    return int(value)


def big(context, size):
    return bytes(size)


def unpicklable(context):
    return lambda: None


def remembers(context):
    context.cache["n"] = context.cache.get("n", 0) + 1
    return context.cache["n"]


def worlds_in_turn(context, count):
    """One World after another, each with something in the cache; then the first again. Which are open, what is kept."""
    things = []
    for number in range(count):
        things.append(mock.Mock(world=context.world(timeout_s=20.0 + number)))
        context.cache[number] = things[-1]
    again = context.world(timeout_s=20.0)
    again.barrier()
    assert again is things[0].world
    return [not thing.world.closed for thing in things], sorted(context.cache), [t.close.called for t in things]


def fault(context, kind, victim):
    """`victim` does `kind`; everybody else enters a collective that can't finish."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    if context.rank == victim:
        FAULTS[kind]()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    return context.rank


def blames(context, victim):
    """Survivors raise RankLost, the victim sleeps."""
    if context.rank == victim:
        time.sleep(600)
    raise RankLost(f"rank {victim} is silent", rank=victim)


def command(context, words):
    """`eprt` with this rank's words, to the end of the process."""
    from eprt.cli import main

    os._exit(main(words[context.rank]))


def compiles_for_a_minute(context, name, config, tokens, seconds):
    """An executor whose kernels aren't compiled yet, as the ranks see it."""
    time.sleep(60)


def _raise():
    raise ValueError("the victim's own words")


def _with_child():
    """Leave a grandchild that must not survive."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sys.stderr.write(f"grandchild {child.pid}\n")
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_gil():
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(600)


FAULTS = {
    "killed": die,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": lambda: sys.exit(0),
    "raises": _raise,
    "sleeps": lambda: time.sleep(600),
    "holds_gil": _hold_gil,
    "crashes": lambda: ctypes.string_at(1),
    "stopped_with_child": _with_child,
    "nothing": lambda: None,
}

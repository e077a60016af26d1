"""A World around an engine's process group: experts travel over it, and a lost rank is named before the engine ends."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch

from eprt.config import ParallelConfig
from eprt.placement import ExpertPlacement
from eprt.weights import ExpertWeights
from eprt.world import World
from eprt.world.collectives import Membership

POLL_S = 0.05  # an engine ends this process a moment after another rank has died
EXIT_S = 0.8  # longer than the guards need, from a closed connection to the verdict
TIMEOUT_S = 600.0  # the first start of a model compiles; engines' own start-up waits as long


def world_alone(device: torch.device) -> World:
    """Makes a World of this rank alone: the engine sums what the ranks compute."""
    return World(Membership(0, 1, device, ParallelConfig()), TIMEOUT_S)


def world_of(group: Any, device: torch.device, tp_group: Any, logger: logging.Logger) -> World:
    """Makes a World of a process group, ranks in its order, and lets it report lost ranks. Collective.

    Args:
        group: gloo on CPU, NCCL on GPUs.
        tp_group: the ranks that hold the same tokens; None where each has its own.
    """
    world = World.from_group(group, device, attention_tp_group=tp_group, timeout_s=TIMEOUT_S)
    reporter = threading.Thread(target=_report_failure, args=(world, logger), name="eprt-engine", daemon=True)
    reporter.start()
    at_exit = partial(_await_verdict, world, reporter)
    atexit.register(at_exit)
    # Engines' processes end without atexit; World's own finalizer, at 0, ends the guard.
    Finalize(None, at_exit, exitpriority=1)
    return world


def unscaled_of(world: World, loaded: ExpertWeights) -> set[str]:
    """Returns the matrices for which experts of any rank lack an input scale: an engine's rank knows its own alone.
    Collective."""
    names = [name for name in ("gate_up", "down") if hasattr(getattr(loaded, name), "input_scale")]
    if not names:
        return set()
    every = world.gather_words([int(getattr(loaded, name).input_scale is None) for name in names])
    return {name for name, *lacks in zip(names, *every, strict=True) if any(lacks)}


def without_scales(loaded: ExpertWeights, names: set[str]) -> ExpertWeights:
    """Returns the experts without the input scales of these matrices."""
    return replace(loaded, **{name: replace(getattr(loaded, name), input_scale=None) for name in names})


def redistribute(world: World, loaded: ExpertWeights, placement: ExpertPlacement) -> ExpertWeights:
    """Sends each rank's E / W experts, `loaded` in order, to the ranks whose slots name them. Collective.

    Returns one expert for each of this rank's slots; for an empty slot the one that `ExpertShard.experts` names.
    """
    held, ranks = loaded.num_local_experts, range(world.size)
    wanted = [sorted(set(placement.shard(rank).experts)) for rank in ranks]
    out = [[expert for expert in wanted[rank] if expert // held == world.rank] for rank in ranks]
    into = [[expert for expert in wanted[world.rank] if expert // held == rank] for rank in ranks]
    rows_out = torch.tensor([e - world.rank * held for part in out for e in part], device=loaded.device)
    arrived = {expert: row for row, expert in enumerate(e for part in into for e in part)}
    slots = torch.tensor([arrived[expert] for expert in placement.shard(world.rank).experts], device=loaded.device)

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.contiguous().view(torch.uint8).reshape(held, -1)
        width = rows.shape[1]
        received = rows.new_empty(len(arrived) * width)
        counts = ([len(part) * width for part in parts] for parts in (into, out))
        world.all_to_all(received, rows[rows_out.long()].flatten(), *counts)
        return received.view(-1, width)[slots].view(tensor.dtype).reshape(len(slots), *tensor.shape[1:])

    return loaded.map(exchanged)


def _report_failure(world: World, logger: logging.Logger) -> None:
    """Logs the lost rank as soon as it is known: the engine may end this process before a call raises RankLost."""
    while not world.closed and (guard := world._guard) is not None:
        if guard.verdict is not None:
            logger.error("eprt: %s", guard.verdict)
            return
        time.sleep(POLL_S)


def _await_verdict(world: World, reporter: threading.Thread) -> None:
    """Gives the guards time to agree at exit: the engine's own collective may fail, and end this process, before."""
    guard = world._guard
    if guard is not None and (guard.verdict is not None or guard.verdict_due):
        reporter.join(EXIT_S)

"""Ranks that die, are late, or disagree where nobody compares headers: jobs as in `dispatcher_jobs`, for Worlds of
their own, which are broken afterwards."""

from __future__ import annotations

import time

import torch

from eprt.dispatch import Dispatcher
from eprt.errors import RankLost
from eprt.ranks.launcher import RankContext, WorldFailed
from support.builders import caught, die
from support.jobs.dispatcher_jobs import Pair, batch, dispatcher_of, generator_of, make, stand_in

LIMIT_S = 5.0  # the Worlds' timeout: a lost rank is named within it
VICTIM = 1
H, K, CAPACITY = 2048, 2, 8


def impatient(context: RankContext, pair: Pair, limit_s: float = LIMIT_S) -> Dispatcher:
    dispatcher_of(context, pair, H, K, CAPACITY)  # compiles, on a World that has the patience for it
    world = context.world(timeout_s=limit_s)
    dispatcher = make(pair, world, H, K, CAPACITY)
    world.warmup(dispatcher)
    return dispatcher


def until_done(dispatcher: Dispatcher) -> None:
    """Until this rank's GPU has done its work. A host that waits like this hears of a lost peer while a kernel waits
    for it, and before the kernel's own limit."""
    if dispatcher.world.device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    while not done.query():
        dispatcher.check_peers()  # symm's kernels report, too
        time.sleep(1e-3)


def steps(dispatcher: Dispatcher, how: str) -> None:
    """The victim's sixth step: its peers are in the middle of their dispatch then, or of combine."""
    world = dispatcher.world
    x, topk = batch(generator_of(world, 7), 3, H, K)
    for step in range(10):
        fault = how if step == 5 and world.rank == VICTIM else ""
        if fault == "dies in dispatch":
            die()
        elif fault == "is late":
            time.sleep(world.timeout_s + 1.5)
        sent = dispatcher.dispatch(x, topk, CAPACITY)
        if fault == "dies in combine":
            die()
        dispatcher.combine(stand_in(sent, dispatcher), sent.handle)
        until_done(dispatcher)


def one_rank_dies(context: RankContext, pair: Pair, how: str) -> None:
    steps(impatient(context, pair), how)


def unheard(failure: WorldFailed, may_exit: bool) -> list[str]:
    """Which survivors of `one_rank_dies` did not name the victim within the limit.

    Args:
        may_exit: a survivor's host may sit in the waiting kernel or library: its guard then says who is lost, and ends
            the process.
    """
    last = failure.reports[VICTIM].log_tail
    assert "killed at " in last, f"the world failed before rank {VICTIM} was killed: {failure}"
    killed_at = float(last.rpartition("killed at ")[2].split()[0])
    silent: list[str] = []
    for report in failure.reports:
        if report.rank == VICTIM:
            continue
        named = report.lost_rank == VICTIM and report.raised.at - killed_at <= LIMIT_S
        exited = report.exit_code == RankLost.exit_code and f"rank {VICTIM} exited" in report.log_tail
        if not (named or (may_exit and exited)):
            silent.append(f"rank {report.rank} {report.describe()}\n{report.log_tail}")
    return silent


def one_rank_is_late(context: RankContext, pair: Pair, limit_s: float) -> tuple[str, str, float]:
    """Error, text and seconds of steps in which the victim sleeps past the limit."""
    dispatcher = impatient(context, pair, limit_s)
    started = time.monotonic()
    return *caught(lambda: steps(dispatcher, "is late")), time.monotonic() - started


def unequal_rows_unchecked(context: RankContext, pair: Pair) -> tuple[str, str]:
    """What an R that differs between ranks raises with validate="cheap"."""
    dispatcher = impatient(context, pair)
    x, topk = batch(generator_of(dispatcher.world, 8), 3, H, K)

    def step() -> None:
        sent = dispatcher.dispatch(x, topk, 4 + context.rank % 2)
        until_done(dispatcher)
        dispatcher.combine(stand_in(sent, dispatcher), sent.handle)

    return caught(step)

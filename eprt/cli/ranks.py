"""The ranks that a command drives: processes it starts itself, or the torchrun world that this process is one rank
of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eprt.cli.terminal import counted
from eprt.errors import ConfigError, EprtError, rebuild_error
from eprt.ranks.launcher import RankContext, WorldFailed, WorldPool
from eprt.world.groups import joins_torchrun, place
from eprt.world.process import number_of
from eprt.world.wire import gather_values

# A rank that dies or stops is noticed in seconds whatever these are. They bound a rank that is alive but behind: on
# GPUs it may be compiling kernels, which takes up to half an hour where nothing was compiled before.
JOB_TIMEOUT_S = 3600.0
BEHIND_TIMEOUT_S = {"cpu": 60.0, "cuda": 2400.0}
CPU_RANKS = 4  # where nobody says how many, and there is no GPU


class Ranks:
    """Runs jobs, `function(context, **kwargs)`, on every rank.

    Attributes:
        size, device: number of ranks, and "cpu" or "cuda".
        timeout_s: for the jobs' Worlds: how long a rank may be behind the others.
    """

    def __init__(self, owner: WorldPool | RankContext, timeout_s: float) -> None:
        self.size, self.device, self.timeout_s = owner.size, owner.device, timeout_s
        self._owner = owner

    def __str__(self) -> str:
        return f"{self.size} x {self.device}"

    def run(self, function: Callable[..., Any], *, within_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Returns the results in rank order; every rank of torchrun gets all of them.

        Raises the EprtError that all ranks raised, RankLost or WorldFailed if one broke. Ranks that this process
        started are ended after `within_s`, which is a WorldFailed that is `late`; torchrun's can't be.
        """
        if isinstance(self._owner, RankContext):
            found = function(self._owner, **kwargs)
            return gather_values(self._owner.world(timeout_s=self.timeout_s), found)
        try:
            return self._owner.run(function, timeout_s=within_s, **kwargs)
        except WorldFailed as failed:
            if (answer := _answer(failed)) is None:
                raise
            raise answer from None


def _answer(failed: WorldFailed) -> EprtError | None:
    """Returns the error that all ranks raised in the same words: that is an answer, not a failure of the world."""
    raised = {(r.raised.error, r.raised.message) if r.raised else None for r in failed.reports}
    same = raised.pop() if len(raised) == 1 else None
    if same is None or same[0] in ("RankLost", "EprtError"):
        return None
    error = rebuild_error(*same)
    return error if type(error).__name__ == same[0] else None


@contextmanager
def ranks(world: int | None, device: str) -> Iterator[Ranks]:
    """Yields the ranks for a command. On the way out, and on Ctrl-C, those it started are gone.

    Args:
        world: how many to start; torchrun's number wins if it started this process. None: one for each GPU, 4 on CPUs.
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: fewer than one rank, fewer GPUs than ranks were asked to use, or an environment that isn't
            torchrun's.
    """
    size, joined = world_size(world, device), joins_torchrun()
    local = number_of("LOCAL_WORLD_SIZE", 1) if joined and "LOCAL_WORLD_SIZE" in os.environ else size
    available = torch.cuda.device_count()
    if device == "cuda" and available < local:
        found = f"{counted(local, 'rank')} on this host, {counted(available, 'GPU')}"
        raise ConfigError(f"--device cuda: {found}; lower --world or use cpu")
    kind = ("cuda" if available >= local else "cpu") if device == "auto" else device
    if joined:
        context = RankContext(place()[0], size, kind)
        yield Ranks(context, BEHIND_TIMEOUT_S["cuda"])  # rank 0 judges results between jobs, while the others wait
        context.close()  # not after an error: leaving without a close is what tells the peers
        return
    with WorldPool(size, kind, timeout_s=JOB_TIMEOUT_S) as pool:
        yield Ranks(pool, BEHIND_TIMEOUT_S[kind])


def world_size(world: int | None, device: str) -> int:
    """Returns how many ranks `ranks` will yield for the same arguments. Raises ConfigError."""
    if world is None:
        world = (0 if device == "cpu" else torch.cuda.device_count()) or CPU_RANKS
    if world < 1:
        raise ConfigError(f"--world {world}: must be at least 1")
    return place()[1] if joins_torchrun() else world

"""Jobs for test_shared_exchange.py: what runs inside the ranks."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

from eprt.errors import RankLost
from eprt.world import World
from eprt.world.shared_exchange import open_exchange
from support.builders import NOTHING


def many(context, rounds: int) -> tuple[bool, bool]:
    """Words that every rank can foretell, with ranks that come late in turn."""
    world, right = context.world(), True
    for number in range(rounds):
        late = random.Random(number)
        if late.random() < 0.02 and late.randrange(world.size) == world.rank:
            sum(range(200_000))
        words = [[(number << 40) - rank, rank - number, -(1 << 63), (1 << 63) - 1] for rank in range(world.size)]
        right = right and world.gather_words(words[world.rank]) == [tuple(row) for row in words]
    return world.shares_words, right


def opened(context, folders: list[str]) -> tuple[bool, list[str], list[int]]:
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


def waits_for_a_rank_that_left(context) -> tuple[str, int]:
    """Rank 1 closes its World; the others wait in an exchange."""
    with World.from_env("cpu", timeout_s=20) as world:
        if context.rank == 1:
            return "left", 1
        try:
            world.gather_words([1])
        except RankLost as error:
            return error.why, error.rank
    return NOTHING, -1

"""Rendezvous at a store that still holds what earlier attempts and Worlds left there. Threads stand for ranks."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from eprt.errors import ConfigError, RankLost, WorldMismatch
from eprt.world import process, rendezvous, termination
from eprt.world.rendezvous import Rendezvous, claim_store, meet
from eprt.world.termination import AGENT, Termination

SIZE = 3


def come(
    store: dist.Store,
    ranks: range | list[int],
    timeout_s: float = 20.0,
    late: int = -1,
    host: str = "the store",
    layouts: tuple[str, ...] = ("",) * SIZE,
    refuses: int = -1,
) -> list[Rendezvous | str]:
    """What each of these ranks got: a rendezvous, or the error's text."""

    def one(rank: int) -> Rendezvous | str:
        time.sleep(0.2 if rank == late else 0.0)
        refusal = ConfigError("no such GPU") if rank == refuses else None
        try:
            return meet(store, "label", rank, SIZE, timeout_s, 10.0, host, layouts[rank], refusal)
        except RankLost as lost:
            return f"{lost.rank} {lost.why}: {lost}"
        except WorldMismatch as error:
            return str(error)
        except ConfigError as error:
            return f"own: {error}"

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(one, ranks))


def test_ranks_that_mean_different_worlds_all_say_so() -> None:
    """Before a group is made, that would wait for ranks of another one."""
    (told,) = set(come(dist.HashStore(), range(SIZE), layouts=("1 of 3", "3 of 3", "3 of 3")))
    assert isinstance(told, str)
    title, head, *rows = (line.split("  process")[0] for line in told.splitlines())
    assert title == "the ranks disagree about the world's layout; start all of them alike:"
    assert head.split() == ["rank", "layout"]
    assert rows == ["0     1 of 3", "1     3 of 3", "2     3 of 3"]


@pytest.mark.parametrize("late", range(SIZE))
def test_every_rendezvous_has_a_name_of_its_own(late: int) -> None:
    store = dist.HashStore()
    names = set()
    for _ in range(3):
        found = come(store, range(SIZE), late=late)
        (name,) = {met.nonce for met in found}
        names.add(name)
    assert len(names) == 3


def test_an_attempt_that_died_on_the_way_leaves_nothing_that_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asked and ranks 0 and 1 were there; then all ended, and torchrun started them again. Rank 0 is the last to
    come the second time."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    store = dist.HashStore()
    assert all("ranks [2] of 3 didn't come within 0.3 s" in text for text in come(store, [0, 1], timeout_s=0.3))
    monkeypatch.setattr(termination, "started_at", process.boot_time)
    found = come(store, range(SIZE), late=0, host=AGENT)
    assert len({met.nonce for met in found}) == 1


@pytest.mark.parametrize("host", [AGENT, "the store"])
@pytest.mark.parametrize("late", range(SIZE))
def test_who_comes_too_late_hears_at_once_how_it_ended_and_meets_the_others_the_next_time(late: int, host: str) -> None:
    store, rest = dist.HashStore(), [rank for rank in range(SIZE) if rank != late]
    words = set(come(store, rest, timeout_s=0.3, host=host))
    started = time.monotonic()
    assert {*come(store, [late], host=host)} == words
    assert time.monotonic() - started < 2.0
    assert len({met.nonce for met in come(store, range(SIZE), host=host)}) == 1


@pytest.mark.parametrize(
    ("host", "restarts", "boot", "age", "ours"),
    [
        (AGENT, "0", "another", 5.0, True),  # no other attempt is possible
        ("rank 0", "3", "another", 5.0, True),  # nor in this store
        (AGENT, "3", "", 5.0, False),  # another host's clock: unknown, so it waits to be asked anew
        (AGENT, "3", "mine", 5.0, False),  # started after that end
        (AGENT, "3", "mine", -5.0, True),
    ],
)
def test_an_earlier_attempts_end_is_none_of_this_one(
    monkeypatch: pytest.MonkeyPatch, host: str, restarts: str, boot: str, age: float, ours: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    at = process.started_at() - age
    found = Termination("exited", (1,), "gone", process.boot_id() if boot == "mine" else boot, at)
    assert found.of_this_attempt(host) is ours


def test_the_generation_is_the_most_that_any_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0, 2, 0]
    monkeypatch.setattr(process, "restarts", lambda: counts.pop() if counts else 0)
    assert [found.generation for found in come(dist.HashStore(), range(SIZE))] == [2] * SIZE


@pytest.mark.parametrize("name", ["a job", "a\tjob\u00a0", "\udcff", "long" * 60])
def test_a_job_of_any_name_knows_its_own_store(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("EPRT_JOB", name)
    store = dist.HashStore()
    for _ in range(2):
        claim_store(store, 5.0, "rank 0")
    assert len({met.nonce for met in come(store, range(SIZE))}) == 1
    monkeypatch.setenv("EPRT_JOB", "another")
    with pytest.raises(WorldMismatch, match="belongs to job"):
        claim_store(store, 5.0, "rank 0")


def test_what_is_wrong_with_one_host_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [ConfigError("GLOO_SOCKET_IFNAME='x'"), *[lambda: None] * SIZE]

    def listen(members: list[object]) -> socket.socket:
        del members
        if isinstance(outcome := outcomes.pop(0), ConfigError):
            raise outcome
        return socket.create_server(("127.0.0.1", 0))

    monkeypatch.setattr(rendezvous, "listen", listen)
    found = [str(text) for text in come(dist.HashStore(), range(SIZE))]
    assert sum(text.startswith("own: GLOO") for text in found) == 1, found
    told = {text for text in found if not text.startswith("own: ")}
    assert len(told) == 1
    assert "raised: ConfigError: GLOO_SOCKET_IFNAME='x'" in told.pop()


@pytest.mark.parametrize("late", range(SIZE))
@pytest.mark.parametrize("refuses", range(SIZE))
def test_a_rank_that_cannot_take_part_is_not_waited_for(refuses: int, late: int) -> None:
    store, started = dist.HashStore(), time.monotonic()
    found = come(store, range(SIZE), late=late, refuses=refuses, layouts=("mine", "mine", "mine"))
    assert time.monotonic() - started < 5.0
    assert found.pop(refuses) == "own: no such GPU"
    said = f"rank {refuses} raised: ConfigError: no such GPU; others still wait for it. Restart the job."
    assert found == [f"{refuses} raised: {said}"] * 2
    assert len({met.nonce for met in come(store, range(SIZE))}) == 1


def test_a_server_that_exits_waits_for_late_ranks_where_no_thread_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 makes none at interpreter exit."""
    store = dist.HashStore()
    come(store, [0], timeout_s=2.0, host="rank 0", refuses=0)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't create new thread")))
    rendezvous._ENDED[-1].deadline = time.monotonic() + 0.5
    started = time.monotonic()
    rendezvous.await_late()
    assert time.monotonic() - started > 0.4


def test_a_refusal_is_told_at_the_rendezvous_that_rank_0_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A World of an attempt before this one was made in the store; then torchrun started the ranks again."""
    store = dist.HashStore()
    come(store, range(SIZE), host=AGENT)
    rendezvous._JOINED.clear()
    monkeypatch.setattr(process, "_PROCESS", "another")
    monkeypatch.setattr(process, "boot_id", lambda: "another")
    found = come(store, range(SIZE), timeout_s=3.0, late=0, refuses=1, host=AGENT)
    assert found.pop(1) == "own: no such GPU"
    assert all("rank 1 raised: ConfigError: no such GPU" in said for said in found), found


def test_ranks_that_all_refuse_meet_at_their_next_call() -> None:
    store = dist.HashStore()

    def one(rank: int) -> str:
        time.sleep(0.2 * rank)
        with pytest.raises((ConfigError, RankLost), match="no such GPU"):
            meet(store, "label", rank, SIZE, 20.0, 10.0, "the store", refusal=ConfigError("no such GPU"))
        return meet(store, "label", rank, SIZE, 20.0, 10.0, "the store").nonce

    with ThreadPoolExecutor(SIZE) as pool:
        assert len(set(pool.map(one, range(SIZE)))) == 1


@pytest.mark.parametrize("before", [False, True])
def test_who_does_not_come_is_named(before: bool) -> None:
    for missing in range(SIZE):
        store = dist.HashStore()
        if before:  # an earlier World of the same ranks
            come(store, range(SIZE))
        rest = [rank for rank in range(SIZE) if rank != missing]
        for text in come(store, rest, timeout_s=0.3):
            assert text.startswith(f"{missing} silent: ranks [{missing}] of 3 didn't come")

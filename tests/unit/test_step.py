"""A step: agreed once, the same on every rank, and a rank that does something else is the same table on all."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.builders import NOTHING, told_alike
from support.jobs import step_jobs as jobs

from eprt.errors import UsageError
from eprt.world import World


def test_every_rank_sees_all_tokens_and_words(pools) -> None:
    counts, words = [3, 0, 7], [(1, -5), (0, 1 << 62), (2, 2)]
    expected = [(0, (3, 0, 7), tuple(words)), 7, (70, (3, 0, 7), tuple(words)), 7]
    assert pools(3).run(jobs.seen, counts=counts, words=words) == [expected] * 3


def test_the_smallest_step_is_of_one_token(pools) -> None:
    assert [found[1] for found in pools(2).run(jobs.seen, counts=[0, 0], words=[(), ()])] == [1, 1]


@pytest.mark.parametrize(("attention_tp", "counts"), [(1, [4, 0, 9, 1]), (1, [0, 0, 0, 0]), (2, [5, 2]), (2, [7, 0])])
def test_layers_of_a_step_compute_what_they_do_outside(pools, attention_tp: int, counts: list[int]) -> None:
    found = pools(4).run(jobs.same_as_outside, counts=counts, attention_tp=attention_tp)
    assert found == [0.0] * 4


def test_layers_of_a_step_ask_no_peer_for_R(pools) -> None:
    assert pools(2).run(jobs.no_exchange_inside) == [[1, 0, 1]] * 2


NINE = tuple(range(9))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"number": 11}, "WorldMismatch: the ranks disagree about this call (step)"),
        ({"num_tokens": -1}, "InputError: rank 1: num_tokens -1: expected an int from 0"),
        ({"num_tokens": "4"}, "InputError: rank 1: num_tokens '4': expected an int from 0"),
        ({"num_tokens": True}, "InputError: rank 1: num_tokens True: expected an int from 0"),
        ({"number": -1}, "InputError: rank 1: number -1: expected an int from 0"),
        ({"words": (1,)}, "WorldMismatch: the ranks disagree about this call (words)"),
        ({"words": "done"}, "InputError: rank 1: words 'done': expected a sequence of at most 8 ints"),
        ({"words": (2**63,)}, "InputError: rank 1: words (9223372036854775808,): 9223372036854775808 is no int64"),
        ({"words": NINE}, f"InputError: rank 1: words {NINE}: expected a sequence of at most 8 ints"),
        (
            {"num_tokens": 3},
            "InputError: rank 1: a layer gets 4 tokens in a step that this rank began with num_tokens=3: say the "
            "largest",
        ),
    ],
)
def test_what_one_rank_says_otherwise_is_the_same_error_on_all(pools, wrong: dict, says: str) -> None:
    assert told_alike(pools(4).run(jobs.disagree, wrong=wrong)).startswith(says)


def test_a_table_shows_every_ranks_step(pools) -> None:
    told = pools(4).run(jobs.disagree, wrong={"number": 11})[0][0]
    assert [line.split() for line in told.splitlines()[2:]] == [["0", "10"], ["1", "11"], ["2", "10"], ["3", "10"]]


@pytest.mark.parametrize(
    ("ranks", "job", "differing"),
    [(4, jobs.groups_that_differ, "group_tokens"), (2, jobs.a_barrier_instead, "operation")],
    ids=["an attention-TP group says one number", "a step never meets another call"],
)
def test_ranks_that_disagree_are_told_in_the_same_words(pools, ranks: int, job, differing: str) -> None:
    (told,) = set(pools(ranks).run(job))
    assert told.startswith(f"WorldMismatch: the ranks disagree about this call ({differing})")


@pytest.mark.parametrize(("how", "rank_1"), [(0, "0 0"), (1, "0"), (2, None)])
def test_ranks_that_called_other_layers_are_told_at_the_next_step(pools, how: int, rank_1: str | None) -> None:
    (told, then), other = pools(2).run(jobs.other_layers, how=how)
    assert (told, then) == other
    assert then == NOTHING
    if rank_1 is None:  # a host that made no call replayed a graph
        assert told == NOTHING
    else:
        assert told.startswith("WorldMismatch: the ranks disagree about this call (fingerprint")
        if how == 1:
            assert "layers of the last step" in told
            assert told.splitlines()[-1].endswith(f" {rank_1}")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_call_that_some_ranks_broke_off_is_told_at_the_next_step(pools, ranks: tuple[int, ...]) -> None:
    """Their peers may have got NaN for it."""
    (told, then), other = pools(2).run(jobs.a_call_broken_off, ranks=ranks)
    assert (told, then) == other
    assert then == NOTHING
    if ranks == (0, 1):
        assert told == then
    else:
        assert told.startswith("WorldMismatch: the ranks disagree about this call (fingerprint")
        assert told.splitlines()[-1].endswith("0 (0 broken off)")


@pytest.mark.parametrize(
    ("kind", "says"),
    [("on every rank", "InputError: the caller's own"), ("on rank 1", "InputError: rank 1: hidden_states is (4, 15)")],
)
def test_after_an_error_that_all_ranks_raised_the_next_step_works(pools, kind: str, says: str) -> None:
    assert told_alike(pools(2).run(jobs.an_error_inside, kind=kind)).startswith(says)


def test_a_rank_that_swallows_its_own_error_is_found_by_its_next_call(pools) -> None:
    told = told_alike(pools(2).run(jobs.swallowed))
    assert told.startswith("WorldMismatch: the ranks disagree about this call (operation)")


def test_a_step_inside_a_step_is_refused(pools) -> None:
    for told, tokens in pools(2).run(jobs.nested):
        assert told.startswith("UsageError: step ")
        assert tokens == (2, 2)


def test_threads_of_a_step_see_it(pools) -> None:
    assert pools(2).run(jobs.from_a_thread) == [True, True]


def test_a_world_of_one_has_steps_too() -> None:
    empty, tokens, refusal = jobs.alone()
    assert (empty, tokens) == (1, (2,))
    assert refusal.startswith("a layer gets 3 tokens in a step that this rank began with num_tokens=2")
    assert "one thread at a time" in refusal


@pytest.mark.parametrize("in_thread", [False, True])
def test_sigterm_is_handled_as_before_once_no_world_drains(in_thread: bool) -> None:
    """Whichever World closes first, and in whatever thread; forked children never drain."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(os.getpid()))
    try:
        with World.from_env("cpu") as first, World.from_env("cpu") as second, ThreadPoolExecutor(1) as thread:
            for world in (first, first, second):
                world.drain_on_sigterm()
            first.close()
            if (child := os.fork()) == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(heard != [os.getpid()])
            assert os.waitpid(child, 0)[1] == 0
            signal.raise_signal(signal.SIGTERM)
            assert (second._lifecycle.asked_to_leave, heard) == (True, [])
            for wrong in (first.drain_on_sigterm, thread.submit(World.from_env("cpu").drain_on_sigterm).result):
                with pytest.raises(UsageError, match=r"world is closed|in another thread"):
                    wrong()
            thread.submit(second.close).result() if in_thread else second.close()
            signal.raise_signal(signal.SIGTERM)
            assert heard == [os.getpid()]
    finally:
        signal.signal(signal.SIGTERM, before)

"""Words through shared memory: torn rows are read again, ranks that share no memory keep to sockets."""

from __future__ import annotations

import itertools
import mmap
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.jobs import world_jobs as jobs

from eprt.errors import WorldMismatch
from eprt.ranks.launcher import launch
from eprt.world.shared_exchange import MAX_WORDS, SharedExchange, _create, _open

ROW = 512


def ranks(size: int) -> tuple[mmap.mmap, list[SharedExchange]]:
    memory = mmap.mmap(-1, 2 * size * ROW)
    return memory, [SharedExchange(memory, rank, size) for rank in range(size)]


def row(number: int, words: list[int], count: int | None = None) -> bytes:
    """As the layout says: checksum, number, how many, words."""
    body = struct.pack(f"<{2 + len(words)}q", number, len(words) if count is None else count, *words)
    return struct.pack("<q", zlib.crc32(body)) + body


def patience(looks: int):
    """Raises TimeoutError after so many looks."""
    yield from itertools.repeat(None, looks)
    raise TimeoutError


def test_every_rank_gets_every_row_whoever_is_late(pools) -> None:
    assert pools(4).run(jobs.many_exchanges, rounds=600) == [(True, True)] * 4


def test_a_row_is_taken_only_whole() -> None:
    """Every way in which a part of the old row can still be seen behind the new one's number."""
    new, old = row(1, [11, -12, 13]), row(0, [1, 2, 3])
    for taken in itertools.product((True, False), repeat=len(new) // 8):
        memory, (first, _) = ranks(2)
        start = (2 + 1) * ROW  # exchange 1 is in the second buffer
        mixed = b"".join((new if fresh else old)[8 * i : 8 * i + 8] for i, fresh in enumerate(taken))
        memory[start : start + len(mixed)] = mixed
        if mixed == new:
            assert first.gather([0, 0, 0], patience(2)) == [(0, 0, 0), (11, -12, 13)]
            continue
        with pytest.raises(TimeoutError):
            first.gather([0, 0, 0], patience(2))


@pytest.mark.parametrize("count", [-1, MAX_WORDS + 1, 1 << 40])
def test_a_count_that_can_not_be_is_no_row(count: int) -> None:
    memory, (first, _) = ranks(2)
    memory[3 * ROW : 3 * ROW + len(row(1, [5], count))] = row(1, [5], count)
    with pytest.raises(TimeoutError):
        first.gather([5], patience(2))


def test_other_numbers_of_words_are_a_mismatch_on_every_rank_and_the_next_exchange_works() -> None:
    _, both = ranks(2)

    def work(rank: int) -> tuple[str, list[tuple[int, ...]]]:
        try:
            both[rank].gather([1] * (1 + rank), itertools.repeat(None))
        except WorldMismatch as error:
            return str(error), both[rank].gather([rank], itertools.repeat(None))
        return "nothing was raised", []

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    assert found[0] == found[1]
    assert found[0][0].startswith("the ranks exchange different numbers of words (1, 2, by rank)")
    assert found[0][1] == [(0,), (1,)]


def test_after_an_interrupt_a_rank_first_ends_the_exchange_it_left() -> None:
    """Else it would overwrite rows that a slow peer still reads."""
    _, (first, second) = ranks(2)
    with pytest.raises(TimeoutError):
        first.gather([1], patience(3))
    found: list[list[tuple[int, ...]]] = []
    again = threading.Thread(target=lambda: found.append(first.gather([2], itertools.repeat(None))))
    again.start()
    assert second.gather([10], itertools.repeat(None)) == [(1,), (10,)]
    assert second.gather([20], itertools.repeat(None)) == [(2,), (20,)]
    again.join()
    assert found == [[(2,), (20,)]]


def test_the_file_is_the_ranks_own_and_gone_at_once(pools, tmp_path: Path) -> None:
    found = pools(2).run(jobs.opened_exchange, folders=[str(tmp_path)] * 2)
    assert [(shares, left) for shares, left, _ in found] == [(True, [])] * 2
    assert set(found[0][2]) == {0o600}


@pytest.mark.parametrize("folders", [("0", "1"), ("0", "absent"), ("absent", "1"), ("absent", "absent")])
def test_ranks_that_share_no_folder_keep_to_sockets(pools, tmp_path: Path, folders: tuple[str, str]) -> None:
    """Containers that have a name in common, and ranks whose folder can't be written."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    found = pools(2).run(jobs.opened_exchange, folders=[str(tmp_path / name) for name in folders])
    assert [(shares, left) for shares, left, _ in found] == [(False, [])] * 2


def test_a_file_of_the_same_name_is_not_enough(tmp_path: Path) -> None:
    """Another World's, or one that only looks the same."""
    name, memory = _create(tmp_path, 2, b"a" * 16)
    assert memory is not None
    seen = _open(tmp_path / name, 2, b"a" * 16)
    assert seen is not None
    assert _open(tmp_path / name, 2, b"b" * 16) is None
    assert _open(tmp_path / name, 3, b"a" * 16) is None
    assert _open(tmp_path / "another", 2, b"a" * 16) is None
    (tmp_path / "link").symlink_to(tmp_path / name)
    assert _open(tmp_path / "link", 2, b"a" * 16) is None


def test_ranks_of_several_hosts_keep_to_sockets() -> None:
    assert launch(jobs.on_two_hosts, 2) == [(False, [(3, 4), (7,), (7,)])] * 2

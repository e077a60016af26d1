"""Attacks on a World that has met, by who reaches its store and its guards' ports: nothing they do changes who is lost.

test_faults.py has garbage, test_hostile_checkpoint.py has files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.jobs import attack_jobs as jobs

from eprt.balance.counts import write_counts
from eprt.bench.report import Report
from eprt.cli.journal import Journal
from eprt.errors import ConfigError
from eprt.files import save_figure, write_whole
from eprt.placement.file import PlacementFile
from eprt.ranks.launcher import WorldFailed, launch
from eprt.world.links import MAX_MESSAGE_BYTES, Links

KEY = b"k" * 32


def test_who_comes_late_enters_no_guard_and_puts_nobody_out() -> None:
    """It reads and rewrites the whole store. Of the numbers that it reads none is a key, and of what it writes nothing
    is believed, neither by who goes on nor by who finds together again."""
    with pytest.raises(WorldFailed) as failure:  # rank 2 dies, as it should
        launch(jobs.attacked, 4, timeout_s=60.0, grace_s=25.0)
    reports = {report.rank: report for report in failure.value.reports}
    assert [rank for rank, report in reports.items() if report.outcome != "ok"] == [2], failure.value
    attacker, *others = (reports[rank].result for rank in (0, 1, 3))
    assert attacker.pop("tried") > 2
    assert attacker.pop("entered") == []
    assert not attacker.pop("outside")
    expected = {"lost": (2,), "survivors": (2,), "alive": (True, True, False, True)}
    assert [attacker, *others] == [expected] * 3


class Wire:
    """Rank 1's guard calls rank 0's through somebody who records what it says."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.lost: list[int] = []
        self.recorded = b""

    def links(self, rank: int, key: bytes = KEY) -> Links:
        return Links(rank, range(3), key, list, lambda peer, said: self.heard.append((peer, said)), self.lost.append)

    async def start(self) -> None:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.address = listeners[0].getsockname()
        self.called, self.caller = self.links(0), self.links(1)
        await self.called.start(listeners[0], {0: self.address, 1: ("", 0)})
        relay = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        between = relay.sockets[0].getsockname()
        await self.caller.start(listeners[1], {0: between, 1: ("", 0)})

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, self.onward = await asyncio.open_connection(*self.address)
        answers = asyncio.create_task(self._pass(back, writer, record=False))
        await self._pass(reader, self.onward, record=True)
        self.onward.close()
        await answers
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bool) -> None:
        while data := await reader.read(4096):
            self.recorded += data if record else b""
            writer.write(data)


async def until(there: Callable[[], object]) -> None:
    for _ in range(500):
        if there():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never came")


def played(attack: Callable[[Wire], Awaitable[None]]) -> None:
    async def play() -> None:
        wire = Wire()
        await wire.start()
        await until(lambda: 1 in wire.called and 0 in wire.caller)
        try:
            await attack(wire)
        finally:
            wire.caller.close()
            wire.called.close()
            await asyncio.sleep(0.1)  # the relay sees it

    asyncio.run(play())


def test_a_recorded_handshake_opens_nothing() -> None:
    async def attack(wire: Wire) -> None:
        wire.caller.send(0, {"said": 1})
        await until(lambda: wire.heard)
        wire.caller.close()
        await until(lambda: wire.lost)
        reader, writer = await asyncio.open_connection(*wire.address)
        writer.write(wire.recorded)
        await asyncio.wait_for(reader.read(), 3.0)  # it is hung up on
        assert 1 not in wire.called
        assert wire.heard == [(1, {"said": 1})]

    played(attack)


def test_a_recorded_message_is_believed_once() -> None:
    async def attack(wire: Wire) -> None:
        before = len(wire.recorded)
        wire.caller.send(0, {"said": 1})
        await until(lambda: wire.heard)
        wire.onward.write(wire.recorded[before:])
        await until(lambda: wire.lost)
        assert wire.heard == [(1, {"said": 1})]

    played(attack)


def test_only_ranks_of_the_world_enter_even_with_the_key() -> None:
    async def attack(wire: Wire) -> None:
        for rank, theirs in ((7, KEY), (2, b"x" * 32), (0, KEY)):
            stranger = wire.links(rank, theirs)
            stranger._peers = {0}
            await stranger.start(socket.create_server(("127.0.0.1", 0)), {})
            connecting = asyncio.create_task(stranger._connect(0, wire.address))
            await asyncio.sleep(0.3)
            assert rank not in wire.called
            connecting.cancel()
            stranger.close()
        assert wire.heard == []

    played(attack)


def test_idle_strangers_cost_one_line_and_no_rank_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def attack(wire: Wire) -> None:
        idle = [await asyncio.open_connection(*wire.address) for _ in range(300)]
        late = wire.links(2)
        await late.start(socket.create_server(("127.0.0.1", 0)), {0: wire.address})
        await until(lambda: 2 in wire.called)
        assert len(wire.called._unproven) < 100
        late.close()
        for _, writer in idle:
            writer.close()

    with caplog.at_level(logging.WARNING):
        played(attack)
    (line,) = caplog.messages
    assert "too many connections that proved nothing" in line
    assert len(line) < 300
    assert not any(record.exc_info for record in caplog.records)


STRANGERS = """
import socket, sys, time
there = [socket.socket() for _ in range(512)]
for each in there:
    each.setblocking(False)  # who isn't accepted isn't waited for
    each.connect_ex(("127.0.0.1", int(sys.argv[1])))
print("there", flush=True)
sys.stdin.readline()
"""


def test_idle_strangers_that_take_all_descriptors_cost_one_line_each_way(caplog: pytest.LogCaptureFixture) -> None:
    """They come faster than they are hung up on, and this process may open few files."""

    async def attack(wire: Wire) -> None:
        few = len(os.listdir("/proc/self/fd")) + 40
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        command = [sys.executable, "-c", STRANGERS, str(wire.address[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
            try:
                said = await asyncio.to_thread(strangers.stdout.readline)  # type: ignore[union-attr]
                assert said == b"there\n"
                await asyncio.sleep(2.5)  # asyncio accepts again after a second
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                strangers.communicate()
        wire.caller.send(0, {"said": 1})
        await until(lambda: wire.heard)

    with caplog.at_level(logging.WARNING):
        played(attack)
    assert sum(map(len, caplog.messages)) < 600, caplog.messages
    assert caplog.messages
    assert not any(record.exc_info for record in caplog.records)


def test_a_message_has_a_limit() -> None:
    async def attack(wire: Wire) -> None:
        wire.caller.send(0, "x" * (MAX_MESSAGE_BYTES + 1))
        await until(lambda: wire.lost)
        assert wire.heard == []

    played(attack)


WRITERS: dict[str, Callable[[Path], object]] = {
    "counts": lambda path: write_counts(path, {0: [1, 2]}),
    "placement": PlacementFile(2, 1, {None: (0, 1)}).write,
    "report": Report("layer", []).write,
    "journal": lambda path: Journal(path, {}, 1, []).close(),
    "plot": lambda path: save_figure(pytest.importorskip("matplotlib.figure").Figure(), path),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("held", ["precious", ""])
@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard"])
def test_a_strangers_link_leads_no_writer_into_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, held: str, kind: str
) -> None:
    """A name that the user gives is a link already, in a folder that others write into."""
    (shared := tmp_path / "shared").mkdir()
    output, precious = shared / "result.png", tmp_path / "precious"
    if kind != "dangling":
        precious.write_text(held)
    output.hardlink_to(precious) if kind == "hard" else output.symlink_to(precious)
    if kind != "hard":
        os.lchown(output, 4321, 4321) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with suppress(ConfigError):
        WRITERS[writer](output)
    if kind == "dangling":
        assert not precious.exists()
    else:
        assert precious.read_text() == held


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_of_ones_own_is_followed(tmp_path: Path, writer: str) -> None:
    output, real = tmp_path / "result.png", tmp_path / "real.png"
    output.symlink_to(real)
    WRITERS[writer](output)
    assert real.stat().st_size > 0
    assert output.is_symlink()


def test_a_link_put_where_a_result_will_be_written_leads_nowhere(tmp_path: Path) -> None:
    """Somebody else may write into the folder; what the link points to is not theirs."""
    output, precious = tmp_path / "result.json", tmp_path / "precious"
    precious.write_text("precious")
    for name in ("result.json.new", "result.json.tmp", ".result.json"):
        (tmp_path / name).symlink_to(precious)
    write_whole(output, "found")
    assert (output.read_text(), precious.read_text()) == ("found", "precious")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink()) == ["precious", "result.json"]

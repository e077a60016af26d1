"""Two and three hosts of namespaces: what breaks between hosts, and what their ranks say. scripts/test_hosts.sh."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.hosts import ROOT, Network, diary, network, progress, until
from support.jobs.resumable import ITEMS, KILLED_BEFORE

TIMEOUT_S = 6.0
SILENT_S = TIMEOUT_S / 2
SLACK_S = 4.0  # six ranks on two cores
PORTS = itertools.count(29600)
PROGRAM = ROOT / "tests/support/jobs/resumable.py"
Note = Callable[..., None]


class Job:
    """Bare ranks, two on each host, without any launcher."""

    def __init__(self, made: Network, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.network, self.folder, self.timeout_s = made, folder, timeout_s
        self.size = 2 * len(made.hosts)
        self.port = next(PORTS)
        folder.mkdir()

    def start(self, master: str | None = None) -> None:
        for rank in range(self.size):
            host = self.network.hosts[rank // 2]
            address = master or self.network.hosts[0].address
            where = {"MASTER_ADDR": address, "MASTER_PORT": self.port, "WORLD_SIZE": self.size}
            host.rank(self.folder, rank, self.timeout_s, LOCAL_RANK=rank % 2, LOCAL_WORLD_SIZE=2, **where)

    def steps(self, more: int = 3) -> None:
        now = max(diary(self.folder, rank).get("steps", 0) for rank in range(self.size))
        until(self.folder, range(self.size), lambda seen: seen.get("steps", 0) >= now + more)

    def ends(self) -> list[dict[str, Any]]:
        """Returns every rank's notes, once all have ended."""
        until(self.folder, range(self.size), lambda seen: "outcome" in seen)
        return [diary(self.folder, rank) for rank in range(self.size)]

    def stop(self) -> None:
        """Ends the job in order; every output was right."""
        (self.folder / "stop").touch()
        found = self.ends()
        assert [seen["outcome"] for seen in found] == ["ok"] * self.size, found
        assert {seen["ranks_per_host"] for seen in found} == {2}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Network]]:
    """`hosts(names, kind)`: these hosts, made once; only the last asked for are there."""
    made: dict[tuple[object, ...], Any] = {}

    def make(names: Sequence[str], kind: str = "ipv4") -> Network:
        key = (*names, kind)
        if key not in made:
            end()
            manager = network(tmp_path_factory.mktemp("hosts"), names, kind)
            made[key] = manager, manager.__enter__()
            for host in made[key][1].hosts:
                host.start()
        return made[key][1]

    def end() -> None:
        while made:
            made.popitem()[1][0].__exit__(None, None, None)

    yield make
    end()


def verdicts(found: Sequence[dict[str, Any]], ranks: Sequence[int]) -> tuple[str, list[int], str]:
    """(why, ranks named, words) of these ranks: all say the same."""
    said = {(found[rank]["why"], tuple(found[rank]["ranks"]), found[rank]["words"]) for rank in ranks}
    assert len(said) == 1, said
    why, named, words = said.pop()
    return why, list(named), words


def took(found: Sequence[dict[str, Any]], at: float, ranks: Sequence[int]) -> float:
    return max(found[rank]["verdict_at"] for rank in ranks) - at


@pytest.mark.parametrize(("names", "kind"), [(("node", "node"), "ipv4"), (("a", "b"), "ipv6")])
def test_ranks_meet_and_step(hosts: Callable[..., Network], tmp_path: Path, note: Note, names: Any, kind: str) -> None:
    job = Job(hosts(names, kind), tmp_path / "job")
    job.start()
    job.steps()
    job.stop()
    note("none" + ", equal names" * (names[0] == names[1]), "2 x 2", kind, None, 0, "-")


def test_a_cable_that_is_pulled_between_two_hosts_cuts_in_two(
    hosts: Callable[..., Network], tmp_path: Path, note: Note
) -> None:
    made = hosts(("a", "b"), "ipv6")
    job = Job(made, tmp_path / "job")
    job.start()
    job.steps()
    at = time.monotonic()
    made.hosts[1].cable(False)
    found = job.ends()
    made.hosts[1].cable(True)
    why, named, words = verdicts(found, range(4))
    assert (why, named) == ("silent", [])
    assert "the network is cut in two: ranks [0, 1] and ranks [2, 3] don't hear each other" in words
    seconds = took(found, at, range(4))
    assert seconds < SILENT_S + SLACK_S
    note("cable pulled: two halves", "2 x 2", "ipv6", seconds, SILENT_S + 1, "nobody")


def three(hosts: Callable[..., Network], tmp_path: Path) -> tuple[Network, Job]:
    made = hosts(("a", "b", "c"))
    job = Job(made, tmp_path / "job")
    job.start()
    job.steps()
    return made, job


@pytest.mark.parametrize("cut", [0, 2])
def test_a_host_that_is_cut_off_says_so_and_the_others_name_it(
    hosts: Callable[..., Network], tmp_path: Path, note: Note, cut: int
) -> None:
    """Host 0 serves the store."""
    made, job = three(hosts, tmp_path)
    lost = [2 * cut, 2 * cut + 1]
    others = [rank for rank in range(6) if rank not in lost]
    at = time.monotonic()
    made.hosts[cut].cable(False)
    found = job.ends()
    made.hosts[cut].cable(True)
    assert verdicts(found, others)[:2] == ("silent", lost)
    why, named, words = verdicts(found, lost)
    assert (why, named) == ("silent", lost)
    assert f"ranks {lost} silent: they hear none of ranks {others}: they are cut off" in words
    seconds = took(found, at, range(6))
    assert seconds < SILENT_S + SLACK_S
    note(f"cable pulled: host {cut}, both sides", "3 x 2", "ipv4", seconds, SILENT_S + 1, lost)


def test_a_host_that_hears_but_is_not_heard_is_named_by_all(
    hosts: Callable[..., Network], tmp_path: Path, note: Note
) -> None:
    made, job = three(hosts, tmp_path)
    at = time.monotonic()
    with made.hosts[2].drop("output", "oifname", "eth0"):
        found = job.ends()
    assert verdicts(found, range(4))[:2] == ("silent", [4, 5])
    assert verdicts(found, [4, 5])[1] == [4, 5]
    seconds = took(found, at, range(6))
    assert seconds < 2 * SILENT_S + SLACK_S
    note("one-way loss: nothing leaves host 2", "3 x 2", "ipv4", seconds, 2 * SILENT_S, [4, 5])


def test_a_host_whose_processes_stop_or_die_is_named(hosts: Callable[..., Network], tmp_path: Path, note: Note) -> None:
    for number, why, limit in ((signal.SIGSTOP, "silent", SILENT_S + 1), (signal.SIGKILL, "exited", 1.0)):
        folder = tmp_path / why
        folder.mkdir()
        made, job = three(hosts, folder)
        at = time.monotonic()
        made.hosts[1].signal(number)
        until(job.folder, (0, 1, 4, 5), lambda seen: "outcome" in seen)
        found = [diary(job.folder, rank) for rank in range(6)]
        made.hosts[1].signal(signal.SIGKILL)
        assert verdicts(found, (0, 1, 4, 5))[:2] == (why, [2, 3])
        seconds = took(found, at, (0, 1, 4, 5))
        assert seconds < limit + SLACK_S
        note(f"{number.name} of all of host 1", "3 x 2", "ipv4", seconds, limit, [2, 3])


def test_a_slow_host_is_waited_for(hosts: Callable[..., Network], tmp_path: Path, note: Note) -> None:
    """It runs a quarter of the time, in pieces: slower than any step, never silent for the limit."""
    made, job = three(hosts, tmp_path)
    for _ in range(6):
        made.hosts[1].signal(signal.SIGSTOP)
        time.sleep(0.75)
        made.hosts[1].signal(signal.SIGCONT)
        time.sleep(0.25)
    job.steps()
    job.stop()
    note("host 1 runs a quarter of the time", "3 x 2", "ipv4", None, 0, "-")


def test_a_firewall_is_named_with_host_and_port(hosts: Callable[..., Network], tmp_path: Path, note: Note) -> None:
    """Host 0 lets nobody in but to the store."""
    made = hosts(("node", "node"))
    job = Job(made, tmp_path / "job")
    with made.hosts[0].drop("input", "iifname", "eth0", "tcp", "dport", "!=", job.port, "tcp", "flags", "syn"):
        job.start()
        until(job.folder, range(4), lambda seen: "pid" in seen)
        at = time.monotonic()
        found = job.ends()
    _, _, words = verdicts(found, range(4))
    assert "can't connect to 10.77.0.1 port " in words
    assert "where rank 0 listens: is there a firewall?" in words
    seconds = took(found, at, range(4))
    assert seconds < SILENT_S + 2 * SLACK_S
    note("firewall before host 0", "2 x 2", "ipv4", seconds, SILENT_S + 1, "address")


def test_a_name_that_leads_to_loopback_is_told_to_all(
    hosts: Callable[..., Network], tmp_path: Path, note: Note
) -> None:
    """As Debian's installer writes it: 127.0.1.1 for the host's own name."""
    made = hosts(("node", "node"))
    table = Path("/etc/netns") / made.hosts[1].space / "hosts"
    before = table.read_text()
    table.write_text("127.0.0.1 localhost\n127.0.1.1 node\n")
    try:
        job = Job(made, tmp_path / "job")
        at = time.monotonic()
        job.start()
        found = job.ends()
    finally:
        table.write_text(before)
    own = "this host's name 'node' resolves to 127.0.1.1, which no other host reaches: set GLOO_SOCKET_IFNAME=eth0"
    assert all(own in found[rank]["words"] for rank in range(4)), found
    assert {found[rank].get("error") for rank in (2, 3)} <= {"ConfigError", None}
    note("127.0.1.1 in /etc/hosts of host 1", "2 x 2", "ipv4", time.monotonic() - at, 2, "variable")


def test_a_relay_of_200_ms_is_only_slow(tmp_path: Path, note: Note) -> None:
    with network(tmp_path, ("a", "b")) as made:
        for host in made.hosts:
            host.start()
        made.delay(0.1)
        job = Job(made, tmp_path / "job", timeout_s=20.0)
        started = time.monotonic()
        job.start()
        job.steps(2)
        assert time.monotonic() - started > 1.0  # it was slow
        job.stop()
    note("relay: 200 ms there and back", "2 x 2", "ipv4", None, 0, "-")


def run_multinode(made: Network, folder: Path, **settings: str) -> list[Any]:
    """Starts launch/multinode.sh on every host."""
    shared = {"NODES": str(len(made.hosts)), "HEAD": made.hosts[0].address, "PORT": str(next(PORTS)), "RANKS": "2"}
    command = [ROOT / "launch/multinode.sh", PROGRAM, folder / "progress"]
    return [host.popen(command, folder / f"{i}.log", **shared, **settings) for i, host in enumerate(made.hosts)]


@pytest.mark.parametrize(("names", "kind"), [(("a", "b"), "ipv6"), (("node", "node"), "ipv4")])
def test_multinode_sh(hosts: Callable[..., Network], tmp_path: Path, note: Note, names: Any, kind: str) -> None:
    started = run_multinode(hosts(names, kind), tmp_path)
    codes = [process.wait(100) for process in started]
    assert codes == [0, 0], [path.read_text()[-3000:] for path in tmp_path.glob("*.log")]
    assert [row["item"] for row in progress(tmp_path)] == list(range(ITEMS))
    assert {row["ranks"] for row in progress(tmp_path)} == {4}
    note("none, launch/multinode.sh" + ", equal names" * (kind == "ipv4"), "2 x 2", kind, None, 0, "-")


def test_multinode_sh_starts_again_with_the_cable_back(
    hosts: Callable[..., Network], tmp_path: Path, note: Note
) -> None:
    """Rank 3 loses its cable before the third item; the ranks of both hosts end, and meet again when it is back."""
    made = hosts(("node", "node"))
    started = run_multinode(made, tmp_path, MAX_RESTARTS="2", PAUSE_BEFORE="2")
    deadline = time.monotonic() + 60
    while len(progress(tmp_path)) < KILLED_BEFORE:
        assert time.monotonic() < deadline, [path.read_text()[-3000:] for path in tmp_path.glob("*.log")]
        time.sleep(0.05)
    at = time.monotonic()
    made.hosts[1].cable(False)
    time.sleep(8.0)
    made.hosts[1].cable(True)
    codes = [process.wait(100) for process in started]
    assert codes == [0, 0], [path.read_text()[-3000:] for path in tmp_path.glob("*.log")]
    assert [row["item"] for row in progress(tmp_path)] == list(range(ITEMS))
    assert progress(tmp_path)[-1]["generation"] >= 1
    note("cable pulled for 8 s, restarted", "2 x 2", "ipv4", time.monotonic() - at, 60, "-")

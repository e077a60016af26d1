"""Hosts on one machine: network, PID, UTS, IPC and mount namespaces joined by a switch. Needs root, iproute2, nftables.

Each host has its own address, name, process numbers, /etc/hosts, /dev/shm and boot id, as the World sees them. All see
one file system, on which ranks leave their notes.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import descendants

ROOT = Path(__file__).parents[2]
TOOLS = ("ip", "unshare", "nft")
ENTER = (
    'set -e; hostname "$1"; mount -t tmpfs shm /dev/shm; mount --bind "$2" /proc/sys/kernel/random/boot_id; '
    'shift 2; ip link set lo up; exec env --default-signal=INT "$@"'
)
LIMIT_S = 60.0
_NUMBERS = itertools.count()


def why_not() -> str:
    """Returns why there can be no hosts here, "" if there can."""
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed: scripts/test_hosts.sh installs them"
    if os.geteuid():
        return "needs root"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-p", "-u", "-i", "--fork", "--mount-proc", "true"], capture_output=True
    )
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


def sh(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


class Host:
    """One host. Processes that it runs see its namespaces; `ranks` are forked from one that has imported torch.

    Attributes:
        name: what its hostname is.
        address: of its only interface, eth0.
    """

    def __init__(self, network: Network, index: int, name: str, address: str) -> None:
        self.network, self.name, self.address = network, name, address
        self.space, self.port = f"{network.prefix}h{index}", f"p{index}"
        self._boot = network.folder / f"boot{index}"
        self._boot.write_text(f"{uuid.uuid4()}\n")
        self._processes: list[subprocess.Popen[str]] = []
        self._agent: subprocess.Popen[str] | None = None
        sh("ip", "netns", "add", self.space)
        wire = ("ip", "link", "add", "eth0", "netns", self.space, "type", "veth")
        sh(*wire, "peer", "name", self.port, "netns", network.switch)
        extra = ("nodad",) if ":" in address else ()
        length = 64 if ":" in address else 24
        sh("ip", "-n", self.space, "addr", "add", f"{address}/{length}", "dev", "eth0", *extra)
        sh("ip", "-n", self.space, "link", "set", "eth0", "up")
        network.switched("ip", "link", "set", self.port, "master", "switch", "up")

    def popen(self, command: Sequence[str | Path], log: Path | None = None, **settings: str) -> subprocess.Popen[str]:
        """Starts a command on this host; its output goes to `log`, else it has pipes."""
        words = ["ip", "netns", "exec", self.space, "unshare", "--uts", "--pid", "--ipc", "--fork", "--kill-child"]
        words += ["--mount-proc", "bash", "-c", ENTER, "host", self.name, str(self._boot), *map(str, command)]
        known = {
            name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "MASTER_", "EPRT_JOB"))
        }
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = known | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | settings
        output = subprocess.PIPE if log is None else log.open("w")
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        self._processes.append(process)
        return process

    def start(self) -> None:
        """Starts what ranks are forked from."""
        self._agent = self.popen(
            [sys.executable, "-m", "support.jobs.host_ranks"], self.network.folder / f"{self.space}.log"
        )

    def rank(self, folder: Path, rank: int, timeout_s: float, **environment: object) -> None:
        settings = {name: str(value) for name, value in environment.items()} | {"RANK": str(rank)}
        self.say({"folder": str(folder), "rank": rank, "timeout_s": timeout_s, "environment": settings})

    def say(self, order: dict[str, Any]) -> None:
        assert self._agent is not None
        assert self._agent.stdin is not None
        self._agent.stdin.write(json.dumps(order) + "\n")
        self._agent.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks of this host, not to what they are forked from."""
        assert self._agent is not None
        pid = self._agent.pid
        (server,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()  # process 1 of this host
        for rank in descendants(int(server)):
            os.kill(rank, number)

    def cable(self, plugged: bool) -> None:
        self.network.switched("ip", "link", "set", self.port, "up" if plugged else "down")

    @contextmanager
    def drop(self, hook: str, *match: object) -> Iterator[None]:
        """Drops packets that match on their way in or out (hook "input", "output") while the block runs."""
        nft = ("ip", "netns", "exec", self.space, "nft")
        sh(*nft, "add", "table", "inet", "test")
        sh(*nft, "add", "chain", "inet", "test", hook, f"{{ type filter hook {hook} priority 0 ; }}")
        sh(*nft, "add", "rule", "inet", "test", hook, *match, "drop")
        try:
            yield
        finally:
            sh(*nft, "flush", "ruleset")

    def end(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()  # --kill-child: process 1 of the host goes, and with it all
            process.communicate()
        subprocess.run(["ip", "netns", "del", self.space], check=False)
        shutil.rmtree(Path("/etc/netns") / self.space, ignore_errors=True)


class Network:
    """Hosts on one switch.

    Args:
        names: the hosts' names; equal ones are allowed.
        kind: "ipv4" or "ipv6": hosts have no address of the other.
    """

    def __init__(self, folder: Path, names: Sequence[str], kind: str = "ipv4") -> None:
        self.folder, self.prefix = folder, f"eprt{os.getpid()}n{next(_NUMBERS)}"
        self.switch = f"{self.prefix}s"
        self.hosts: list[Host] = []
        self._relay: subprocess.Popen[bytes] | None = None
        try:
            sh("ip", "netns", "add", self.switch)
            self.switched("ip", "link", "add", "switch", "type", "bridge")
            self.switched("ip", "link", "set", "switch", "up")
            addresses = [f"10.77.0.{i + 1}" if kind == "ipv4" else f"fd77::{i + 1}" for i in range(len(names))]
            for i, name in enumerate(names):
                self.hosts.append(Host(self, i, name, addresses[i]))
            self._name_hosts(names, addresses)
        except BaseException:
            self.end()
            raise

    def _name_hosts(self, names: Sequence[str], addresses: Sequence[str]) -> None:
        """Gives each host its /etc/hosts. Of equal names each finds itself."""
        for host in self.hosts:
            table = dict(zip(names, addresses, strict=True)) | {host.name: host.address}
            place = Path("/etc/netns") / host.space
            place.mkdir(parents=True, exist_ok=True)
            lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in table.items())]
            (place / "hosts").write_text("\n".join(lines) + "\n")

    def switched(self, *words: object) -> None:
        sh("ip", "netns", "exec", self.switch, *words)

    def delay(self, seconds: float) -> None:
        """Lets every packet take so long: a relay takes the switch's place."""
        ports = [host.port for host in self.hosts]
        for port in ports:
            self.switched("ip", "link", "set", port, "nomaster", "up")
        program = [sys.executable, "-m", "support.jobs.delaying_relay", str(seconds), *ports]
        path = {"PYTHONPATH": str(ROOT / "tests")}
        self._relay = subprocess.Popen(["ip", "netns", "exec", self.switch, *program], env=os.environ | path)

    def end(self) -> None:
        for host in self.hosts:
            host.end()
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        subprocess.run(["ip", "netns", "del", self.switch], check=False)


@contextmanager
def network(folder: Path, names: Sequence[str], kind: str = "ipv4") -> Iterator[Network]:
    made = Network(folder, names, kind)
    try:
        yield made
    finally:
        made.end()


def diary(folder: Path, rank: int) -> dict[str, Any]:
    try:
        return json.loads((folder / f"rank{rank}").read_text())
    except (OSError, ValueError):
        return {}


def progress(folder: Path) -> list[dict[str, Any]]:
    path = folder / "progress"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(folder: Path, ranks: Sequence[int], there: Callable[[dict[str, Any]], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(there(diary(folder, rank)) for rank in ranks):
        logs = "\n".join(path.read_text()[-3000:] for path in folder.parent.rglob("*.log"))
        assert time.monotonic() < deadline, ([diary(folder, rank) for rank in ranks], logs)
        time.sleep(0.02)

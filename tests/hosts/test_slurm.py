"""A real Slurm of two nodes, each a host of namespaces, runs launch/slurm.sbatch. scripts/test_hosts.sh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import ROOT, Network, network, progress
from support.jobs.resumable import ITEMS, KILLED_BEFORE
from support.processes import command, descendants

PROGRAM = ROOT / "tests/support/jobs/resumable.py"
DAEMONS = ("slurmctld", "slurmd", "sbatch", "munged")
CONF = """
ClusterName=eprt
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
NodeName=node0 NodeAddr=10.77.0.1 CPUs=4
NodeName=node1 NodeAddr=10.77.0.2 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""
SLURMD = 'mount -t tmpfs none /sys/fs/cgroup && exec slurmd -D -N "$0"'
Note = Callable[..., None]


class Cluster:
    def __init__(self, made: Network, folder: Path) -> None:
        self.network, self.folder = made, folder
        self._settings = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # it isn't used, but slurmd looks for one
        for name in ("state", "spool.node0", "spool.node1"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {name: f"{folder}/munge.{name}" for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")}
        names["key-file"] = str(key)
        munge = ["munged", "--foreground", "--force", *(f"--{name}={value}" for name, value in names.items())]
        self._munge = subprocess.Popen(munge, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        head = made.hosts[0]
        head.popen(["slurmctld", "-D"], folder / "slurmctld.log", **self._settings)
        self.daemons = [
            host.popen(["bash", "-c", SLURMD, host.name], folder / f"{host.name}.log", **self._settings)
            for host in made.hosts
        ]

    def ask(self, *words: object, **settings: str) -> str:
        process = self.network.hosts[0].popen([str(word) for word in words], **self._settings, **settings)
        return process.communicate(timeout=60)[0].strip()

    def until(self, what: Callable[[], object], limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        found = [path for path in self.folder.rglob("*.log") if path.is_file()]
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-2500:]}" for path in found)

    def submit(self, folder: Path, nodes: int, ranks: int, *more: object, **settings: str) -> str:
        """Submits the batch script as a user does; returns the job's number."""
        folder.mkdir(exist_ok=True)
        words = ["sbatch", "--parsable", "--nodes", nodes, "--chdir", folder, "--cpus-per-task", ranks]
        said = self.ask(
            *words, ROOT / "launch/slurm.sbatch", PROGRAM, folder / "progress", *more, RANKS=str(ranks),
            PORT=str(29700 + len(list(self.folder.iterdir())) % 200), LOGS=str(folder / "logs"),
            PYTHON="",  # the script finds the checkout's
            **settings,
        )  # fmt: skip
        assert said.isdigit(), said
        return said

    def state(self, job: str) -> str:
        return self.ask("scontrol", "show", "job", job).partition("JobState=")[2].partition(" ")[0]

    def end(self) -> None:
        self._munge.kill()
        self._munge.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with network(folder, ("node0", "node1")) as made:
        found = Cluster(made, folder)
        try:
            found.until(lambda: found.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", 25)
            yield found
        finally:
            found.end()


@pytest.fixture(autouse=True)
def needs_slurm() -> None:
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: scripts/test_hosts.sh installs them")


@pytest.mark.parametrize(("nodes", "ranks", "victim"), [(1, 4, None), (2, 2, 3)])
def test_the_batch_script(
    cluster: Cluster, tmp_path: Path, note: Note, nodes: int, ranks: int, victim: int | None
) -> None:
    started = time.monotonic()
    more, restarts = ((), "0") if victim is None else ((victim,), "1")
    job = cluster.submit(tmp_path / "job", nodes, ranks, *more, MAX_RESTARTS=restarts)
    cluster.until(lambda: cluster.state(job) in ("COMPLETED", "FAILED", "CANCELLED"))
    logs = "\n".join(path.read_text()[-3000:] for path in (tmp_path / "job").rglob("*.log"))
    assert cluster.state(job) == "COMPLETED", logs + cluster.logs()
    found = progress(tmp_path / "job")
    assert [row["item"] for row in found] == list(range(ITEMS))
    assert {row["ranks"] for row in found} == {4}
    assert [row["generation"] for row in found] == [
        int(victim is not None and i >= KILLED_BEFORE) for i in range(ITEMS)
    ]
    what = "none" if victim is None else f"rank {victim} killed, restarted"
    note(f"Slurm: {what}", f"{nodes} x {ranks}", "ipv4", time.monotonic() - started, 90, "-")


def test_scancel_ends_every_rank(cluster: Cluster, tmp_path: Path, note: Note) -> None:
    job = cluster.submit(tmp_path / "job", 2, 2, PAUSE_BEFORE="2")
    cluster.until(lambda: len(progress(tmp_path / "job")) == KILLED_BEFORE)

    def ranks() -> list[int]:
        below = [pid for daemon in cluster.daemons for pid in descendants(daemon.pid)]
        return [pid for pid in below if b"resumable.py" in command(pid)]

    assert len(ranks()) >= 4
    at = time.monotonic()
    cluster.ask("scancel", job)
    cluster.until(lambda: not ranks(), 30)
    cluster.until(lambda: cluster.state(job) == "CANCELLED", 30)
    note(f"Slurm: scancel ({signal.SIGTERM.name})", "2 x 2", "ipv4", time.monotonic() - at, 30, "-")

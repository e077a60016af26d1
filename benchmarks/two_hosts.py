"""Tries what would cross two hosts, on two GPUs of one machine that NCCL takes for two hosts.

    python benchmarks/two_hosts.py --nccl /path/to/libnccl.so.2 --output two_hosts.json
    python benchmarks/two_hosts.py --device cpu                    the same as far as it goes without GPUs

Each rank has an NCCL_HOSTID and a hostname of its own, its GPU is alone in its load/store team
(NCCL_LSA_TEAM_SIZE=1), and NCCL sends over sockets, one-sided operations (GIN, RMA) too. Rows: the version of NCCL
that is loaded (2.32 or later is wanted), checked steps by the dispatchers `none` and `torch`, and a put with a signal
through nccl4py. Exit code 1 if a row failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eprt.bench.report import Report
from eprt.conformance.faults.job import CheckedLayer
from eprt.files import write_whole
from eprt.world import World

RANKS, STEPS, WANTED = 2, 20, (2, 32)
LIMIT_S = 150.0
HOSTS = {
    "NCCL_LSA_TEAM_SIZE": "1",
    "NCCL_NET": "Socket",
    "NCCL_GIN_ENABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}


def nccl_version() -> str:
    """Returns the version of the NCCL that this process has loaded."""
    found = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    major, minor, patch = found.value // 10000, found.value // 100 % 100, found.value % 100
    if (major, minor) < WANTED:
        raise RuntimeError(f"NCCL {major}.{minor}.{patch} is loaded: give 2.32 or later as --nccl")
    return f"NCCL {major}.{minor}.{patch}"


def steps(dispatcher: str, device: str) -> str:
    """Runs steps of a World over both hosts; every output is checked."""
    with (
        mock.patch("socket.gethostname", return_value=f"host{os.environ['RANK']}"),
        World.from_env(device, timeout_s=60.0) as world,
    ):
        if world.parallel.ranks_per_host != 1:
            raise RuntimeError(f"{world.parallel.ranks_per_host} ranks per host: these are not two hosts")
        job = CheckedLayer(world, dispatcher)
        started = time.monotonic()
        for step in range(STEPS):
            job.step(step)
        job.layer.close()
    return f"{STEPS} steps right, {1e3 * (time.monotonic() - started) / STEPS:.1f} ms each"


def put_with_signal(folder: Path) -> str:
    """Each rank puts its number into the other's window and signals; the other waits on its stream, and reads."""
    from nccl import core

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    place = folder / "unique_id"
    if rank == 0:
        write_whole(place, bytes(core.get_unique_id()).hex())
    while not place.exists():
        time.sleep(0.05)
    comm = core.Communicator.init(RANKS, rank, core.UniqueId.from_bytes(bytes.fromhex(place.read_text())))
    said = f"RMA by the host {comm.host_rma_support}, GIN {comm.gin_type}, {comm.n_lsa_teams} load/store teams"
    source, target = (core.torch.empty(1024, dtype=torch.float32, device=f"cuda:{rank}") for _ in range(2))
    source.fill_(rank + 1.0)
    target.fill_(-1.0)
    windows = [comm.register_window(buffer) for buffer in (source, target)]
    stream, peer = torch.cuda.current_stream(), 1 - rank
    comm.put_signal(source, peer, windows[1], stream=stream)
    comm.wait_signal(core.WaitSignalDesc(peer=peer), stream=stream)
    event = torch.cuda.Event()
    event.record(stream)
    deadline = time.monotonic() + 20.0
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no signal within 20 s; {said}")
        time.sleep(0.01)
    if not bool((target == peer + 1.0).all()):
        raise ValueError(f"the window holds {target[:4].tolist()}; {said}")
    comm.destroy()
    return f"4 KiB put and signalled both ways; {said}"


def run_rank(device: str, folder: Path) -> None:
    """Writes this rank's rows: (what, whether it worked, words)."""
    parts: dict[str, Callable[[], str]] = {name: partial(steps, name, device) for name in ("none", "torch")}
    if device == "cuda":
        parts = {"NCCL": nccl_version, **parts, "put with signal": partial(put_with_signal, folder)}
    rows: list[tuple[str, bool, str]] = []
    for what, call in parts.items():
        try:
            rows.append((what, True, call()))
        except Exception as error:  # noqa: BLE001 - one row's failure must not end the others
            traceback.print_exc()
            rows.append((what, False, f"{type(error).__name__}: {error}"[:500]))
        write_whole(folder / f"rows{os.environ['RANK']}", json.dumps(rows))


def start(rank: int, options: argparse.Namespace, folder: Path, port: int) -> subprocess.Popen[bytes]:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    own = {name: str(value) for name, value in where.items()}
    own |= {"MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": f"host{rank}"}
    if options.nccl is not None:
        own["LD_PRELOAD"] = str(options.nccl)
    command = [sys.executable, __file__, "--device", options.device, "--rank-in", str(folder)]
    return subprocess.Popen(command, env=os.environ | HOSTS | own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--nccl", type=Path, help="libnccl.so.2 that comes first in the loader's order")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in is not None:
        run_rank(options.device, options.rank_in)
        return 0
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        ranks = [start(rank, options, Path(folder), port) for rank in range(RANKS)]
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in ranks:
            process.kill()
        rows: list[dict[str, Any]] = []
        for rank in range(RANKS):
            path = Path(folder, f"rows{rank}")
            found = json.loads(path.read_text()) if path.exists() else []
            rows += [{"rank": rank, "what": what, "ok": ok, "words": words} for what, ok, words in found]
            if len(found) < (4 if options.device == "cuda" else 2):
                rows.append({"rank": rank, "what": "the next", "ok": False, "words": f"not over after {LIMIT_S:g} s"})
    for row in rows:
        sys.stdout.write(f"rank {row['rank']}  {row['what']:16} {'ok' if row['ok'] else 'FAIL':5} {row['words']}\n")
    if options.output is not None:
        Report("two_hosts", rows, {"settings": HOSTS}).write(options.output)
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

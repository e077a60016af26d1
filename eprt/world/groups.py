"""Making process groups and stores: the part of a World that touches torchrun's environment."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from eprt.errors import ConfigError, RankLost
from eprt.world.meeting import meet

_LATE_PEERS_S = 2.0  # ranks that started later than the store's host ask it the same question a little later


def place() -> tuple[int, int]:
    """(rank, size) in torch.distributed if the host initialised it, else in torchrun's environment; (0, 1) without
    either. Raises ConfigError."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    needed = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    if not joins_torchrun():
        return 0, 1
    found = {name: os.environ.get(name, "0" if os.environ.get("WORLD_SIZE") == "1" else "") for name in needed}
    if not all(value.isdigit() for value in found.values()) or not int(found["RANK"]) < int(found["WORLD_SIZE"]):
        said = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ConfigError(
            f"the environment says {said}: expected numbers with RANK < WORLD_SIZE, as torchrun sets them"
        )
    return int(found["RANK"]), int(found["WORLD_SIZE"])


def joins_torchrun() -> bool:
    """Whether torchrun, or something like it, says that this process is one of a world's ranks."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def hosts_store(rank: int) -> bool:
    """Whether this process serves the store: rank 0 does where no torchrun agent does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def host_number() -> int:
    """The same for the processes of one host (of one container, where containers have names of their own)."""
    return int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:8], "little") >> 1


@contextmanager
def start_up() -> Iterator[None]:
    """What torch raises while ranks meet is a lost rank, which it can't name."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        raise RankLost(f"a rank was lost while the World was made: {error}. Restart the job.", -1, "unknown") from error


def host_device(device: torch.device | str) -> torch.device:
    """`device` as the host engine's process sees it: a GPU without an index is the one it made current."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r}: expected 'cpu' or 'cuda'")
    if str(device) != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda': 0 CUDA devices here; use 'cpu'")
    return torch.device("cuda", torch.cuda.current_device())


def local_device(device: str | None) -> torch.device:
    """The GPU of torchrun's local rank, made the current one; without torchrun, and where a host engine that started
    torch.distributed also uses CUDA, the current one. Raises ConfigError."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = torch.cuda.device_count()
    kind = device or ("cuda" if available >= max(local_size, local_rank + 1) else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or local_rank >= available:
        raise ConfigError(f"device {kind!r} for local rank {local_rank}: {available} CUDA devices here; use 'cpu'")
    if "LOCAL_RANK" not in os.environ or (dist.is_initialized() and torch.cuda.is_initialized()):
        return torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_default_group(rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """torch's default group over a store of our own prefix: a restarted attempt must not meet the last one's
    keys, nor a second World of one process the first one's."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_meet(rank, size, timeout_s),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def _meet(rank: int, size: int, timeout_s: float) -> dist.Store:
    """A prefix of the job's store once all ranks are there. Raises RankLost naming those that aren't."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _arrive(rank, size, timeout_s, deadline)
        except dist.DistNetworkError as error:
            # Rank 0's last server may have ended under us: its next one is at the same address.
            if time.monotonic() > deadline:
                where = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ['MASTER_PORT']}"
                message = f"the control store at {where} didn't answer within {timeout_s:.0f} s: is rank 0 up?"
                raise RankLost(message, -1, "store") from error
            time.sleep(0.1)


def _arrive(rank: int, size: int, timeout_s: float, deadline: float) -> dist.Store:
    store = dist.TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=hosts_store(rank),
        timeout=timedelta(seconds=max(deadline - time.monotonic(), 0.1)),
        wait_for_workers=False,
        multi_tenant=True,  # a World made after another was closed may find its server still up
    )
    try:
        name = meet(dist.PrefixStore("eprt/init", store), rank, size, timeout_s).name
    except RankLost:
        if hosts_store(rank):
            time.sleep(_LATE_PEERS_S)
        raise
    store.set_timeout(timedelta(seconds=2 * timeout_s))
    return dist.PrefixStore(f"eprt/init/{name}", store)


def control_group(ranks: list[int], rank: int, timeout_s: float) -> tuple[dist.ProcessGroupGloo, dist.Store, int]:
    """A gloo group over these global ranks, the store prefix that it and nothing else uses, and how often the job was
    restarted. Collective over them.

    Not `dist.new_group`: that names a group after its ranks, so one made after another was destroyed meets its keys in
    the store and connects to sockets that are gone (torch 2.13).

    Args:
        rank: this process's place in `ranks`.
    """
    store = dist.distributed_c10d._get_default_store()
    label = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    base = dist.PrefixStore(f"eprt/{label}", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
    meeting = meet(base, rank, len(ranks), 2 * timeout_s)
    own = dist.PrefixStore(meeting.name, base)
    timeout = timedelta(seconds=2 * timeout_s)
    group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, len(ranks), timeout)
    return group, own, meeting.generation

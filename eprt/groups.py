"""Making process groups and stores: the part of a World that touches torchrun's environment."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from eprt.errors import ConfigError


def local_device(device: str | None) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = torch.cuda.device_count()
    kind = device or ("cuda" if available >= max(local_size, local_rank + 1) else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or local_rank >= available:
        raise ConfigError(f"device {kind!r} for local rank {local_rank}: {available} CUDA devices here; use 'cpu'")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_default_group(rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """torch's default group over a store of our own prefix: a restarted attempt must not meet the last one's
    keys, nor a second World of one process the first one's."""
    timeout = timedelta(seconds=2 * timeout_s)
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not agent_store,
        timeout=timeout,
        wait_for_workers=False,
    )
    nth = store.add(f"eprt/attempt_{_attempt()}/inits/{rank}", 1)  # equal on all ranks: Worlds are made in one order
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"eprt/attempt_{_attempt()}/init_{nth}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def control_group(ranks: list[int], rank: int, timeout_s: float) -> tuple[dist.ProcessGroupGloo, dist.Store]:
    """A gloo group over these global ranks, and the store prefix that it and nothing else uses. Collective over them.

    Not `dist.new_group`: that names a group after its ranks, so one made after another was destroyed meets its keys in
    the store and connects to sockets that are gone (torch 2.13).

    Args:
        rank: this process's place in `ranks`.
    """
    store = dist.distributed_c10d._get_default_store()
    label = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    base = f"eprt/attempt_{_attempt()}/{label}"
    nth = store.add(f"{base}/count_{rank}", 1)  # equal on all ranks: Worlds are made in one order
    own = dist.PrefixStore(f"{base}/{nth}", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
    timeout = timedelta(seconds=2 * timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, len(ranks), timeout), own


def _attempt() -> str:
    """torchrun's restart number: its store outlives an attempt."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

"""Makes process groups and stores: the part of a World that touches torchrun's environment and torch's groups."""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from eprt.config import ParallelConfig
from eprt.errors import ConfigError, EprtError, RankLost, one_block
from eprt.json_files import shown
from eprt.world.addresses import family_of, is_loopback, resolve
from eprt.world.guard import Guard
from eprt.world.process import at_exit_leave, bounded, number_of, restarts
from eprt.world.rendezvous import Rendezvous, await_late, claim_store, meet, require_files
from eprt.world.termination import AGENT, ask

SILENT_AFTER_S = 10.0
HOST_STORE = "torch.distributed's store"  # who serves a host engine's, for messages
# Torch's switch for symmetric memory between ranks of one GPU: only tests have such ranks. NCCL refuses them.
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# What srun and the usual mpiruns tell their tasks; a batch script or an interactive shell has none of them above 1.
_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def place() -> tuple[int, int]:
    """Returns (rank, size) of torch.distributed if that is initialised, else of torchrun's environment, else (0, 1)."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    needed = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    if not joins_torchrun():
        return 0, 1
    found = {name: os.environ.get(name, "0" if os.environ.get("WORLD_SIZE") == "1" else "") for name in needed}
    rank, size, port = (int(value) if value.isdecimal() and len(value) < 20 else -1 for value in found.values())
    if not 0 <= rank < size or not (size == 1 or 0 < port < 65536):
        said = ", ".join(f"{name}={shown(value)}" for name, value in found.items())
        raise ConfigError(
            f"the environment says {said}: expected numbers with RANK < WORLD_SIZE, and a port from 1 to 65535, as "
            "torchrun sets them"
        )
    _ = restarts(), number_of("LOCAL_RANK"), number_of("LOCAL_WORLD_SIZE", 1)  # numbers, or an error before ranks meet
    return rank, size


def joins_torchrun() -> bool:
    """Returns whether torchrun, or something like it, says that this process is one of a world's ranks.

    Raises ConfigError where srun or mpirun started several processes that nothing told of each other: each would be a
    world of its own.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return True
    for name in _TASK_COUNTS:
        if (count := os.environ.get(name, "")).isdigit() and int(count) > 1:
            raise ConfigError(
                f"{name}={count}, but no WORLD_SIZE: {count} processes were started side by side and don't know each "
                "other; start torchrun in each node's task (launch/slurm.sbatch), or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT"
            )
    return False


def hosts_store(rank: int) -> bool:
    """Returns whether this process serves the store: rank 0 does where no torchrun agent does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


@contextmanager
def refusals_told(rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Tells an error of the block, before ranks meet, to those that would wait for this one; rank 0 has to come soon,
    or they do wait."""
    try:
        yield
    except EprtError as error:
        if size > 1 and not dist.is_initialized():
            with suppress(EprtError, RuntimeError, OSError), start_up(timeout_s):
                rendezvous_in_environment(rank, size, silent_after(timeout_s), "", error)
        raise


@contextmanager
def start_up(timeout_s: float) -> Iterator[list[Guard]]:
    """Tells an error during start-up to the ranks whose guards are up; the body puts guards into the list it gets. A
    process that ends because of such an error ends with RankLost's exit code."""
    guards: list[Guard] = []
    try:
        yield guards
    except BaseException as error:
        at_exit_leave(if_uncaught=True)
        atexit.register(await_late)  # before it leaves
        found = _of_start_up(error)
        for guard in guards:
            guard.leave(f"raised: {type(found).__name__}: {found}")
            guard.close(timeout_s if hosts_store(guard.rank) else 0.0)
        if found is not error:
            raise found from error
        raise


def _of_start_up(error: BaseException) -> BaseException:
    """Returns the error as eprt's own where this process lacks descriptors, or where torch has lost a rank."""
    if os.strerror(errno.EMFILE) in str(error) and getattr(error, "rank", -1) < 0:  # not a peer's, who has a name
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return ConfigError(f"at most {files} open files here, too few to connect to all ranks: raise `ulimit -n`")
    if isinstance(error, RuntimeError) and not isinstance(error, EprtError):
        message = f"a rank was lost while the World was made: {one_block(str(error))}. Restart the job."
        return RankLost(message, -1, "unknown")
    return error


def host_device(device: torch.device | str) -> torch.device:
    """Returns `device` as the host engine's process sees it: a GPU without an index is the one it made current."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {shown(device)}: expected 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r}: expected 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device {str(device)!r}: {count} CUDA devices here; use 'cpu'")
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def local_device(device: str | None) -> torch.device:
    """Returns the GPU of torchrun's local rank, and makes it the current one. Raises ConfigError.

    Without torchrun, and if a host engine that started torch.distributed also uses CUDA, it is the current GPU.
    """
    local_rank, local_size = number_of("LOCAL_RANK"), number_of("LOCAL_WORLD_SIZE", 1)
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {shown(device)}: expected 'cpu' or 'cuda', or None for either")
    available = torch.cuda.device_count()
    if available and os.environ.get(SHARED_GPU) == "1":
        local_rank %= available
    kind = device or ("cuda" if available >= max(local_size, local_rank + 1) else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= available:
        raise ConfigError(f"device {kind!r} for local rank {local_rank}: {available} CUDA devices here; use 'cpu'")
    if "LOCAL_RANK" not in os.environ or (dist.is_initialized() and torch.cuda.is_initialized()):
        return torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def layout_in_words(parallel: ParallelConfig, device: torch.device) -> str:
    """Returns what all ranks of a World must mean alike."""
    sizes = f"attention_tp_size {parallel.attention_tp_size}, moe_tp_size {parallel.moe_tp_size}"
    return f"{sizes}, {device.type}"


def rendezvous_in_environment(
    rank: int, size: int, timeout_s: float, layout: str, refusal: EprtError | None = None
) -> Rendezvous:
    """Finds all ranks that torchrun's environment names. Raises RankLost, WorldMismatch, ConfigError: see `meet`."""
    if hosts_store(rank):
        require_files(size)
    host, silent_s = ("rank 0" if hosts_store(0) else AGENT), silent_after(timeout_s)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        store = bounded(lambda: _job_store(rank, size, timeout_s), timeout_s + 1.0)
    except (TimeoutError, dist.DistError) as error:
        where = f"the control store at {address}:{os.environ['MASTER_PORT']}"
        why = one_block(str(error).partition("\n")[0])
        if unresolved := resolve(address)[1]:
            message = f"{where}: MASTER_ADDR={shown(address)} resolves to nothing on this host ({unresolved})"
        elif not hosts_store(rank) or int(os.environ["MASTER_PORT"]) in _SERVED:
            message = f"{where} didn't answer within {timeout_s:g} s: {host} serves it, and hasn't started or has ended"
        elif "listen" in why:
            message = f"{where} can't be served: {why}. Give each job a MASTER_PORT that no other process has"
        else:  # it listens, and what it reaches there isn't itself
            message = f"{where} isn't rank 0's: {why}. Set MASTER_ADDR to an address of this host, which rank 0 is on"
        raise RankLost(f"{message}. Restart the job.", -1, "store") from error
    claim_store(store, silent_s, host)
    met = meet(store, "world", rank, size, timeout_s, silent_s, host, layout, refusal)
    store.set_timeout(timedelta(seconds=2 * timeout_s))
    return met


def rendezvous_in_group(ranks: list[int], rank: int, timeout_s: float, layout: str) -> Rendezvous:
    """Finds some of a host engine's ranks in torch.distributed's own store. Raises RankLost, WorldMismatch."""
    default: Any = dist.distributed_c10d._get_default_store()
    label, silent_s = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16], silent_after(timeout_s)
    store = ask(default.clone, silent_s, HOST_STORE)  # connects anew: torch alone waits 30 minutes for one that is gone
    return meet(store, label, rank, len(ranks), timeout_s, silent_s, HOST_STORE, layout)


def silent_after(timeout_s: float) -> float:
    """Returns how many seconds a peer, or the store, may give no sign of life."""
    return min(SILENT_AFTER_S, timeout_s / 2)


def start_guard(met: Rendezvous, timeout_s: float, device: torch.device) -> Guard:
    """Returns a running guard. It watches a store that torchrun's agent serves; if a rank does, the guards' own links
    tell more."""
    silent_s, base = silent_after(timeout_s), cast("Any", met.base)
    store = None if hosts_store(0) else ask(base.clone, silent_s, AGENT)  # connects anew
    guard = Guard(met, silent_s, 2.0 if device.type == "cuda" else None, store)
    guard.start()
    return guard


def init_default_group(met: Rendezvous, device: torch.device, timeout_s: float) -> None:
    """Makes torch's default group over a part of the store that only these ranks know. A restart must not read the last
    attempt's keys, nor a second World of one process the first one's."""
    backend = "cpu:gloo,cuda:nccl" if uses_nccl(device) else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # this is another thread than the one that chose it
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default", met.store),
        rank=met.rank,
        world_size=len(met.ranks),
        timeout=timedelta(seconds=2 * timeout_s),
        device_id=device if uses_nccl(device) else None,
    )


def uses_nccl(device: torch.device) -> bool:
    """Tells whether collectives on the device are NCCL's: on GPUs that no other rank uses."""
    return device.type == "cuda" and os.environ.get(SHARED_GPU) != "1"


def make_splittable(default: dist.ProcessGroup) -> None:
    """Prepares the default group to be split, as DeviceMesh does on GPUs.

    Its backends then read a list of ranks that only a process's first group of each kind finds without being told; for
    a later one torch (2.10 to 2.13) reads address 0 (groupRanks of ProcessGroupGloo and ProcessGroupNCCL).
    """
    for device in default._device_types:
        backend: Any = default._get_backend(device)
        if backend.name() in ("gloo", "nccl") and not backend.options.global_ranks_in_group:
            backend.options.global_ranks_in_group = list(range(default.size()))


def make_meshes(
    device: torch.device, parallel: ParallelConfig, timeout_s: float
) -> tuple[list[DeviceMesh], list[dist.ProcessGroup]]:
    """Makes the meshes ("dp", "attention_tp") and ("ep", "moe_tp") over all ranks. Collective.

    Returns the meshes, and the groups made for them, which `World.close` destroys. Under NCCL these are none:
    torch names the groups that it splits after their ranks, so a later split would read the keys of a destroyed one.
    """
    default = dist.distributed_c10d._get_default_group()
    shapes = ((parallel.dp_size, parallel.attention_tp_size), (parallel.ep_size, parallel.moe_tp_size))
    named = list(zip(shapes, (("dp", "attention_tp"), ("ep", "moe_tp")), strict=True))
    if uses_nccl(device):
        torch.cuda.set_device(device)
        make_splittable(default)
        return [init_device_mesh("cuda", shape, mesh_dim_names=name) for shape, name in named], []
    made: dict[str, dist.ProcessGroup] = {}
    meshes: list[DeviceMesh] = []
    for shape, name in named:
        ranks = torch.arange(default.size(), device="cpu").view(shape)
        groups = [_group_among(parts.tolist(), made, timeout_s) for parts in (ranks.T, ranks)]
        meshes.append(DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=name))
    return meshes, list(made.values())


def _group_among(parts: list[list[int]], made: dict[str, dist.ProcessGroup], timeout_s: float) -> dist.ProcessGroup:
    """Returns the group of this rank's part: the default group if that is all ranks, or one that was made before."""
    if len(parts) == 1:
        return dist.distributed_c10d._get_default_group()
    key = str(parts)
    if key not in made:
        groups = [dist.new_group(part, timeout=timedelta(seconds=2 * timeout_s)) for part in parts]
        mine = next(group for part, group in zip(parts, groups, strict=True) if dist.get_rank() in part)
        made[key] = cast("dist.ProcessGroup", mine)
    return made[key]


def control_group(met: Rendezvous, timeout_s: float, beside: dist.ProcessGroup | None) -> dist.ProcessGroupGloo:
    """Makes a gloo group of the ranks that met; it shares the gloo devices of the group `beside`. Collective.

    Not `dist.new_group`: that names a group after its ranks, so one made after another was destroyed meets its keys in
    the store and connects to sockets that are gone (torch 2.13).
    """
    store = dist.PrefixStore("control", met.store)
    return _gloo(store, met.ranks.index(met.rank), len(met.ranks), timeout_s, _backend_on_cpu(beside))


def payload_group(
    met: Rendezvous,
    name: str,
    ranks: list[int],
    device: torch.device,
    timeout_s: float,
    beside: dist.ProcessGroupGloo | None,
) -> dist.ProcessGroup:
    """Makes a group of some of the ranks that met. Collective over `ranks`.

    Nobody else knows it: torch's registry of groups isn't asked, and need not be whole. One of gloo shares the devices
    of the group `beside`.
    """
    store, place = dist.PrefixStore(name, met.store), ranks.index(met.rank)
    group = dist.ProcessGroup(store, place, len(ranks))
    if uses_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=2 * timeout_s)
        backend, kind = dist.ProcessGroupNCCL(store, place, len(ranks), options), dist.ProcessGroup.BackendType.NCCL
    else:
        backend, kind = _gloo(store, place, len(ranks), timeout_s, beside), dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)
    return group


def _gloo(
    store: dist.Store, rank: int, size: int, timeout_s: float, beside: dist.ProcessGroupGloo | None
) -> dist.ProcessGroupGloo:
    """Makes a gloo group. Groups share a device, because its thread wakes up 100 times a second, also when idle."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    if beside is not None:
        options._devices = beside.options._devices  # pyright: ignore[reportAttributeAccessIssue]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timedelta(seconds=2 * timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _backend_on_cpu(group: dist.ProcessGroup | None) -> dist.ProcessGroupGloo | None:
    """Returns the group's gloo backend for CPU tensors; None where it has another or none."""
    if group is None or torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def group_of_ranks(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    """Returns the payload group of these global ranks, this one among them. One that it makes stays until the host ends
    torch.distributed: destroying it would free its name for a later group of the same ranks (see `control_group`)."""
    if ranks == list(range(dist.get_world_size())):
        return dist.distributed_c10d._get_default_group()
    with start_up(timeout_s):  # torch's own errors are no RankLost, and end a process with another code
        met = rendezvous_in_group(ranks, ranks.index(dist.get_rank()), timeout_s, "")  # names who doesn't come
        met.listener.close()
        read, limit = [f"read/{peer}" for peer in met.ranks], timedelta(seconds=timeout_s)
        ask(lambda: met.base.wait(read, limit), 2 * timeout_s, HOST_STORE)  # NCCL's groups are made without waiting
        ask(met.erase, silent_after(timeout_s), HOST_STORE)
        made = dist.new_group(ranks, timeout=timedelta(seconds=2 * timeout_s), use_local_synchronization=True)
    return cast("dist.ProcessGroup", made)


# Rank 0's servers, by port: they stay until the process ends, since the next World of the same ranks may already have
# connected to the one that the last World made.
_SERVED: dict[int, dist.TCPStore] = {}


def _job_store(rank: int, size: int, timeout_s: float) -> dist.TCPStore:
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    serves = hosts_store(rank)
    if serves and port not in _SERVED:
        listener = _loopback_listener(address, port)
        _SERVED[port] = dist.TCPStore(
            address,
            port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # the host engine may have served this port before
            master_listen_fd=listener,
        )
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def _loopback_listener(address: str, port: int) -> int | None:
    """Returns a listening socket for a store that only this host reaches, or None: torch then listens everywhere."""
    found, _ = resolve(address)
    if not found or not all(map(is_loopback, found)):
        return None
    try:
        return socket.create_server((found[0], port), family=family_of(found[0]), backlog=1024).detach()
    except OSError:  # taken: torch finds its own server of this process, or says so
        return None

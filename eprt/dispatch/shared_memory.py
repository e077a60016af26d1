"""Dispatchers over memory that the ranks share: its allocation, the buffers that calls take, its release."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from eprt.dispatch.base import Dispatcher
from eprt.dispatch.call import KNOB, CallState, Handle
from eprt.errors import CapacityError, ConfigError, RankLost, UsageError, WorldMismatch
from eprt.support import Device, stream_number
from eprt.world import World


class InFlightBuffers:
    """Parts of a buffer that serve one dispatch/combine pair each. The lowest free one is next, hence the same one on
    ranks that make the same calls.

    Args:
        count, what: how many, and whose they are.
        device: where the buffer is, whose streams use it.
    """

    def __init__(self, count: int, what: str, device: torch.device) -> None:
        self.count = count
        self._what = what
        self._device = device
        self._free = set(range(count))
        self._on_gpu = device.type == "cuda"
        self._last_stream: dict[int, tuple[int, torch.cuda.Stream]] = {}  # with its number, which is asked for faster

    def require_free(self) -> None:
        """Raises UsageError if every buffer is in use."""
        if not self._free:
            raise UsageError(
                f"{self._what}: {self.count} dispatches of this geometry are open, which is the limit: combine or "
                "close one before the next dispatch"
            )

    def acquire(self) -> int:
        self.require_free()
        index = min(self._free)
        last = self._last_stream.get(index)
        if last is not None and last[0] != stream_number(self._device):
            self._follow(last[1])
        self._free.remove(index)
        return index

    def reset(self) -> None:
        """Frees all: the calls that hold them were given up."""
        self._free = set(range(self.count))
        self._last_stream.clear()

    def release(self, index: int) -> None:
        if self._on_gpu:
            last = self._last_stream.get(index)
            if last is None or last[0] != stream_number(self._device):
                stream = torch.cuda.current_stream(self._device)
                self._last_stream[index] = stream.cuda_stream, stream
        self._free.add(index)

    def _follow(self, last: torch.cuda.Stream) -> None:
        """Makes reuse follow stream order: waits for work of another stream, unless exactly one of the two is being
        captured: then the order of replay and eager calls is the caller's."""
        current = torch.cuda.current_stream(self._device)
        if _captures(last) == _captures(current):
            current.wait_stream(last)


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Geometry(ABC):
    """All that is baked into a shared memory: the key under which a World keeps it.

    Attributes:
        num_ranks, tokens_per_rank: W, and the capacity (largest R).
    """

    num_ranks: int
    tokens_per_rank: int

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Returns the bytes that a rank pays for each unit of capacity, alignment aside."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Returns the bytes of a rank in all."""


class Memory(Protocol):
    """The memory that the ranks share for one geometry."""

    in_flight: InFlightBuffers


G = TypeVar("G", bound=Geometry)
M = TypeVar("M", bound=Memory)


@dataclass
class BufferCall(CallState):
    """Holds what combine needs of a dispatch: at least the index of the buffer that it used."""

    index: int


class SharedMemoryDispatcher(Dispatcher, Generic[G, M]):
    """Calls go through buffers of a memory that dispatchers of equal geometry share. The first of them that needs it
    makes it, before the end of warm-up; the last that closes frees it.

    Fill in, beside `_dispatch` and `_combine`: `memory_name`, `_make_geometry`, `_allocate`, `_free`, `_send_nan`.
    Their `state` is a `BufferCall`.

    Raises:
        ConfigError: what the plan would refuse.
    """

    memory_name: ClassVar[str]  # as errors name it

    def _set_up(self) -> None:
        device = Device.of(self.world.device)
        verdict = self.spec.supports(self.config, self.world.parallel, self.runtime, device)
        if not verdict:
            raise ConfigError(f"{self.spec.name}: {verdict.reason}")
        self._geometry = self._make_geometry()
        self._key = (self.spec.name, self._geometry, self.runtime.may_leave_out)
        self._memory: M | None = None

    @abstractmethod
    def _make_geometry(self) -> G:
        """Returns the memory's key. World, config, runtime and layer are set; `spec` supports the layer."""

    @abstractmethod
    def _allocate(self) -> M:
        """Makes the memory; every rank has the room. Collective. Raises ConfigError if a rank can't map its peers'."""

    @abstractmethod
    def _free(self, memory: M) -> None:
        """Frees the memory as its last user closes, or its World does, perhaps with a peer lost (`World.broken`)."""

    @abstractmethod
    def _send_nan(self, handle: Handle) -> None:
        """Does what combine does for the peers, with NaN for the experts' output, and frees the buffer."""

    def bytes_per_token(self) -> int:
        return self._geometry.bytes_per_token

    def _ensure_memory(self) -> M:
        """Returns the memory; allocates it the first time, collectively. Raises UsageError if the dispatcher is closed,
        and as `require_allocatable`."""
        if self._memory is None:
            self._require_open()
            self._memory = self.world.resource(self._key, self._checked_allocate, self._free)
        return self._memory

    def _checked_allocate(self) -> M:
        require_allocatable(self.world, self._geometry.num_bytes, self.memory_name)
        return self._allocate()

    def _shared(self) -> M | None:
        return self._memory or self.world.held(self._key)

    def _require_buffer(self) -> None:
        if (memory := self._memory or self._shared()) is not None:
            memory.in_flight.require_free()

    def _release(self, handle: Handle) -> None:
        """Sends NaN for a handle that is dropped, as the peers' combine waits for this rank; not if some of them are
        lost, since then nobody goes on."""
        call = handle.state
        if self._memory is None or not isinstance(call, BufferCall) or self.world.closed:
            return
        try:
            self.check_peers()
        except (RankLost, WorldMismatch):
            self._memory.in_flight.release(call.index)
            return
        self._send_nan(handle)

    def _close(self) -> None:
        if self._memory is not None:
            self._memory = None
            self.world.release(self._key)


def unmapped(name: str, world: World, error: RuntimeError, reach: str) -> ConfigError:
    """Returns the error of a rank whose GPU can't map its peers' memory."""
    return ConfigError(
        f"{name}: rank {world.rank} can't map its peers' GPU memory ({error}): all ranks must be on one host {reach}; "
        "choose dispatcher 'none' or 'torch' otherwise"
    )


def silent(ranks: list[int], waited: str) -> RankLost:
    """Returns the error of ranks that kernels waited for in vain."""
    words = f"rank {ranks[0]} silent: {waited} (missing: {ranks}); the step's outputs are discarded, restart the job"
    return RankLost(words, ranks[0], "silent")


def require_allocatable(world: World, num_bytes: int, what: str) -> None:
    """Compares the ranks' room. Collective; the same verdict on every rank, before any of them allocates.

    Raises:
        UsageError: after `World.warmup()`, after `World.shrink()`, or inside a CUDA graph capture.
        CapacityError: a rank's GPU has less than `num_bytes` free.
    """
    world.require_cold(f"allocating {what}")
    world.require_whole(f"allocating {what}")
    if world.device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(f"allocating {what} during CUDA graph capture: call World.warmup(layer) before it")
    torch.cuda.empty_cache()
    own = torch.tensor([torch.cuda.mem_get_info(world.device)[0]], device="cpu")
    free = world.gather_control(own).flatten().tolist()
    if min(free) < num_bytes:
        raise CapacityError(
            f"{what} needs {num_bytes:,} bytes of GPU memory on every rank, rank {free.index(min(free))} has "
            f"{min(free):,} free: lower {KNOB}, or leave more memory free"
        )

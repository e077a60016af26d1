"""Dispatch and combine with FlashInfer's one-sided all-to-all over NVLink.

The dispatch kernel puts each token once into the memory of every rank that holds one of its experts, behind the rows
its source sent before; the combine kernel pulls the rows that the executors wrote and sums them in float32.

FlashInfer's classes (`MoeAlltoAll`, and `moe_ep.NVLinkOneSidedAlltoAll` on top of it) keep workspaces in a
process-wide cache keyed by size, so that two Worlds or layers of equal size share one and its flags; they never free
it; they allow one call at a time; and the place of the combine region follows from the R of the call, so that a fast
rank's next dispatch with a larger R writes over rows that a slow rank is still combining. The functions below those
classes have no such state, are the same from 0.6.18 to 0.7.2 (0.7.4 has others), and let us place the region: they are
what is used here.
"""

from __future__ import annotations

import ctypes
import inspect
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad

from eprt.dispatch.call import Handle
from eprt.dispatch.shared_memory import BufferCall, Geometry, InFlightBuffers, SharedMemoryDispatcher, unmapped
from eprt.dispatch.spec import FLASHINFER
from eprt.errors import ConfigError
from eprt.rounding import round_up
from eprt.tokens import PAYLOADS, FlatTokens, Payload, TopK, as_bytes
from eprt.world import World
from eprt.world.lifecycle import RankMemory
from eprt.world.wire import gather_values

NUM_BUFFERS = 2

# FlashInfer 0.7.2: csrc/trtllm_moe_alltoall.cu (kCachelineAlignment, calculateOffsets), moeAlltoAllKernels.h
# (kMaxTopK: the width of its routing tables whatever the model's top-k), moeAlltoAllMeta.h (place of an offset).
ALIGNMENT = 128
ROUTING_TABLE_WIDTH = 22
RECV_COUNTERS_OFFSET_INDEX = 3


@dataclass(frozen=True)
class FlashInferGeometry(Geometry):
    """`dispatch_bytes` and `combine_bytes` are what one token brings and what comes back for it."""

    dispatch_bytes: int
    combine_bytes: int

    @cached_property
    def control_bytes(self) -> int:
        """Returns the bytes of counters, flags of both phases, and two routing tables; `calculateOffsets`."""
        W, table = self.num_ranks, self.tokens_per_rank * ROUTING_TABLE_WIDTH
        return sum(round_up(4 * words, ALIGNMENT) for words in (2 + 2 * W, W, W, table, table))

    @cached_property
    def combine_offset(self) -> int:
        """Returns where the rows to combine lie in a buffer, whatever R: behind the largest dispatch."""
        return self.control_bytes + round_up(self.num_ranks * self.tokens_per_rank * self.dispatch_bytes, ALIGNMENT)

    @cached_property
    def buffer_bytes(self) -> int:
        """Returns what `moe_a2a_get_workspace_size_per_rank` asks for."""
        return self.combine_offset + round_up(self.num_ranks * self.tokens_per_rank * self.combine_bytes, ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        return NUM_BUFFERS * self.buffer_bytes

    @property
    def bytes_per_token(self) -> int:
        tables = 2 * 4 * ROUTING_TABLE_WIDTH
        return NUM_BUFFERS * (tables + self.num_ranks * (self.dispatch_bytes + self.combine_bytes))


@dataclass(frozen=True)
class Views:
    """Views of a buffer for the R it was used with last: making them costs more host time than the rest of a call.

    Attributes:
        received: the library's own cache.
        counts: int32 [W], rows that hold a token, of each source's R.
        output: bf16 [W * R, H], from where the peers pull.
    """

    tokens_per_rank: int
    received: dict[Any, Any]
    counts: torch.Tensor
    output: torch.Tensor


class Workspace(RankMemory):
    """One rank's view of the memory: `NUM_BUFFERS` independent workspaces of the library. Making it is collective.

    Attributes:
        in_flight: which buffer is free.
        alive: [W], who takes part.

    Raises:
        ConfigError: this rank's GPU can't map its peers' memory.
    """

    def __init__(self, world: World, geometry: FlashInferGeometry) -> None:
        self.geometry, self._rank, self._library = geometry, world.rank, load_library()
        self._library.get_moe_alltoall_module()  # may compile for minutes: before any rank waits inside a kernel
        world.barrier()
        self._owner, memory = _map_memory(world, geometry.num_bytes)  # the library's allocation, kept alive
        W, R = geometry.num_ranks, geometry.tokens_per_rank
        # Of each buffer uint8 [W, buffer_bytes], every rank's copy as mapped here, and the library's offsets.
        self._parts = list(memory.split(geometry.buffer_bytes, dim=1))
        self._metainfo = [self._library.moe_a2a_initialize(part, world.rank, W, R) for part in self._parts]
        world.barrier()  # nobody raises a flag in memory that a peer is still going to clear
        self.in_flight = InFlightBuffers(NUM_BUFFERS, "flashinfer", memory.device)
        self._views: dict[int, Views] = {}
        self._keeps_views = "recv_view_cache" in inspect.signature(self._library.moe_a2a_dispatch).parameters  # 0.7
        self.alive = (True,) * W
        self._mask = self._active_ranks()

    def close(self) -> None:
        """Waits for this rank's kernels and drops the memory. Peers that still read keep their own mapping of it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._views.clear()
        self._parts.clear()
        self._owner = None

    def dispatch(
        self, index: int, ids: torch.Tensor, payloads: list[torch.Tensor], R: int, num_experts: int
    ) -> list[torch.Tensor]:
        """Sends [T, n] of each payload; returns [W, R, n] of each, views of this buffer."""
        options = {"recv_view_cache": self.views(index, R).received} if self._keeps_views else {}
        call = self._call(index, R, ids.shape[1])
        received, _, _ = self._library.moe_a2a_dispatch(ids, payloads, *call, num_experts, **self._mask, **options)
        return received

    def _call(self, index: int, R: int, top_k: int) -> tuple[Any, ...]:
        """Returns the arguments that the library's dispatch and combine have in common."""
        return self._parts[index], self._metainfo[index], R, self._rank, self.geometry.num_ranks, top_k

    def views(self, index: int, R: int) -> Views:
        found = self._views.get(index)
        if found is None or found.tokens_per_rank != R:
            rows, size = self.geometry.num_ranks * R, self.geometry.combine_bytes
            with torch.inference_mode(False):  # calls outside of it may come, and write
                counts = self._counts(index)
                output = self._own(index, self.geometry.combine_offset, rows * size).view(torch.bfloat16).view(rows, -1)
            found = self._views[index] = Views(R, {}, counts, output)
        return found

    def combine(self, index: int, rows: torch.Tensor, R: int, top_k: int, out: torch.Tensor, fp8: bool = False) -> None:
        """Sums each token's rows over the ranks, into out [T, H].

        Args:
            rows: bf16 [W * R, H], in the workspace or not.
            fp8: rows travel as E4M3, cast without a scale; the same on every rank.
        """
        own = self.views(index, R).output
        if fp8 and rows.data_ptr() != own.data_ptr():
            # Rows cast in the workspace stay as far apart as bf16 rows, others are packed, and a rank takes its peers'
            # to be like its own: so every rank casts them in the workspace, wherever its executor wrote them.
            rows = own.copy_(rows)
        self._library.moe_a2a_combine(
            rows.view(self.geometry.num_ranks, R, rows.shape[1]),
            out.shape[0],
            *self._call(index, R, top_k),
            self.geometry.combine_offset,
            payload_in_workspace=rows.data_ptr() == own.data_ptr(),
            output=out,
            **self._mask,
            **({"use_low_precision": True} if fp8 else {}),
        )

    def resume(self, alive: tuple[bool, ...]) -> None:
        self.alive = alive
        self._mask = self._active_ranks()
        for index in range(NUM_BUFFERS):
            for rank in (rank for rank, here in enumerate(alive) if not here):
                self._counts(index)[rank] = 0  # nobody else clears what the rank sent last
        self.in_flight.reset()

    def _active_ranks(self) -> dict[str, Any]:
        """Returns the library's mask. Its kernels send an id e to rank e // L, and the invalid id E to rank W: with the
        bits of ranks alone, invalid ids go nowhere and count for nothing, like those of ranks left out."""
        W = self.geometry.num_ranks
        mask = self._library.moe_a2a_active_rank_mask([rank for rank in range(W) if self.alive[rank]], W)
        return {"enable_rank_mask": True, "active_rank_mask": mask}

    def _counts(self, index: int) -> torch.Tensor:
        start = int(self._metainfo[index][RECV_COUNTERS_OFFSET_INDEX])
        return self._own(index, start, 4 * self.geometry.num_ranks).view(torch.int32)

    def _own(self, index: int, start: int, size: int) -> torch.Tensor:
        return self._parts[index][self._rank, start : start + size]


class FlashInferDispatcher(SharedMemoryDispatcher[FlashInferGeometry, Workspace]):
    """Emits W * R flat rows, rank by rank; top-k entries of absent tokens and of other ranks' experts hold E.

    Ids and weights have the next instantiated top-k as their width; added entries hold E. Two calls may be open,
    over all dispatchers of equal geometry (world size, capacity, bytes of a token): they share their memory. Under CUDA
    graphs R and T are static; a row whose ids are all E travels nowhere. The kernels wait up to 300 s for a peer
    (`check_timeout`), then trap; the World's guard reports the peer before that. The rank mask is an argument of the
    kernels, so that CUDA graphs keep the one of their capture.

    Raises:
        ConfigError: what the plan would refuse (ranks, top-k, payload, package); a FlashInfer without an FP8 combine
            if that is asked for.
    """

    memory_name = "the FlashInfer workspace"

    def _set_up(self) -> None:
        super()._set_up()
        self._top_k = self.spec.padded_top_k(self.config.top_k)
        self._fp8_combine = self.runtime.combine_payload == "fp8"
        if self._fp8_combine:
            require_fp8_combine()

    def _make_geometry(self) -> FlashInferGeometry:
        facts, H = PAYLOADS[self.runtime.payload or "bf16"], self.config.hidden_size
        routing = 8 * self.spec.padded_top_k(self.config.top_k)
        return FlashInferGeometry(
            num_ranks=self.world.size,
            tokens_per_rank=self.runtime.max_tokens_per_rank,
            dispatch_bytes=routing + facts.data_bytes(H) + facts.scale_bytes(H),
            combine_bytes=2 * H,  # for FP8, too: the library asks for room for what it casts
        )

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """Returns [W * R, H] bf16 of the workspace: what is written here, combine doesn't copy."""
        call = handle.state
        if self._memory is None or not isinstance(call, BufferCall):
            return None
        return self._memory.views(call.index, handle.tokens_per_rank).output

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens:
        self.world.raise_if_lost()
        memory, E, extra = self._ensure_memory(), self.config.num_experts, self._top_k - self.config.top_k
        ids, weights = topk.ids.contiguous(), topk.weights.contiguous()
        if extra:
            ids, weights = pad(ids, (0, extra), value=E), pad(weights, (0, extra))
        sent = {"data": as_bytes(hidden.data.contiguous()), "ids": ids, "weights": weights}
        if hidden.scale is not None:
            sent["scale"] = as_bytes(hidden.scale.contiguous())
        # A receive region starts right behind the one before: the wider a row's own alignment, the earlier it comes,
        # so that each may be moved in its widest words.
        order = sorted(sent, key=lambda name: -math.gcd(16, sent[name].shape[1] * sent[name].element_size()))
        index = memory.in_flight.acquire()
        try:
            received = memory.dispatch(index, ids, [sent[name] for name in order], handle.tokens_per_rank, E)
        except BaseException:  # nothing was launched: the buffer is free again
            memory.in_flight.release(index)
            raise
        handle.state = BufferCall(index)
        found = dict(zip(order, received, strict=True))
        from eprt.dispatch import library_triton

        counts, shard = memory.views(index, handle.tokens_per_rank).counts, self.shard
        experts = shard.first_expert, shard.end_expert, E
        library_triton.mask_foreign_ids(found["ids"], counts, *experts, pdl=True)
        rows = {name: tensor.flatten(0, 1) for name, tensor in found.items()}
        scale = None if hidden.scale is None else rows["scale"].view(hidden.scale.dtype)
        payload = Payload(rows["data"].view(hidden.data.dtype), hidden.format, scale, hidden.global_scale)
        return FlatTokens(payload, rows["ids"], rows["weights"], E)

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        self.world.raise_if_lost()
        out = expert_output.new_empty((handle.num_tokens, self.config.hidden_size), dtype=handle.dtype)
        self._finish(expert_output.to(torch.bfloat16).contiguous(), handle, out)
        return out

    def _send_nan(self, handle: Handle) -> None:
        memory, index = self._ensure_memory(), handle.kept(BufferCall).index
        rows = memory.views(index, handle.tokens_per_rank).output.fill_(torch.nan)
        self._finish(rows, handle, rows[:0].clone())

    def _finish(self, rows: torch.Tensor, handle: Handle, out: torch.Tensor) -> None:
        memory, index = self._ensure_memory(), handle.kept(BufferCall).index
        memory.combine(index, rows, handle.tokens_per_rank, self._top_k, out, self._fp8_combine)
        memory.in_flight.release(index)

    def _allocate(self) -> Workspace:
        return Workspace(self.world, self._geometry)

    def _free(self, memory: Workspace) -> None:
        if self.world.broken:
            _keep_forever(memory)  # a kernel may wait in it for a peer that won't come
        else:
            memory.close()


class ControlPlane:
    """The library's `CommBackend` over the World's agreement: bounded waits, and no process group of its own."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Get_rank(self) -> int:  # noqa: N802 - the protocol's names
        return self._world.rank

    def Get_size(self) -> int:  # noqa: N802
        return self._world.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(gather_values(self._world, data))

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self._world.barrier()

    def Split(self, color: int, key: int) -> ControlPlane:  # noqa: N802
        """Returns itself: the World is already the group that shares the memory."""
        return self


def load_library() -> Any:
    """Returns the module of FlashInfer's functions. Raises ConfigError if it can't be imported."""
    try:
        from flashinfer.comm import trtllm_moe_alltoall
    except (ImportError, OSError) as error:
        raise ConfigError(f"flashinfer can't be loaded ({error}): pip install '{FLASHINFER.wanted}'") from error
    return trtllm_moe_alltoall


def require_fp8_combine() -> None:
    """Raises ConfigError if this FlashInfer's combine has no FP8."""
    if "use_low_precision" not in inspect.signature(load_library().moe_a2a_combine).parameters:
        raise ConfigError(
            "flashinfer: this version brings outputs back in bf16 only: pip install "
            f"'{replace(FLASHINFER, minimum='0.7.2').wanted}', or combine_payload=None"
        )


def _map_memory(world: World, num_bytes: int) -> tuple[object, torch.Tensor]:
    """Returns the library's allocation, and uint8 [W, num_bytes]: every rank's memory as mapped here."""
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory

    W = world.size
    mapping = Mapping(world_size=W, rank=world.rank, gpus_per_node=W, tp_size=W, moe_ep_size=W, moe_tp_size=1)
    try:
        MnnvlMemory.initialize()
        MnnvlMemory.set_comm_from_config(mapping, MnnvlConfig(comm_backend=ControlPlane(world)))
        memory = MnnvlMemory(mapping, num_bytes)
    except RuntimeError as error:
        raise unmapped("flashinfer", world, error, "or one NVLink fabric") from error
    mapped = memory.as_torch_strided_tensor(torch.uint8)
    # torch calls into the capsule when the last view goes, which can be after the one tensor that keeps the capsule
    # alive (a crash): keep its few hundred bytes for good.
    _keep_forever(getattr(mapped, "_capsule_wrapper", None))
    return memory, mapped


def _keep_forever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

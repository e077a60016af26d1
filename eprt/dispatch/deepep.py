"""Dispatch and combine with DeepEP's low-latency kernels: one message per (token, expert), weights applied in combine.

Rows arrive grouped by expert, so an executor with a masked grouped GEMM takes them as they are. It is a decode
transport: capacity is at most 1024 tokens a rank, and the buffer grows with experts x capacity x hidden size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eprt import expert_major
from eprt.dispatch.call import Handle
from eprt.dispatch.shared_memory import BufferCall, Geometry, InFlightBuffers, SharedMemoryDispatcher, silent
from eprt.dispatch.spec import DEEPEP_MAX_TOKENS
from eprt.errors import ConfigError, UsageError
from eprt.rounding import ceil_div, round_up
from eprt.tokens import ExpertMajorTokens, Payload, TopK
from eprt.weights import FP8_BLOCK
from eprt.world.lifecycle import RankMemory

MAX_OPEN = 2  # deep_ep 1.2.1: the warnings and asserts of deep_ep/buffer.py
QP_DEPTH_VARIABLE = "NVSHMEM_QP_DEPTH"


@dataclass(frozen=True)
class DeepEPGeometry(Geometry):
    """`tokens_per_rank` is a `least_capacity`, `hidden_size` an instantiated one."""

    num_experts: int
    hidden_size: int

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of an even and an odd buffer, each with room to send and to receive one message per expert
        (csrc/config.hpp, LowLatencyLayout)."""
        scales = self.hidden_size // FP8_BLOCK
        dispatch = 16 + max(2 * self.hidden_size, self.hidden_size + 4 * scales)
        combine = 2 * self.hidden_size + 4 * scales
        send = max(dispatch, self.num_experts * combine)
        receive = self.num_experts * max(dispatch, combine)
        return 2 * (send + receive)

    @property
    def num_bytes(self) -> int:
        """Returns what `Buffer.get_low_latency_rdma_size_hint` asks for: one more flag an expert, a multiple of 128."""
        flags = round_up(4 * self.num_experts, 128)
        return (2 * flags + self.tokens_per_rank * self.bytes_per_token + 128) // 128 * 128


def least_capacity(num_ranks: int, tokens: int) -> int:
    """Returns the least capacity for these tokens per rank: W of it must be a multiple of 4 (csrc/deep_ep.cpp, TMA)."""
    return round_up(tokens, 4 // math.gcd(4, num_ranks))


@dataclass
class LowLatencyBuffer(RankMemory):
    """The library's buffer of one geometry.

    Attributes:
        in_flight: how many results in it are alive.
        alive: [W], who takes part.
        given_up: int32 [W] of host memory that the GPU writes, not 0 for ranks that the kernels leave out; None in a
            buffer without a mask, whose kernels trap where they give up a peer.
    """

    library: Any
    buffer: Any
    in_flight: InFlightBuffers
    alive: tuple[bool, ...]
    given_up: torch.Tensor | None

    def resume(self, alive: tuple[bool, ...]) -> None:
        if self.given_up is None:
            raise UsageError("deepep: the buffer has no rank mask: build its layers with on_rank_lost='continue'")
        for rank, (before, now) in enumerate(zip(self.alive, alive, strict=True)):
            if before and not now:
                self.buffer.low_latency_update_mask_buffer(rank, True)  # the library's mask: True is left out
        self.alive = alive
        self.given_up.zero_()
        self.in_flight.reset()

    def raise_given_up(self) -> None:
        """Raises RankLost if an earlier kernel gave up a peer and went on without it. No device sync."""
        if self.given_up is None or not self.given_up.any():
            return
        lost = [rank for rank, masked in enumerate(self.given_up.tolist()) if masked and self.alive[rank]]
        if lost:
            raise silent(lost, "deepep's kernels waited about 100 s for it and left it out")


@dataclass
class _Call(BufferCall):
    """Holds what combine needs of a dispatch.

    Attributes:
        ids: int64 [T, K], -1 where there is no expert.
        received: the library's handle.
        receive: of a deferred dispatch, what makes the rows arrive.
        counts: int32 [L], valid rows of each expert.
        scale: of packed tokens, (as it arrives, as the executor reads it); else None.
        output: rows as wide as combine takes them, made on first use; `output_buffer` shows their first H columns.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    received: tuple[Any, ...]
    receive: Callable[[], None]
    counts: torch.Tensor
    scale: tuple[torch.Tensor, torch.Tensor] | None = None
    output: torch.Tensor | None = None

    def copy_scale(self) -> None:
        if self.scale is not None:
            expert_major.copy_valid_rows(*self.scale, self.counts)


class DeepEPDispatcher(SharedMemoryDispatcher[DeepEPGeometry, LowLatencyBuffer]):
    """Emits W * capacity rows for each local expert (masked layout), the capacity rounded up to what the library takes.

    Other hidden sizes travel padded to the next instantiated one: rows lie as far apart as that, and so do those of
    `output_buffer`; outputs that lie elsewhere are copied. Tokens must be bf16; the library itself quantises them for
    the `fp8_block` payload (scale = amax / 448 of 128 values). Two calls may be open at once, over all dispatchers of
    equal geometry; all of them must run in one stream order, on every rank the same. The kernels wait about 100 s for a
    peer, then trap; the World's guard reports the peer before that.

    Where ranks may be left out (`RuntimeConfig.on_rank_lost`) the buffer has a mask in device memory, which CUDA graphs
    follow. Its kernels don't trap after those 100 s but mask the peer themselves, each rank for itself: the next call
    then raises RankLost, at the price of one small kernel a combine.

    `NVSHMEM_QP_DEPTH` is set for the largest capacity unless the environment has it; NVSHMEM reads it once.

    Raises:
        ConfigError: what the plan would refuse (capacity, hidden size, top-k, payload, package), a world of one,
            an `NVSHMEM_QP_DEPTH` that is too small.
    """

    memory_name = "the DeepEP low-latency buffer"

    def _set_up(self) -> None:
        super()._set_up()
        if self.world.group is None:
            raise ConfigError("deepep: a world of one has no process group and nothing to send; use 'none'")
        require_qp_depth(self._geometry.tokens_per_rank)

    def _make_geometry(self) -> DeepEPGeometry:
        W, H = self.world.size, self.spec.padded_hidden(self.config.hidden_size)
        return DeepEPGeometry(W, least_capacity(W, self.runtime.max_tokens_per_rank), self.config.num_experts, H)

    def max_rows(self) -> int:
        return self._rows_shape()[1]

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """Returns [L, M, H] bf16, rows as far apart as the library takes them; None where that is H."""
        call, shape = handle.state, self._rows_shape()
        if not isinstance(call, _Call) or shape[2] == self.config.hidden_size:
            return None
        if call.output is None:
            call.output = torch.empty(shape, dtype=torch.bfloat16, device=self.world.device)
        return call.output[..., : self.config.hidden_size]

    def warmup(self) -> None:
        """Warms up what an executor that wants dense rows does, too: the copy is compiled for a dtype and for how far
        rows lie apart. Base's combine makes that of outputs."""
        super().warmup()
        if self._rows_shape()[2] != self.config.hidden_size:
            dtype = torch.float8_e4m3fn if self.runtime.payload == "fp8_block" else torch.bfloat16
            wide = torch.empty(self._rows_shape(), dtype=dtype, device=self.world.device)
            none = torch.zeros(self.shard.num_local_experts, dtype=torch.int32, device=self.world.device)
            expert_major.dense(wide[..., : self.config.hidden_size], none)

    def _encode(self, hidden_states: torch.Tensor) -> Payload:
        """Leaves the tokens as they are: the library quantises by itself."""
        return Payload.plain(hidden_states)

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> ExpertMajorTokens:
        self.check_peers()
        memory = self._ensure_memory()
        geometry, packed = self._geometry, self.runtime.payload == "fp8_block"
        from eprt.dispatch import library_triton

        x, ids = library_triton.pack_tokens(hidden.data, topk.ids, geometry.hidden_size, geometry.num_experts)
        ids = ids.to(memory.library.topk_idx_t)
        sizes = geometry.tokens_per_rank, geometry.num_experts
        index = memory.in_flight.acquire()
        try:
            rows, counts, received, _, receive = memory.buffer.low_latency_dispatch(
                x, ids, *sizes, use_fp8=packed, return_recv_hook=handle.deferred
            )
        except BaseException:  # nothing was launched: the buffer is free again
            memory.in_flight.release(index)
            raise
        handle.state = call = _Call(index, ids, topk.weights.contiguous(), received, receive, counts)
        payload = self._packed(rows, call) if packed else Payload(rows[..., : self.config.hidden_size])
        if not handle.deferred:
            call.copy_scale()
        return ExpertMajorTokens(payload, counts, handle.tokens_per_rank * self.world.size)

    def _packed(self, rows: tuple[torch.Tensor, torch.Tensor], call: _Call) -> Payload:
        """Returns E4M3 rows whose scales are still to be copied (`copy_scale`): the library's have their last two
        dimensions swapped in memory, for the sake of its own GEMM."""
        data, scale = rows
        scale = scale[..., : ceil_div(self.config.hidden_size, FP8_BLOCK)]
        call.scale = scale, torch.empty_like(scale, memory_format=torch.contiguous_format)
        return Payload(data[..., : self.config.hidden_size], "fp8_block", call.scale[1])

    def _wait(self, handle: Handle) -> None:
        call = handle.kept(_Call)
        call.receive()
        call.copy_scale()

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        self.check_peers()
        H, rows, call = self.config.hidden_size, expert_output.to(torch.bfloat16), handle.kept(_Call)
        buffer = self.output_buffer(handle)
        if buffer is None or call.output is None:
            return self._finish(rows.contiguous(), handle)
        if rows.data_ptr() != buffer.data_ptr() or rows.stride() != buffer.stride():
            expert_major.copy_valid_rows(rows, buffer, call.counts)
        return self._finish(call.output, handle)[:, :H].contiguous()

    def _send_nan(self, handle: Handle) -> None:
        handle.wait()
        self._finish(torch.full(self._rows_shape(), torch.nan, dtype=torch.bfloat16, device=self.world.device), handle)

    def _finish(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        memory, call = self._ensure_memory(), handle.kept(_Call)
        out, _, _ = memory.buffer.low_latency_combine(rows, call.ids, call.weights, call.received)
        if memory.given_up is not None:
            memory.buffer.low_latency_query_mask_buffer(memory.given_up)
        memory.in_flight.release(call.index)
        return out

    def _rows_shape(self) -> tuple[int, int, int]:
        """Returns [L, M, padded H]."""
        geometry = self._geometry
        rows = geometry.num_ranks * geometry.tokens_per_rank
        return self.shard.num_local_experts, rows, geometry.hidden_size

    def check_peers(self) -> None:
        self.world.raise_if_lost()
        self._ensure_memory().raise_given_up()

    def _allocate(self) -> LowLatencyBuffer:
        geometry = self._geometry
        library = load_library()
        buffer = library.Buffer(
            self.world.group,
            num_rdma_bytes=library.Buffer.get_low_latency_rdma_size_hint(
                geometry.tokens_per_rank, geometry.hidden_size, geometry.num_ranks, geometry.num_experts
            ),
            low_latency_mode=True,
            num_qps_per_rank=self.shard.num_local_experts,
            explicitly_destroy=True,
            enable_shrink=self.runtime.may_leave_out,
        )
        W, in_flight = geometry.num_ranks, InFlightBuffers(MAX_OPEN, "deepep", self.world.device)
        given_up = torch.zeros(W, dtype=torch.int32, device="cpu", pin_memory=self.world.device.type == "cuda")
        return LowLatencyBuffer(
            library, buffer, in_flight, (True,) * W, given_up if self.runtime.may_leave_out else None
        )

    def _free(self, memory: LowLatencyBuffer) -> None:
        """Frees the memory, unless a peer may never come to the library's barrier, which has no time limit."""
        if self.world.whole:
            memory.buffer.destroy()


def require_qp_depth(capacity: int) -> None:
    """Makes NVSHMEM's queues deep enough, before the first buffer of the process starts it.

    Raises:
        ConfigError: the environment sets no number, or less than 2 * (capacity + 1).
    """
    depth = os.environ.setdefault(QP_DEPTH_VARIABLE, str(2 * (DEEPEP_MAX_TOKENS + 1)))
    needed = 2 * (capacity + 1)
    if not depth.isdigit() or int(depth) < needed:
        raise ConfigError(
            f"deepep: {QP_DEPTH_VARIABLE} is {depth}, max_tokens_per_rank {capacity} needs {needed}: "
            "raise it, or leave it unset, before the process makes its first buffer"
        )


def load_library() -> Any:
    """Returns the module `deep_ep`. Raises ConfigError if it can't be imported or is another one."""
    remedy = "pip install 'tokenspeed-deepep==1.2.1.post20251110' (PyPI's deep-ep 1.0.0 is a placeholder)"
    try:
        import deep_ep
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"deepep: deep_ep can't be loaded ({error}): {remedy}, and put the lib folder of nvidia-nvshmem-cu13 "
            "on LD_LIBRARY_PATH"
        ) from error
    if not hasattr(deep_ep, "Buffer"):
        raise ConfigError(f"deepep: the installed deep_ep has no Buffer: {remedy}")
    return deep_ep

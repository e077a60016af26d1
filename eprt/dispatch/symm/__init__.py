"""Dispatch and combine over torch symmetric memory: one kernel each, for the GPUs of one NVLink host.

Dispatch packs rows if asked to and pushes them, with their routing, straight into the memory of the ranks that hold the
experts; combine pulls the rows that their executors wrote and sums them in float32. `kernels.py` says why that
needs no barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eprt.dispatch.call import Handle, unwanted_token
from eprt.dispatch.shared_memory import BufferCall, SharedMemoryDispatcher
from eprt.dispatch.symm.memory import SymmetricMemory, SymmGeometry
from eprt.tokens import FlatTokens, Payload, TopK

if TYPE_CHECKING:
    from eprt.dispatch.symm.launch import Launcher


@dataclass
class _Call(BufferCall):
    """Holds what combine needs of a dispatch: the `ids` that were sent, and `output`, from where the peers pull."""

    ids: torch.Tensor
    output: torch.Tensor


class SymmetricMemoryDispatcher(SharedMemoryDispatcher[SymmGeometry, SymmetricMemory]):
    """Emits W * R flat rows, rank by rank; top-k entries of absent tokens and of other ranks' experts hold E.

    Two calls may be open at once, over all dispatchers of equal geometry (world size, capacity, H, K, payload): they
    share their memory. On several streams, start the experts of both before the combine of either: its CTAs wait on
    every SM, and an executor that needs whole SMs might not get past them. Under CUDA graphs R and T are static; a row
    whose ids are all E travels nowhere. Replays and eager calls must be ordered by the caller, as they would be for any
    buffer that both use.
    """

    memory_name = "symm's symmetric memory"
    _launcher: Launcher | None = None

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """Returns [W * R, H] bf16 of symmetric memory: what is written here, combine doesn't copy."""
        call = handle.state
        return call.output if isinstance(call, _Call) else None

    def warmup(self) -> None:
        """Allocates, compiles on every rank before any rank waits for another, then exchanges an empty batch with each
        kernel."""
        self.check_peers()
        launcher = self._ready()
        self.world.barrier()
        for R in launcher.row_counts:
            index = launcher.memory.in_flight.acquire()
            token, topk = unwanted_token(self.config, self.world.device)
            launcher.dispatch(index, token, topk, R, self.payload_scale)
            self._finish(index, token, topk.ids, R)
        torch.cuda.synchronize(self.world.device)
        self.check_peers()

    def _encode(self, hidden_states: torch.Tensor) -> Payload:
        """Leaves the tokens as they are: the kernel packs bf16 on the way."""
        return Payload(hidden_states)

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens:
        self.check_peers()
        launcher, R, scale = self._ready(), handle.tokens_per_rank, self.payload_scale
        memory = launcher.memory
        if not (topk.ids.is_contiguous() and topk.weights.is_contiguous()):
            topk = TopK(topk.ids.contiguous(), topk.weights.contiguous())
        index = memory.in_flight.acquire()
        try:
            launcher.dispatch(index, hidden.data, topk, R, scale)
        except BaseException:  # nothing was launched: the buffer is free again
            memory.in_flight.release(index)
            raise
        handle.state = _Call(index, topk.ids, memory.output(index, R))
        tokens = memory.tokens(index, R, self.config.num_experts, scale)
        for rank in memory.lost:  # no kernel of its says that its rows hold no token
            tokens.ids[rank * R : (rank + 1) * R] = self.config.num_experts
        return tokens

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        self.check_peers()
        call = handle.kept(_Call)
        buffer = call.output
        if expert_output is not buffer and (
            expert_output.data_ptr() != buffer.data_ptr() or expert_output.stride() != buffer.stride()
        ):
            buffer.copy_(expert_output)
        out = torch.empty(handle.num_tokens, self.config.hidden_size, dtype=handle.dtype, device=self.world.device)
        self._finish(call.index, out, call.ids, handle.tokens_per_rank)
        return out

    def _send_nan(self, handle: Handle) -> None:
        call = handle.kept(_Call)
        nothing = call.output.fill_(torch.nan)[:0].clone()
        self._finish(call.index, nothing, call.ids[:0], handle.tokens_per_rank)

    def _finish(self, index: int, out: torch.Tensor, ids: torch.Tensor, R: int) -> None:
        launcher = self._ready()
        launcher.combine(index, out, ids, R)
        launcher.memory.in_flight.release(index)

    def _make_geometry(self) -> SymmGeometry:
        rows, payload = self.runtime.max_tokens_per_rank, self.runtime.payload or "bf16"
        return SymmGeometry(self.world.size, rows, self.config.hidden_size, self.config.top_k, payload)

    def _allocate(self) -> SymmetricMemory:
        return SymmetricMemory.allocate(self.world, self._geometry)

    def _free(self, memory: SymmetricMemory) -> None:
        memory.close()

    def _ready(self) -> Launcher:
        """Returns the launcher; allocates and compiles the first time, as `_ensure_memory`."""
        if self._launcher is None:
            memory = self._ensure_memory()
            from eprt.dispatch.symm.launch import Launcher

            self.world.require_cold("compiling the symm kernels")
            E, L = self.config.num_experts, self.placement.num_local_experts
            self._launcher = Launcher(memory, E, L, self.world.parallel.moe_tp_size, self.world.timeout_s)
        return self._launcher

    def _close(self) -> None:
        self._launcher = None
        super()._close()

    def check_peers(self) -> None:
        """Raises what every call would raise, too."""
        self.world.raise_if_lost()
        if self._memory is not None:
            self._memory.raise_faults(self.world.timeout_s)

"""Dispatch and combine over torch symmetric memory: one kernel each, for the GPUs of one NVLink host.

Dispatch packs rows if asked to and pushes them, with their routing, straight into the memory of the ranks that hold the
experts; combine pulls the rows that their executors wrote and sums them in float32. `kernels.py` says why that
needs no barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eprt.config import MoEConfig, RuntimeConfig, TokenFormat
from eprt.dispatch.base import Dispatcher
from eprt.dispatch.handle import Handle
from eprt.dispatch.shared_memory import Slots
from eprt.dispatch.symm.memory import Geometry, SymmetricMemory
from eprt.errors import ConfigError, RankLost, WorldMismatch
from eprt.support import Device
from eprt.tokens import FlatTokens, Payload, TopK

if TYPE_CHECKING:
    from eprt.dispatch.symm.launch import Launcher
    from eprt.world import World


@dataclass(frozen=True)
class _Call:
    """What combine needs of a dispatch."""

    slot: int
    ids: torch.Tensor


class SymmetricMemoryDispatcher(Dispatcher):
    """Emits W * R flat rows, rank by rank; slots of absent tokens and of other ranks' experts hold E.

    Two calls may be open at once, over all dispatchers of equal geometry (world size, capacity, H, K, payload): they
    share their memory. On several streams, start the experts of both before the combine of either: its CTAs wait on
    every SM, and an executor that needs whole SMs might not get past them. Under CUDA graphs R and T are static; a row
    whose ids are all E travels nowhere. Replays and eager calls must be ordered by the caller, as they would be for any
    buffer that both use.

    Raises:
        ConfigError: what the plan would refuse (device, ranks, capacity, payload, package).
    """

    def __init__(
        self,
        world: World,
        config: MoEConfig,
        runtime: RuntimeConfig,
        token_format: TokenFormat = "flat",
        layer: int = 0,
    ) -> None:
        verdict = self.spec.supports(config, world.parallel, runtime, Device.of(world.device))
        if not verdict:
            raise ConfigError(f"symm: {verdict.reason}")
        self._geometry = Geometry.of(world.size, config, runtime)
        self._key = ("symm", self._geometry)
        self._launcher: Launcher | None = None
        self._compiled = False
        super().__init__(world, config, runtime, token_format, layer)

    def bytes_per_token(self) -> int:
        return self._geometry.bytes_per_token

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """[W * R, H] bf16 of symmetric memory: what is written here, combine doesn't copy."""
        call = handle.state
        if self._launcher is None or not isinstance(call, _Call):
            return None
        return self._launcher.memory.output(call.slot, handle.tokens_per_rank)

    def warmup(self) -> None:
        """Allocate, compile on every rank before any rank waits for another, then exchange an empty batch with each
        kernel."""
        self.check_peers()
        launcher = self._require_launcher()
        self._compile()
        self.world.barrier()
        for R in launcher.row_counts(self.capacity.max_tokens_per_rank):
            slot = launcher.memory.slots.acquire()
            self._exchange_nothing(slot, R, compile_only=False)
            launcher.memory.slots.release(slot)
        torch.cuda.synchronize(self.world.device)
        self.check_peers()

    # ---- the two verbs --------------------------------------------------------------------------------------

    def _encode(self, hidden_states: torch.Tensor) -> Payload:
        """The kernel packs on the way."""
        return Payload.plain(hidden_states)

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens:
        self.check_peers()
        launcher = self._require_launcher()
        self._compile()
        R, memory = handle.tokens_per_rank, launcher.memory
        topk = TopK(topk.ids.contiguous(), topk.weights.contiguous())
        slot = memory.slots.acquire()
        try:
            launcher.dispatch(slot, hidden.data, topk, R, self.world.timeout_s, self.payload_scale)
        except BaseException:  # nothing was launched: the slot is free again
            memory.slots.release(slot)
            raise
        handle.state = _Call(slot, topk.ids)
        return FlatTokens(
            memory.payload(slot, R, self.payload_scale),
            *memory.routing(slot, R),
            num_experts=self.config.num_experts,
        )

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        self.check_peers()
        call: _Call = handle.state
        buffer = self._require_launcher().memory.output(call.slot, handle.tokens_per_rank)
        if expert_output.data_ptr() != buffer.data_ptr() or expert_output.stride() != buffer.stride():
            buffer.copy_(expert_output)
        out = torch.empty(handle.num_tokens, self.config.hidden_size, dtype=handle.dtype, device=self.world.device)
        self._finish(call.slot, out, call.ids, handle.tokens_per_rank)
        return out

    def _release(self, handle: Handle) -> None:
        """The peers' combine waits for this rank's flag, so a handle that is dropped still raises it, unless some of
        them are lost: then nobody goes on. What they pull is NaN, not the numbers of an earlier call."""
        call = handle.state
        if self._launcher is None or not isinstance(call, _Call) or self.world.closed:
            return
        memory = self._launcher.memory
        try:
            self.check_peers()
        except (RankLost, WorldMismatch):
            memory.slots.release(call.slot)
            return
        memory.output(call.slot, handle.tokens_per_rank).fill_(torch.nan)
        none = call.ids[:0]
        out = torch.empty(0, self.config.hidden_size, dtype=torch.bfloat16, device=self.world.device)
        self._finish(call.slot, out, none, handle.tokens_per_rank)

    def _finish(self, slot: int, out: torch.Tensor, ids: torch.Tensor, R: int) -> None:
        launcher = self._require_launcher()
        launcher.combine(slot, out, ids, R, self.world.timeout_s)
        launcher.memory.slots.release(slot)

    # ---- memory ---------------------------------------------------------------------------------------------

    def _slots(self) -> Slots | None:
        if self._launcher is not None:
            return self._launcher.memory.slots
        memory: SymmetricMemory | None = self.world.held(self._key)
        return None if memory is None else memory.slots

    def _require_launcher(self) -> Launcher:
        if self._launcher is None:
            self._require_open()
            from eprt.dispatch.symm.launch import Launcher

            world, E, L = self.world, self.config.num_experts, self.placement.num_local_experts
            memory = world.resource(
                self._key, lambda: SymmetricMemory.allocate(world, self._geometry), SymmetricMemory.close
            )
            self._launcher = Launcher(memory, E, L, world.parallel.moe_tp_size)
        return self._launcher

    def _close(self) -> None:
        if self._launcher is not None:
            self._launcher = None
            self.world.release(self._key)

    # ---- checks ---------------------------------------------------------------------------------------------

    def check_peers(self) -> None:
        """Every call does it, too."""
        self.world.raise_if_lost()
        if self._launcher is not None:
            self._launcher.memory.raise_faults(self.world.timeout_s)

    def _compile(self) -> None:
        if not self._compiled:
            self.world.require_cold("compiling the symm kernels")
            for R in self._require_launcher().row_counts(self.capacity.max_tokens_per_rank):
                self._exchange_nothing(0, R, compile_only=True)
            self._compiled = True

    def _exchange_nothing(self, slot: int, R: int, compile_only: bool) -> None:
        """One row that no expert wants."""
        launcher, timeout_s = self._require_launcher(), self.world.timeout_s
        token, topk = self._unwanted_token()
        launcher.dispatch(slot, token, topk, R, timeout_s, self.payload_scale, compile_only)
        launcher.combine(slot, token, topk.ids, R, timeout_s, compile_only)

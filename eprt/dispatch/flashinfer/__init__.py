"""Dispatch and combine with FlashInfer's one-sided all-to-all over NVLink.

The dispatch kernel puts each token once into the memory of every rank that holds one of its experts, behind the rows
its source sent before; the combine kernel pulls the rows that the executors wrote and sums them in float32.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from eprt.dispatch.call import Handle
from eprt.dispatch.flashinfer.workspace import FlashInferGeometry, Workspace, require_fp8_combine
from eprt.dispatch.shared_memory import BufferCall, SharedMemoryDispatcher
from eprt.support import Device
from eprt.tokens import PAYLOADS, FlatTokens, Payload, TopK, as_bytes


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
        self._device = Device.of(self.world.device)
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
        handle.state = BufferCall(index)
        received = memory.dispatch(index, ids, [sent[name] for name in order], handle.tokens_per_rank, E)
        found = dict(zip(order, received, strict=True))
        from eprt.dispatch import library_triton

        counts, shard = memory.views(index, handle.tokens_per_rank).counts, self.shard
        experts = shard.first_expert, shard.end_expert, E
        library_triton.mask_foreign_ids(found["ids"], counts, *experts, pdl=self._device.sm >= 90)
        rows = {name: tensor.flatten(0, 1) for name, tensor in found.items()}
        scale = None if hidden.scale is None else rows["scale"].view(hidden.scale.dtype)
        payload = Payload(rows["data"].view(hidden.data.dtype), hidden.format, scale, hidden.global_scale)
        return FlatTokens(payload, rows["ids"], rows["weights"], E)

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        self.world.raise_if_lost()
        out = expert_output.new_empty((handle.num_tokens, self.config.hidden_size), dtype=handle.dtype)
        self._finish(expert_output.to(torch.bfloat16).contiguous(), handle, out)
        return out

    def _send_nan(self, memory: Workspace, handle: Handle) -> None:
        index = handle.kept(BufferCall).index
        rows = memory.views(index, handle.tokens_per_rank).output.fill_(torch.nan)
        self._finish(rows, handle, rows[:0].clone())

    def _finish(self, rows: torch.Tensor, handle: Handle, out: torch.Tensor) -> None:
        memory, index = self._ensure_memory(), handle.kept(BufferCall).index
        memory.combine(index, rows, handle.tokens_per_rank, self._top_k, out, self._fp8_combine)
        memory.in_flight.release(index)

    def _allocate(self) -> Workspace:
        return Workspace.allocate(self.world, self._geometry)

    def _free(self, memory: Workspace) -> None:
        if self.world.broken:
            memory.abandon()
        else:
            memory.close()

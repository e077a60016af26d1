"""Dispatch and combine with FlashInfer's one-sided all-to-all over NVLink.

The dispatch kernel puts each token once into the memory of every rank that holds one of its experts, behind the rows
its source sent before; the combine kernel pulls the rows that the executors wrote and sums them in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from eprt.config import MoEConfig, RuntimeConfig, TokenFormat
from eprt.dispatch.base import Dispatcher
from eprt.dispatch.flashinfer.workspace import Geometry, Workspace, require_fp8_combine
from eprt.dispatch.handle import Handle
from eprt.dispatch.rank_mask import RankMask
from eprt.dispatch.shared_memory import Slots
from eprt.errors import ConfigError, RankLost
from eprt.support import Device
from eprt.tokens import FlatTokens, Payload, TopK

if TYPE_CHECKING:
    from eprt.world import World


class FlashInferDispatcher(Dispatcher):
    """Emits W * R flat rows, rank by rank; slots of absent tokens and of other ranks' experts hold E.

    Ids and weights have the next instantiated top-k as their width; added slots hold E. Two calls may be open at once,
    over all dispatchers of equal geometry (world size, capacity, bytes of a token): they share their memory. Under CUDA
    graphs R and T are static; a row whose ids are all E travels nowhere. The kernels wait up to 300 s for a peer
    (`check_timeout`), then trap; the World's guard reports the peer before that. The rank mask is an argument of the
    kernels, so that CUDA graphs keep the one of their capture.

    Raises:
        ConfigError: what the plan would refuse (ranks, top-k, payload, package); a FlashInfer without an FP8 combine
            if that is asked for.
    """

    def __init__(
        self,
        world: World,
        config: MoEConfig,
        runtime: RuntimeConfig,
        token_format: TokenFormat = "flat",
        layer: int = 0,
    ) -> None:
        self._device = Device.of(world.device)
        verdict = self.spec.supports(config, world.parallel, runtime, self._device)
        if not verdict:
            raise ConfigError(f"flashinfer: {verdict.reason}")
        self._fp8_combine = runtime.combine_payload == "fp8"
        if self._fp8_combine:
            require_fp8_combine()
        self._top_k = self.spec.padded_top_k(config.top_k)
        self._geometry = Geometry(
            num_ranks=world.size,
            tokens_per_rank=runtime.max_tokens_per_rank,
            dispatch_bytes=8 * self._top_k + sum(_payload_bytes(config.hidden_size, runtime)),
            combine_bytes=2 * config.hidden_size,  # for FP8, too: the library asks for room for what it casts
        )
        self._key = ("flashinfer", self._geometry, runtime.rank_mask)
        self._memory: Workspace | None = None
        super().__init__(world, config, runtime, token_format, layer)

    def bytes_per_token(self) -> int:
        return self._geometry.bytes_per_token

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """[W * R, H] bf16 of the workspace: what is written here, combine doesn't copy."""
        if self._memory is None or handle.state is None:
            return None
        return self._memory.views(handle.state, handle.tokens_per_rank).output

    # ---- the two verbs --------------------------------------------------------------------------------------

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens:
        self.world.raise_if_lost()
        memory = self._require_memory()
        E, extra = self.config.num_experts, self._top_k - self.config.top_k
        ids, weights = topk.ids.contiguous(), topk.weights.contiguous()
        if extra:
            ids, weights = pad(ids, (0, extra), value=E), pad(weights, (0, extra))
        sent = {"data": _wire(hidden.data.contiguous()), "ids": ids, "weights": weights}
        if hidden.scale is not None:
            sent["scale"] = _wire(hidden.scale.contiguous())
        # A receive region starts right behind the one before: the wider a row's own alignment, the earlier it comes,
        # so that each may be moved in its widest words.
        order = sorted(sent, key=lambda name: -math.gcd(16, sent[name].shape[1] * sent[name].element_size()))
        handle.state = slot = memory.slots.acquire()
        received = memory.dispatch(slot, ids, [sent[name] for name in order], handle.tokens_per_rank, E)
        found = dict(zip(order, received, strict=True))
        from eprt.dispatch.flashinfer import ids_triton

        counts = memory.views(slot, handle.tokens_per_rank).counts
        first, end = self.shard.first_expert, self.shard.end_expert
        ids_triton.mask_foreign_ids(found["ids"], counts, first, end, E, early=self._device.sm >= 90)
        rows = {name: tensor.flatten(0, 1) for name, tensor in found.items()}
        scale = None if hidden.scale is None else rows["scale"].view(hidden.scale.dtype)
        payload = Payload(rows["data"].view(hidden.data.dtype), hidden.format, scale, hidden.global_scale)
        return FlatTokens(payload, rows["ids"], rows["weights"], E)

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        self.world.raise_if_lost()
        out = expert_output.new_empty((handle.num_tokens, self.config.hidden_size), dtype=handle.dtype)
        self._finish(expert_output.to(torch.bfloat16).contiguous(), handle, out)
        return out

    def _release(self, handle: Handle) -> None:
        """The peers' combine waits for this rank's flag, so a handle that is dropped still raises it; what they pull
        is NaN, not the numbers of an earlier call."""
        if handle.state is None or self._memory is None or self.world.closed:
            return
        try:
            self.world.raise_if_lost()
        except RankLost:
            return
        rows = self._memory.views(handle.state, handle.tokens_per_rank).output.fill_(torch.nan)
        self._finish(rows, handle, rows[:0].clone())

    def _finish(self, rows: torch.Tensor, handle: Handle, out: torch.Tensor) -> None:
        memory = self._require_memory()
        memory.combine(handle.state, rows, handle.tokens_per_rank, self._top_k, out, self._fp8_combine)
        memory.slots.release(handle.state)

    def _slots(self) -> Slots | None:
        memory: Workspace | None = self._memory or self.world.held(self._key)
        return None if memory is None else memory.slots

    def _mask(self) -> RankMask | None:
        return None if self._memory is None else self._memory.mask

    def _leave_out(self, alive: tuple[bool, ...]) -> None:
        self._require_memory().leave_out(alive)

    def _require_memory(self) -> Workspace:
        if self._memory is None:
            self._require_open()
            self._memory = self.world.resource(
                self._key, lambda: Workspace.allocate(self.world, self._geometry), self._free
            )
        return self._memory

    def _free(self, memory: Workspace) -> None:
        if self.world.broken:
            memory.abandon()
        else:
            memory.close()

    def _close(self) -> None:
        if self._memory is not None:
            self._memory = None
            self.world.release(self._key)


def _payload_bytes(hidden_size: int, runtime: RuntimeConfig) -> tuple[int, int]:
    """Bytes of one travelling token: data, scale."""
    if runtime.payload == "fp8_block":
        return hidden_size, 4 * -(-hidden_size // 128)
    if runtime.payload == "nvfp4":
        return hidden_size // 2, hidden_size // 16
    return 2 * hidden_size, 0


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 travels as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor

"""Ranks that a host engine takes out of service: the others go on without sending to them or waiting for them.

One polarity everywhere: True is alive. A mask belongs to the memory that ranks share, hence to every dispatcher of that
memory, and ranks are only ever taken out: the libraries' call counters of a rank that missed a call never catch up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eprt.config import ParallelConfig
from eprt.dispatch.buffers import InFlightBuffers
from eprt.errors import InputError, UsageError
from eprt.tokens import TopK

if TYPE_CHECKING:
    from eprt.config import RuntimeConfig
    from eprt.world import World


@dataclass
class RankMask:
    """Who takes part in the calls over one shared memory.

    Attributes:
        alive: [W], by rank.
        in_flight: its calls; a mask changes while none is open.
        in_arguments: kernels get the mask as an argument, so a CUDA graph keeps the one of its capture; False: they
            read it from device memory, and replays follow it.
        captured: a CUDA graph holds a call.
    """

    alive: tuple[bool, ...]
    in_flight: InFlightBuffers
    in_arguments: bool
    captured: bool = False

    def without_lost(self, alive: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns who takes part once only the `alive` are left."""
        return tuple(mine and theirs for mine, theirs in zip(self.alive, alive, strict=True))

    @property
    def left_out(self) -> list[int]:
        return [rank for rank, alive in enumerate(self.alive) if not alive]


def checked_mask(alive: Sequence[object], world: World) -> tuple[bool, ...]:
    """`alive` as a tuple, if it can be this rank's mask.

    Raises:
        InputError: not one bool a rank, or this rank or a part of an attention-TP group is left out.
    """
    mask = tuple(one for one in alive if isinstance(one, bool))
    if len(mask) != world.size or len(alive) != world.size:
        raise InputError(f"alive is {alive!r}: expected {world.size} bools, one a rank, True for ranks that take part")
    if not mask[world.rank]:
        raise InputError(f"alive[{world.rank}] is False on rank {world.rank} itself: a rank left out makes no calls")
    size = world.parallel.attention_tp_size
    for first in range(0, world.size, size):
        if len(set(mask[first : first + size])) > 1:
            raise InputError(
                f"alive[{first}:{first + size}] is {mask[first : first + size]}: an attention-TP group gathers its "
                "tokens from all of its ranks, so it is left out as a whole or not at all"
            )
    return mask


class LostExperts:
    """The physical expert slots on lost ranks, and how tokens do without them.

    Args:
        alive: [W]
        num_experts: E slots, EP rank by EP rank. One whose MoE-TP ranks aren't all there is lost as a whole.
        renormalize: scale a token's other weights to the sum that all of them had.
    """

    def __init__(
        self,
        alive: tuple[bool, ...],
        parallel: ParallelConfig,
        num_experts: int,
        device: torch.device,
        renormalize: bool,
    ) -> None:
        size, each = parallel.moe_tp_size, num_experts // parallel.ep_size
        gone = [not all(alive[first : first + size]) for first in range(0, len(alive), size) for _ in range(each)]
        self._gone = torch.tensor([*gone, False], device=device)
        self._none, self._renormalize = num_experts, renormalize

    def left_out(self, topk: TopK) -> TopK:
        """[T, K] without the entries whose slot is lost: they name no expert. No host sync."""
        ids = torch.where(self._gone[topk.ids.long().clamp(0, self._none)], self._none, topk.ids)
        if not self._renormalize:
            return TopK(ids, topk.weights)
        had, has = (topk.weights.masked_fill(i == self._none, 0).sum(1, keepdim=True) for i in (topk.ids, ids))
        return TopK(ids, topk.weights * torch.where(has == 0, 1.0, had / has))


def require_changeable(
    mask: RankMask | None, wanted: tuple[bool, ...], name: str, runtime: RuntimeConfig, capturing: bool
) -> None:
    """Raises UsageError unless the dispatcher `name` can take `wanted` instead of `mask` now.

    Args:
        mask: of its memory; None while there is none.
        capturing: whether the current stream is being captured.
    """
    back = [] if mask is None else [rank for rank in mask.left_out if wanted[rank]]
    refusals = [
        (
            not runtime.rank_mask,
            "RuntimeConfig.rank_mask is False: set it on every rank, and the plan takes one that can",
        ),
        (mask is None, "every rank takes part in making the shared memory: call World.warmup() before"),
        (runtime.validate == "full", 'validate="full" compares the headers of all ranks: use validate="cheap"'),
        (capturing, "a CUDA graph is being captured: call it before"),
        (
            mask is not None and mask.captured and mask.in_arguments,
            "a CUDA graph has captured a dispatch, and keeps the mask of its capture: call it before, or close the "
            "layers, make them again, and capture afterwards",
        ),
        (
            bool(back),
            f"ranks {back} were left out and can't come back, as their call counters are behind: make a new World",
        ),
    ]
    for failed, reason in refusals:
        if failed:
            raise UsageError(f"{name}: set_alive: {reason}")
    if mask is not None:
        mask.in_flight.require_idle()

"""Attention TP: a group's ranks hold the same tokens. Each sends a slice of them, and all get the whole result."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eprt.dispatch import Dispatcher
from eprt.dispatch.call import KNOB, require_agreed
from eprt.errors import CapacityError
from eprt.rounding import ceil_div
from eprt.tokens import RouterLogits, TopK
from eprt.world import World


class Slices:
    """This rank's part of its attention-TP group's tokens.

    Attributes:
        several: whether there is more than one part.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._size = world.parallel.attention_tp_size
        self.several = self._size > 1

    def own(
        self, x: torch.Tensor, routing: TopK | RouterLogits | None, ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, TopK | RouterLogits | None, torch.Tensor | None]:
        """Returns this rank's part of [T, H] tokens, their routing and their [T] vocabulary ids."""
        part = ceil_div(x.shape[0], self._size)
        start = self._world.attention_tp_rank * part
        rows = slice(start, start + part)
        return x[rows], None if routing is None else routing.narrow(start, part), None if ids is None else ids[rows]

    def own_mark(self, mark: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns, of [T, 1] marks, those of the `rows` tokens that this rank sends."""
        first = self._world.attention_tp_rank * ceil_div(mark.shape[0], self._size)
        return mark[first : first + rows]

    def agreed(self, tokens_per_rank: int | None, num_tokens: int, dispatcher: Dispatcher) -> int | None:
        """Returns R of the slices that are sent, from the caller's own R and tokens.

        Raises:
            InputError: not an R.
            CapacityError: fewer than `num_tokens`; with `strict_capacity` also slices over the capacity.
        """
        if tokens_per_rank is None:
            return None
        agreed, capacity = require_agreed(tokens_per_rank), dispatcher.capacity.max_tokens_per_rank
        if num_tokens > agreed:
            raise CapacityError(
                f"hidden_states holds {num_tokens} tokens, the agreed tokens_per_rank is {agreed}: pass "
                f"tokens_per_rank >= {num_tokens} on every rank, or None to let the ranks agree"
            )
        part = ceil_div(agreed, self._size)
        if part > capacity and dispatcher.runtime.strict_capacity:
            raise CapacityError(
                f"tokens_per_rank is {agreed}, {part} for each of {self._size} attention-TP ranks, over the "
                f"capacity of {capacity}: set {KNOB} >= {part} or split the batch"
            )
        return part

    def whole(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Joins the group's slices: [num_tokens, H]; equal on each of its ranks."""
        part = ceil_div(num_tokens, self._size)
        padded = y if y.shape[0] == part else F.pad(y, (0, 0, 0, part - y.shape[0]))
        return self._world.gather_attention_tp(padded)[:num_tokens]

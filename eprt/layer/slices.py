"""Attention TP: a group's ranks hold the same tokens. Each sends a slice of them, and all get the whole result."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eprt.dispatch import Dispatcher
from eprt.dispatch.call import check_group_rows
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
        """Of [T, H] tokens, their routing and their [T] vocabulary ids."""
        part = ceil_div(x.shape[0], self._size)
        start = self._world.attention_tp_rank * part
        rows = slice(start, start + part)
        return x[rows], None if routing is None else routing.narrow(start, part), None if ids is None else ids[rows]

    def own_mark(self, mark: torch.Tensor, rows: int) -> torch.Tensor:
        """Of [T, 1] marks: those of the `rows` tokens that this rank sends."""
        first = self._world.attention_tp_rank * ceil_div(mark.shape[0], self._size)
        return mark[first : first + rows]

    def agreed(self, tokens_per_rank: int | None, num_tokens: int, dispatcher: Dispatcher) -> int | None:
        """R of what is sent, from the caller's own. Raises as `check_group_rows`."""
        if tokens_per_rank is None:
            return None
        strict = dispatcher.runtime.strict_capacity
        return check_group_rows(tokens_per_rank, num_tokens, self._size, dispatcher.capacity, strict)

    def whole(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The group's slices back together, [num_tokens, H]; equal on each of its ranks."""
        part = ceil_div(num_tokens, self._size)
        padded = y if y.shape[0] == part else F.pad(y, (0, 0, 0, part - y.shape[0]))
        return self._world.gather_attention_tp(padded)[:num_tokens]

"""A caller's tokens and chosen experts become what this rank sends: its slice, and ids of slots.

Under attention TP a group's ranks hold the same tokens. Each sends a slice of them, and all get the whole result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eprt.config import MoEConfig
from eprt.dispatch import Dispatcher
from eprt.dispatch.call import KNOB, require_agreed
from eprt.errors import CapacityError, InputError, UsageError
from eprt.placement import ExpertLoad, ExpertPlacement, SlotTable
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


class ChosenSlots:
    """Padding names no expert, the load is counted, ids of experts become ids of slots.

    Args:
        one_replica: see `SlotTable`.
        count_load: count how often each expert is chosen.
    """

    def __init__(
        self,
        config: MoEConfig,
        world: World,
        slices: Slices,
        placement: ExpertPlacement,
        *,
        one_replica: bool,
        count_load: bool,
    ) -> None:
        self._config, self._world, self._slices = config, world, slices
        self._table: SlotTable | None = None
        if not placement.is_identity:
            self._table = SlotTable(placement, world.device, one_replica=one_replica, rank=world.rank)
        self._load = ExpertLoad(config.num_experts, world.device) if count_load else None
        self.translates = self._table is not None
        self.need_ids = self.translates or count_load  # so no kernel may choose experts unseen
        # On the device: a number of Python's would be a launch more in each call.
        self._nobody = torch.tensor(config.num_experts, dtype=torch.int32, device=world.device)

    def of(self, chosen: TopK, num_tokens: int, check_values: bool) -> TopK:
        """Returns `chosen` as a dispatcher takes it.

        Args:
            num_tokens: of the attention-TP group together.
            check_values: read the ids, to find those outside [0, E]; not while a CUDA graph is captured.

        Raises:
            InputError: a routing that can't be this layer's, or padding of another batch.
        """
        padding = self._world.padding
        if padding is not None and num_tokens:
            chosen = self._without_padding(chosen, padding, num_tokens)
        return self._placed(chosen, check_values) if self.need_ids else chosen

    def _without_padding(self, chosen: TopK, padding: torch.Tensor, num_tokens: int) -> TopK:
        if padding.shape[0] != num_tokens:
            raise InputError(
                f"a layer inside a batch of {padding.shape[0]} padded rows got {num_tokens}: which of them hold tokens?"
                " Call it with all rows, or with none"
            )
        if self._slices.several:
            padding = self._slices.own_mark(padding, chosen.ids.shape[0])
        return TopK(torch.where(padding, self._nobody, chosen.ids), chosen.weights)

    def _placed(self, chosen: TopK, check_values: bool) -> TopK:
        chosen.check(self._config.top_k)
        if chosen.ids.device != self._world.device:
            raise InputError(
                f"topk_ids is on {chosen.ids.device}: the world runs on {self._world.device}; move it there"
            )
        on_cpu = self._world.device.type == "cpu"
        if on_cpu or (check_values and not torch.cuda.is_current_stream_capturing()):
            chosen.check_ids(self._config.num_experts)
        if self._load is not None:
            self._load.add(chosen.ids)
        if self._table is None:
            return chosen
        self._table.follow(self._world.alive)
        return TopK(self._table.slots_of(chosen.ids), chosen.weights)

    def adopt(self, placement: ExpertPlacement) -> None:
        """Translates to another placement from now on."""
        if self._table is not None:
            self._table.update(placement)

    def warmup(self) -> None:
        """Compiles the kernels that count and translate."""
        ids = self._nobody.expand(1, self._config.top_k)
        if self._load is not None:
            self._load.add(ids)
        if self._table is not None:
            self._table.slots_of(ids)

    @property
    def load(self) -> ExpertLoad:
        """Raises UsageError where nothing is counted."""
        if self._load is None:
            raise UsageError("this layer doesn't count its experts' load: build it with RuntimeConfig(count_load=True)")
        return self._load

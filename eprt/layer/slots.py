"""From the experts that were chosen to the slots that tokens are sent to: here and nowhere else."""

from __future__ import annotations

import torch

from eprt.config import MoEConfig
from eprt.errors import InputError, UsageError
from eprt.layer.slices import Slices
from eprt.load import ExpertLoad
from eprt.placement import ExpertPlacement, SlotTable
from eprt.tokens import RouterLogits, TopK
from eprt.world import World


class ChosenSlots:
    """Padding names no expert, the load is counted, ids of experts become ids of slots.

    Args:
        placement: which experts lie where.
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
        self.need_ids = self._table is not None or count_load  # so no kernel may choose experts unseen
        # On the device: a number of Python's would be a launch more in each call.
        self._nobody = torch.tensor(config.num_experts, dtype=torch.int32, device=world.device)

    @property
    def translates(self) -> bool:
        """Whether ids of experts become ids of slots: not where the experts lie in their order."""
        return self._table is not None

    def of(self, chosen: TopK | RouterLogits, num_tokens: int, check_values: bool) -> TopK | RouterLogits:
        """`chosen` as a dispatcher takes it. Logits stay as they are: a kernel that chooses, which there is in a world
        of one, computes padding for nothing.

        Args:
            num_tokens: of the attention-TP group together.
            check_values: read the ids, to find those outside [0, E].

        Raises:
            InputError: a routing that can't be this layer's, or padding of another batch.
        """
        if not isinstance(chosen, TopK):
            return chosen
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
        chosen.check(self._config.num_experts, self._config.top_k)
        if chosen.ids.device.type != self._world.device.type:
            raise InputError(
                f"topk_ids is on {chosen.ids.device}: the world runs on {self._world.device}; move it there"
            )
        if check_values or self._world.device.type == "cpu":
            chosen.check_ids(self._config.num_experts)
        if self._load is not None:
            self._load.add(chosen.ids)
        if self._table is None:
            return chosen
        self._table.follow(self._world.alive)
        return TopK(self._table.slots_of(chosen.ids), chosen.weights)

    def adopt(self, placement: ExpertPlacement) -> None:
        """Translate to another placement from now on."""
        if self._table is not None:
            self._table.update(placement)

    def warmup(self) -> None:
        """Compile what counts and what translates."""
        if self.need_ids:
            nobody, shape = self._config.num_experts, (1, self._config.top_k)
            ids = torch.full(shape, nobody, dtype=torch.int32, device=self._world.device)
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

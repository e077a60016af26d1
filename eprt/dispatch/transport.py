"""What a dispatcher fills in, and what it knows of its layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from eprt.config import MoEConfig, RuntimeConfig, TokenFormat
from eprt.dispatch.call import settings_of
from eprt.dispatch.capacity import Capacity
from eprt.dispatch.handle import Handle
from eprt.dispatch.rank_mask import RankMask
from eprt.dispatch.slots import Slots
from eprt.dispatch.spec import DispatcherSpec
from eprt.errors import ConfigError
from eprt.placement import ExpertPlacement
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, TopK
from eprt.world.agree import fingerprint_of

if TYPE_CHECKING:
    from eprt.world import World


class Transport(ABC):
    """Moves one layer's payload over a World, once `Dispatcher` has checked the call and agreed on R with the peers.

    Args:
        spec: this dispatcher's row of the table.
        world: who takes part; owns all shared memory.
        config: the layer's maths, its experts counted in slots (`ExpertPlacement.in_slots`).
        runtime: capacity, payload, validation.
        token_format: one of `spec.formats`.
        layer: number that the ranks compare, so that a wrong layer order is caught.

    Attributes:
        payload_scale: `nvfp4` tokens' second-level scale, float32 [1] on the world's device, equal on all ranks;
            1 until `make_dispatcher` sets it. None for other tokens.
        settings, fingerprint: what must be equal on all ranks, and a hash of it.

    Making one allocates nothing shared: `make_dispatcher` compares the ranks' settings first.

    Raises:
        ConfigError: an option of `runtime` that this dispatcher doesn't have.
    """

    spec: ClassVar[DispatcherSpec]

    def __init__(
        self, world: World, config: MoEConfig, runtime: RuntimeConfig, token_format: TokenFormat, layer: int
    ) -> None:
        if lacks := self.spec.lacks(runtime):
            raise ConfigError(f"{self.spec.name}: {lacks}")
        self.world = world
        self.config = config
        self.runtime = runtime
        self.token_format: TokenFormat = token_format
        self.layer = layer
        self.placement = ExpertPlacement(config.num_experts, world.parallel)
        if not self.placement.is_identity:
            raise ConfigError(
                f"{config.num_experts} experts don't divide over {world.parallel.ep_size} expert-parallel ranks: a "
                "dispatcher counts slots, so give it ExpertPlacement.in_slots(config) and ids of slots (a layer does)"
            )
        self.shard = self.placement.shard(world.rank)
        self.capacity = Capacity(runtime.max_tokens_per_rank, self.bytes_per_token())
        self.payload_scale = (
            torch.ones(1, dtype=torch.float32, device=world.device) if runtime.payload == "nvfp4" else None
        )
        self.settings = settings_of(self.spec.name, world, config, runtime)
        self.fingerprint = fingerprint_of(self.settings)

    @abstractmethod
    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens | ExpertMajorTokens:
        """Move payload; keep what combine needs in `handle.state`. All checks are done, R is agreed."""

    @abstractmethod
    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Bring the sums back: [T, H] in `handle.dtype`."""

    def bytes_per_token(self) -> int:
        """Bytes of kept buffers a rank pays per unit of max_tokens_per_rank. 0: nothing is kept."""
        return 0

    def max_rows(self) -> int:
        """Most rows an executor can be given: FlatTokens N, or M of ExpertMajorTokens."""
        return self.world.size * self.runtime.max_tokens_per_rank

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """Where the executor may write its output so that combine needs no copy, or None."""
        return None

    def _slots(self) -> Slots | None:
        """The parts of its shared memory that its calls take, also where another dispatcher of equal geometry made
        that memory; None if there is none, or none yet."""

    def _mask(self) -> RankMask | None:
        """The mask of the memory that this dispatcher shares; None while there is none."""

    def _leave_out(self, alive: tuple[bool, ...]) -> None:
        """Make `alive` the mask. The memory is there, no call is open, this rank's GPU is idle."""

    def _wait(self, handle: Handle) -> None:
        """Receive what a deferred dispatch only asked for. Dispatchers that can't defer have received it already."""

    def _release(self, handle: Handle) -> None:
        """A handle closes without having been combined: give back what it held."""

    def _close(self) -> None:
        """Give back what the dispatcher holds."""

    # ---- what they share ------------------------------------------------------------------------------------

    def _capturing(self) -> bool:
        return self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _settle(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _encode(self, hidden_states: torch.Tensor) -> Payload:
        """The number format that travels: `runtime.payload`, or the input's own."""
        if self.runtime.payload is None:
            return Payload.plain(hidden_states)
        from eprt.quant import encode_payload

        return encode_payload(hidden_states, self.runtime.payload, self.payload_scale)

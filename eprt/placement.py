"""Which rank holds which expert. Contiguous: EP slot s holds experts [s*L, (s+1)*L)."""

from __future__ import annotations

from dataclasses import dataclass

from eprt.config import ParallelConfig
from eprt.errors import ConfigError


@dataclass(frozen=True)
class ExpertShard:
    """The part of every expert matrix that one rank holds.

    Experts `[first_expert, first_expert + num_local_experts)`; of each, slice `moe_tp_rank` of `moe_tp_size` along
    the intermediate dimension. The down projection's bias is added by `moe_tp_rank` 0 alone, so that the sum over
    ranks holds it once.
    """

    num_experts: int
    first_expert: int
    num_local_experts: int
    moe_tp_rank: int = 0
    moe_tp_size: int = 1

    def __str__(self) -> str:
        whole = f"experts {self.first_expert} to {self.end_expert - 1} of {self.num_experts}"
        return whole if self.moe_tp_size == 1 else f"slice {self.moe_tp_rank} of {self.moe_tp_size} of {whole}"

    @property
    def end_expert(self) -> int:
        return self.first_expert + self.num_local_experts

    def slice_intermediate(self, intermediate_size: int) -> slice:
        """This rank's slice of the intermediate dimension. Raises ConfigError if it doesn't divide."""
        if intermediate_size % self.moe_tp_size:
            raise ConfigError(
                f"intermediate_size {intermediate_size} doesn't divide by moe_tp_size {self.moe_tp_size}; "
                "choose a moe_tp_size that divides it"
            )
        width = intermediate_size // self.moe_tp_size
        return slice(self.moe_tp_rank * width, (self.moe_tp_rank + 1) * width)


@dataclass(frozen=True)
class ExpertPlacement:
    """Contiguous placement of `num_experts` experts over a world. Raises ConfigError if they don't divide."""

    num_experts: int
    parallel: ParallelConfig

    def __post_init__(self) -> None:
        ep_size = self.parallel.ep_size
        if self.num_experts % ep_size:
            divisors = [n for n in range(1, self.parallel.world_size + 1) if self.num_experts % n == 0]
            raise ConfigError(
                f"{self.num_experts} experts can't be split evenly over {ep_size} expert-parallel ranks; "
                f"use an EP size that divides {self.num_experts} (here: {divisors}), or raise moe_tp_size"
            )

    @property
    def num_local_experts(self) -> int:
        """L: experts a rank holds."""
        return self.num_experts // self.parallel.ep_size

    def shard(self, rank: int) -> ExpertShard:
        """What `rank` (in the World's numbering) holds."""
        ep_rank, moe_tp_rank = divmod(rank, self.parallel.moe_tp_size)
        return ExpertShard(
            num_experts=self.num_experts,
            first_expert=ep_rank * self.num_local_experts,
            num_local_experts=self.num_local_experts,
            moe_tp_rank=moe_tp_rank,
            moe_tp_size=self.parallel.moe_tp_size,
        )

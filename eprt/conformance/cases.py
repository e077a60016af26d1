"""The conformance cases as data, and the inputs that each rank makes from them.

A case is a row of counts (tokens per rank, for one or more calls in a row) crossed with a way of routing. Inputs are
made to betray a mis-route: a token's numbers spell its rank, index and call in digits that bf16 holds exactly, and
top-k entries without an expert carry a huge weight that must not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eprt.config import Activation, MoEConfig
from eprt.errors import ConfigError
from eprt.tokens import TopK

SEED = 20240501
# Numbers stay below 16 and a token's weights sum to at most 16 eighths, so their product has at most 8 bits and is
# exact in bf16, however the sum is split over ranks.
_DIGITS = 16
_EIGHTHS = 16
_INVALID_WEIGHT = 2.0**20


@dataclass(frozen=True)
class Counts:
    """Tokens per rank.

    Attributes:
        calls: one tuple for each call in a row; its last number repeats for the ranks that follow.
        agreed: R as the caller passes it, or None to let the ranks agree.
    """

    name: str
    calls: tuple[tuple[int, ...], ...]
    agreed: int | None = None

    def of(self, call: int, size: int) -> list[int]:
        """Returns each rank's T; calls past the last start over."""
        row = self.calls[call % len(self.calls)]
        return [row[min(rank, len(row) - 1)] for rank in range(size)]


COUNTS: tuple[Counts, ...] = (
    Counts("equal", ((5,),), agreed=5),
    Counts("uneven", ((3, 7, 1, 12),)),
    Counts("one_idle", ((6, 0, 4, 9),)),
    Counts("all_but_one_idle", ((11, 0),)),
    Counts("all_idle", ((0,),)),
    Counts("one_over_all", ((1, 17, 1),)),
    Counts("agreed_not_reached", ((3, 5, 0, 2),), agreed=23),
    Counts("changing", ((4, 0, 9, 2), (0, 13, 1, 5), (8, 8, 0, 0))),
)


# The ways in which tokens choose experts; `make_topk` makes the ids.
ROUTINGS = ("uniform", "hot_expert", "one_rank", "all_invalid", "partly_invalid")


@dataclass(frozen=True)
class Case:
    """One row of the table: counts x routing."""

    counts: Counts
    routing: str

    @property
    def name(self) -> str:
        return f"{self.counts.name}-{self.routing}"

    @property
    def num_calls(self) -> int:
        return len(self.counts.calls)


CASES: tuple[Case, ...] = tuple(Case(counts, routing) for counts in COUNTS for routing in ROUTINGS)


# More tokens than `checks.CAPACITY`, which a layer cuts into rounds and a dispatcher alone refuses; R agreed and given.
CUT_CASES: tuple[Case, ...] = tuple(
    Case(counts, routing)
    for counts in (
        Counts("over_capacity", ((150, 3, 0, 70),)),
        Counts("over_capacity_agreed", ((129, 0),), agreed=200),
        Counts("sometimes_over_capacity", ((2, 0, 131, 5), (4, 9, 1, 0), (0, 0, 0, 140))),
    )
    for routing in ("uniform", "partly_invalid")
)

BY_NAME: dict[str, Case] = {case.name: case for case in (*CASES, *CUT_CASES)}


# The layers that the cases run through. E divides by 1, 2, 4 and 8 ranks; I by 2 MoE-TP ranks, in whole MX blocks.
CONFIGS: dict[str, MoEConfig] = {
    # Odd sizes; float32 end to end, so the tolerance is tight.
    "silu_f32": MoEConfig(num_experts=8, top_k=3, hidden_size=72, intermediate_size=40, weight_format="f32"),
    "silu_bf16": MoEConfig(num_experts=16, top_k=4, hidden_size=128, intermediate_size=64),
    # gpt-oss: clamped SwiGLU with its own alpha and beta, biases, MXFP4.
    "gpt_oss": MoEConfig(
        num_experts=8,
        top_k=4,
        hidden_size=128,
        intermediate_size=64,
        activation=Activation(alpha=1.702, beta=1.0, limit=7.0),
        bias=True,
        weight_format="mxfp4",
    ),
    # Nemotron-H: not gated.
    "relu2_bf16": MoEConfig(
        num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, activation=Activation(kind="relu2"), bias=True
    ),
}

# Relative norm error against the float32 oracle: rounding of float32 sums, and of bf16 tokens and outputs (2^-8).
TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Batch:
    """One rank's input of one call: hidden [T, H] bf16 or float32, and its routing."""

    hidden: torch.Tensor
    topk: TopK

    def to(self, device: torch.device) -> Batch:
        return Batch(self.hidden.to(device), TopK(self.topk.ids.to(device), self.topk.weights.to(device)))


def make_batch(case: Case, call: int, rank: int, size: int, config: MoEConfig, dtype: torch.dtype) -> Batch:
    """Makes rank `rank`'s input, the same wherever it is made. CPU tensors."""
    num_tokens = case.counts.of(call, size)[rank]
    generator = torch.Generator().manual_seed(SEED + 1009 * call + rank)
    return Batch(
        coded_hidden(num_tokens, rank, call, config.hidden_size).to(dtype),
        make_topk(case.routing, num_tokens, size, config, generator),
    )


def make_batches(case: Case, call: int, size: int, config: MoEConfig, dtype: torch.dtype) -> list[Batch]:
    """Makes every rank's input, in rank order."""
    return [make_batch(case, call, rank, size, config, dtype) for rank in range(size)]


def coded_hidden(num_tokens: int, rank: int, call: int, hidden_size: int) -> torch.Tensor:
    """Returns [T, H] whole numbers of magnitude <= 15: columns 0 to 3 are rank, index (low, high digit) and call."""
    index = torch.arange(num_tokens)[:, None]
    column = torch.arange(hidden_size)[None]
    hidden = (5 * rank + 3 * index + 7 * column + 11 * call + index * column) % 31 - 15
    digits = torch.cat(
        [torch.full_like(index, rank), index % _DIGITS, index // _DIGITS, torch.full_like(index, call)], 1
    )
    hidden[:, :4] = digits % _DIGITS
    return hidden.float()


def chosen_ids(routing: str, num_tokens: int, size: int, config: MoEConfig, generator: torch.Generator) -> torch.Tensor:
    """Returns [T, K] int32 ids, distinct in a row: any, or with the middle expert in all, or the last rank's first."""
    E = config.num_experts
    order = torch.rand(num_tokens, E, generator=generator)
    if routing == "hot_expert":
        order[:, E // 2] = 2.0
    elif routing == "one_rank":
        order[:, E - E // size :] += 1.0
    return order.argsort(dim=1, descending=True)[:, : config.top_k].to(torch.int32)


def make_topk(routing: str, num_tokens: int, size: int, config: MoEConfig, generator: torch.Generator) -> TopK:
    """Makes the routing of T tokens: distinct ids, weights 1/8, 1/4 or 1/2 (exact sums), a huge one for no expert.

    Raises ConfigError above top-k 16, where the sums would not be exact.
    """
    E, K = config.num_experts, config.top_k
    if K > _EIGHTHS:
        raise ConfigError(f"top_k {K}: the conformance data is exact up to {_EIGHTHS}; check the layer with fewer")
    if routing not in ROUTINGS:
        raise ConfigError(f"routing case {routing!r} doesn't exist")
    ids = chosen_ids(routing, num_tokens, size, config, generator)
    none = torch.full((num_tokens, K), routing == "all_invalid")
    if routing == "partly_invalid":
        none = torch.rand(num_tokens, K, generator=generator) < 0.5
    elif routing == "one_rank":
        none = ids < E - E // size
    doublings = min(2, (_EIGHTHS // K).bit_length() - 1)
    weights = 2.0 ** torch.randint(doublings + 1, (num_tokens, K), generator=generator) / 8
    return TopK(torch.where(none, E, ids).to(torch.int32), torch.where(none, _INVALID_WEIGHT, weights))

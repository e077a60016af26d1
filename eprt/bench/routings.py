"""Draws a bench's tokens and the experts that they choose: evenly, by Zipf, as counted, or as recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eprt.balance.counts import read_counts, zipf
from eprt.balance.planner import plan_placement
from eprt.config import MoEConfig, ParallelConfig
from eprt.errors import ConfigError
from eprt.json_files import layer_number
from eprt.placement import ExpertPlacement, SlotTable
from eprt.plan.skew import Demand
from eprt.rounding import round_up
from eprt.tokens import FlatTokens, Payload

BLOCK = 64  # tokens that meet the experts in one random order
FORMS = "uniform, zipf:EXPONENT, zipf:EXPONENT:SEED, counts.json or ids.safetensors"


@dataclass(frozen=True)
class RoutedLayer:
    """The routing of one layer: how often each expert is chosen, or the choices themselves.

    Attributes:
        layer: its number; 0 where there is only one.
        counts: [E].
        ids: [N, K] as recorded, or None.
    """

    layer: int
    counts: tuple[int, ...]
    ids: torch.Tensor | None = None

    def planned(self, parallel: ParallelConfig, replicas: int) -> ExpertPlacement:
        """Returns the placement planned from the counts, with at least `replicas` slots beyond what experts need."""
        slots = round_up(len(self.counts) + replicas, parallel.world_size)
        return plan_placement(self.counts, parallel, slots)

    def draw(self, tokens: int, top_k: int, seed: int) -> torch.Tensor:
        """Returns [tokens, K] int32 ids on the CPU, distinct in a row.

        Recorded ones come in their order from the `seed`-th batch on, again from the start where they end. Else each
        expert is sampled as often as counted, but at most once per token.
        """
        if self.ids is not None:
            return self.ids[torch.arange(seed * tokens, (seed + 1) * tokens) % len(self.ids)]
        return drawn(inclusion(self.counts, top_k), tokens, top_k, torch.Generator().manual_seed(seed))


def read_routing(text: str, num_experts: int, top_k: int) -> list[RoutedLayer]:
    """Returns the layers that a `--routing` stands for.

    Args:
        text: `uniform`; `zipf:1.1` (expert e by 1 / (e + 1) ** 1.1, so that neighbours are hot: the worst for experts
            in order); `zipf:1.1:7` (which experts are hot is drawn from seed 7); a file of
            `eprt.balance.write_counts`; or safetensors of [N, K] ids, one tensor a layer, named by its number.

    Raises:
        ConfigError: no such form, a file that can't be read, or of another number of experts or choices.
    """
    kind, _, rest = text.partition(":")
    if kind == "uniform" and not rest:
        return [RoutedLayer(0, (1,) * num_experts)]
    if kind == "zipf":
        return [_of_sizes(text, RoutedLayer(0, _zipf(text, rest, num_experts)), num_experts, top_k)]
    path = Path(text)
    if path.suffix == ".safetensors":
        found = _recorded(path, num_experts)
    elif path.suffix == ".json":
        found = [RoutedLayer(layer, tuple(counts)) for layer, counts in read_counts(path).items()]
    else:
        raise ConfigError(f"--routing {text!r}: expected {FORMS}")
    return [_of_sizes(path, each, num_experts, top_k) for each in found]


def _of_sizes(where: str | Path, found: RoutedLayer, num_experts: int, top_k: int) -> RoutedLayer:
    if len(found.counts) != num_experts or (found.ids is not None and found.ids.shape[1] != top_k):
        chosen = "" if found.ids is None else f", top-{found.ids.shape[1]}"
        raise ConfigError(
            f"{where}: layer {found.layer} is of {len(found.counts)} experts{chosen}; asked for are {num_experts}, "
            f"top-{top_k}"
        )
    if (named := sum(count > 0 for count in found.counts)) < top_k:
        raise ConfigError(f"{where}: layer {found.layer} names fewer experts than a token chooses ({named} of {top_k})")
    return found


def sample_ids(num_rows: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """Returns [num_rows, top_k] int32: distinct experts per row, sampled uniformly, the same for the same sizes."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    return scores.topk(top_k, dim=1).indices.to(device, torch.int32)


def sampled_tokens(
    config: MoEConfig, count: int, device: torch.device, routed: RoutedLayer | None = None
) -> FlatTokens:
    """Returns `count` random tokens of all ranks, the same experts for the same count, by default chosen uniformly."""
    hidden = torch.randn(count, config.hidden_size, device=device).to(torch.bfloat16)
    K, E = config.top_k, config.num_experts
    ids = sample_ids(count, K, E, device) if routed is None else routed.draw(count, K, count).to(device, torch.int32)
    weights = torch.full(ids.shape, 1.0 / K, device=device)
    return FlatTokens(Payload.plain(hidden), ids, weights, E, every_row_read=True)


def demand_of(by_rank: Sequence[torch.Tensor], placement: ExpertPlacement, one_replica: bool) -> Demand:
    """Returns the demand of each rank's chosen experts [T, K] on a placement, every replica taken as the rank would."""
    cpu = torch.device("cpu")
    ids = [
        ids if placement.is_identity else SlotTable(placement, cpu, one_replica=one_replica, rank=rank).slots_of(ids)
        for rank, ids in enumerate(by_rank)
    ]
    return Demand.of_slots(torch.cat(ids), placement)


def inclusion(counts: tuple[int, ...], top_k: int) -> torch.Tensor:
    """Returns [E] float64 chances that a token chooses each expert, proportional to the counts, at most 1; sum K."""
    shares = torch.tensor(counts, dtype=torch.float64)
    sure = torch.zeros(len(counts), dtype=torch.bool)
    while True:  # at most K times: each round makes an expert sure
        left = top_k - int(sure.sum())
        scaled = torch.where(sure, 1.0, left * shares / shares[~sure].sum())
        over = scaled > 1
        if not over.any():
            return scaled
        sure |= over


def drawn(chances: torch.Tensor, tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Samples [tokens, K] int32, each expert with its chance, by systematic sampling.

    K points one apart, on the chances laid end to end in a random order, meet K different experts.
    """
    E, blocks = len(chances), -(-tokens // BLOCK)
    order = torch.rand(blocks, E, generator=generator).argsort(1)
    ends = chances[order].cumsum(1)
    ends = ends * (top_k / ends[:, -1:])
    points = torch.rand(blocks, BLOCK, 1, generator=generator, dtype=torch.float64) + torch.arange(top_k)
    places = torch.searchsorted(ends, points.flatten(1), right=True).clamp_(max=E - 1)
    return order.gather(1, places).view(-1, top_k)[:tokens].to(torch.int32)


def _zipf(text: str, rest: str, num_experts: int) -> tuple[int, ...]:
    exponent, _, seed = rest.partition(":")
    try:
        counts = zipf(num_experts, float(exponent))
        generator = torch.Generator().manual_seed(int(seed)) if seed else None
    except ValueError as error:
        raise ConfigError(f"--routing {text!r}: {error}; expected {FORMS}") from error
    if generator is None:
        return counts
    order = torch.randperm(num_experts, generator=generator)
    return tuple(torch.tensor(counts)[order].tolist())


def _recorded(path: Path, num_experts: int) -> list[RoutedLayer]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no file of recorded ids: {error}") from error
    found: list[RoutedLayer] = []
    for name, ids in tensors.items():
        whole = torch.can_cast(ids.dtype, torch.long)
        if (number := layer_number(name)) is None or ids.dim() != 2 or not whole or not ids.numel():
            raise ConfigError(
                f"{path}: tensor {name!r}, {ids.dtype} {list(ids.shape)}: expected [N, K] ids named by a layer's number"
            )
        ids = ids.long()  # torch finds no extremes of uint16
        if int(ids.min()) < 0 or int(ids.max()) >= num_experts:
            raise ConfigError(f"{path}: layer {name} names experts {ids.min()} to {ids.max()} of {num_experts}")
        counts = ids.flatten().bincount(minlength=num_experts)
        found.append(RoutedLayer(number, tuple(counts.tolist()), ids.to(torch.int32)))
    if not found:
        raise ConfigError(f"{path}: no layer in it")
    return sorted(found, key=lambda each: each.layer)

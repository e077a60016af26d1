"""Reports how evenly ranks are loaded, layer by layer: numbers, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eprt.balance.counts import gather_load
from eprt.balance.planner import imbalance, rank_loads
from eprt.errors import ConfigError
from eprt.files import new_figure, save_figure
from eprt.json_files import shown
from eprt.kinds import require_kinds
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.world import World


@dataclass(frozen=True)
class LayerBalance:
    """The load of one layer.

    Attributes:
        loads: [ranks] rows each expert-parallel rank gets, replicas sharing evenly.
        imbalance, hot_rank: max / mean of them, and the rank that has most.
        hot_expert, hot_share: the most chosen expert, and its share of all choices.
    """

    layer: int
    loads: tuple[float, ...]
    imbalance: float
    hot_rank: int
    hot_expert: int
    hot_share: float

    @classmethod
    def of(cls, layer: int, counts: list[float], placement: ExpertPlacement) -> LayerBalance:
        """Raises ConfigError for counts of another number of experts, or that are none."""
        try:
            loads, most = rank_loads(counts, placement), max(counts)
        except ConfigError as error:
            raise ConfigError(f"layer {layer}: {error}") from error
        share = most / (sum(counts) or 1)
        return cls(layer, loads, imbalance(loads), loads.index(max(loads)), counts.index(most), share)


@dataclass(frozen=True)
class Balance:
    """The load of all layers. `str()` is the table."""

    layers: tuple[LayerBalance, ...]

    @property
    def mean(self) -> float:
        """Mean over the layers of max / mean."""
        return sum(row.imbalance for row in self.layers) / len(self.layers)

    @property
    def worst(self) -> LayerBalance:
        return max(self.layers, key=lambda row: row.imbalance)

    def __str__(self) -> str:
        lines = ["layer  max/mean  hottest rank  most chosen expert  its share"]
        lines += [
            f"{row.layer:>5}  {row.imbalance:>8.3f}  {row.hot_rank:>12}  {row.hot_expert:>18}  {row.hot_share:>9.1%}"
            for row in self.layers
        ]
        lines.append(f" mean  {self.mean:>8.3f}")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draws rows of each rank over the mean, one line per layer. Raises ConfigError if it can't be written."""
        figure = new_figure(7.2, 4.2)
        axes = figure.add_subplot()
        image = [[load * len(row.loads) / max(sum(row.loads), 1e-9) for load in row.loads] for row in self.layers]
        drawn = axes.imshow(image, aspect="auto", cmap="coolwarm", vmin=0, vmax=max(2.0, *map(max, image)))
        figure.colorbar(drawn, label="rows over the mean of the ranks")
        axes.set_yticks(range(len(self.layers)), [str(row.layer) for row in self.layers], fontsize=6)
        axes.set_xlabel("expert-parallel rank")
        axes.set_ylabel("layer")
        axes.set_title(f"max/mean {self.mean:.3f} on average, {self.worst.imbalance:.3f} at worst", fontsize=10)
        save_figure(figure, Path(path))


def report(
    counts: torch.Tensor | Sequence[Sequence[float]],
    placements: Sequence[ExpertPlacement],
    layers: Sequence[int] | None = None,
) -> Balance:
    """Reports how these counts load the ranks under these placements.

    Args:
        counts: [layers, E] over all ranks, as `gather_load` gives them.
        placements: one for each layer.
        layers: their numbers; None: 0, 1, 2, ...

    Raises:
        ConfigError: other numbers of layers or experts, or counts that are none.
    """
    require_kinds(report, {"placements": placements, "layers": layers})
    try:
        rows = [[float(count) for count in row] for row in counts]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"counts are {shown(counts)}: expected numbers [layers, E]") from error
    numbers = list(range(len(rows))) if layers is None else list(layers)
    if not rows or not len(rows) == len(placements) == len(numbers):
        raise ConfigError(f"counts of {len(rows)} layers, {len(placements)} placements, {len(numbers)} numbers")
    return Balance(tuple(LayerBalance.of(*row) for row in zip(numbers, rows, placements, strict=True)))


def report_layers(world: World, layers: Sequence[ExpertParallelMoE]) -> Balance:
    """Reports what these layers have counted on all ranks. Collective; raises as `gather_load`."""
    counts = gather_load(world, layers)
    return report(counts, [layer.placement for layer in layers], [layer.dispatcher.layer for layer in layers])

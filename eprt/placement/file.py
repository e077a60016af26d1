"""Placements of a model's layers in a JSON file: what `eprt plan-experts` writes, and what loads a model reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eprt.config import ParallelConfig
from eprt.errors import ConfigError
from eprt.files import write_whole
from eprt.json_files import layer_number, parse, read_bounded, shown
from eprt.kinds import require_kinds
from eprt.placement import ExpertPlacement, listed

FORMAT, VERSION = "eprt expert placement", 1
MAX_BYTES = 16 << 20
ALL = "all"  # for the layers that have no entry of their own


@dataclass(frozen=True)
class PlacementFile:
    """Says which experts lie where, layer by layer.

    Attributes:
        num_experts: E of every layer in it.
        ep_size: expert-parallel ranks.
        layers: layer number -> [S] expert in each slot (see `ExpertPlacement.slots`); None stands for all the others.
    """

    num_experts: int
    ep_size: int
    layers: Mapping[int | None, tuple[int, ...]]

    @classmethod
    def of_placements(cls, placements: Mapping[int | None, ExpertPlacement]) -> PlacementFile:
        """Makes a file of placements by layer number. Raises ConfigError for different sizes, or no placement."""
        require_kinds(PlacementFile.of_placements, locals())
        sizes = {(each.num_experts, each.parallel.ep_size) for each in placements.values()}
        if len(sizes) != 1:
            raise ConfigError(f"placements of (experts, ranks) {sorted(sizes)}: a file holds those of one size")
        return cls(*sizes.pop(), {layer: tuple(each.slots) for layer, each in placements.items()})

    @classmethod
    def read(cls, path: str | Path) -> PlacementFile:
        """Raises ConfigError naming the file and what is wrong with it."""
        require_kinds(PlacementFile.read, locals())
        value = parse(read_bounded(Path(path), MAX_BYTES, ConfigError), f"{path} is no placement file", ConfigError)
        try:
            return _parsed(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def fingerprint(self) -> int:
        """Returns 63 bits that differ where placements do, for ranks to compare."""
        layers = sorted(self.layers.items(), key=lambda item: -1 if item[0] is None else item[0])
        text = repr((self.num_experts, self.ep_size, layers))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    @property
    def content(self) -> str:
        """Returns the text that `write` puts into the file. Raises ConfigError for what `read` would refuse."""
        layers = {ALL if layer is None else str(layer): list(slots) for layer, slots in self.layers.items()}
        value = {
            "format": FORMAT,
            "version": VERSION,
            "num_experts": self.num_experts,
            "ep_size": self.ep_size,
            "layers": layers,
        }
        _parsed(value)
        return json.dumps(value) + "\n"

    def write(self, path: str | Path) -> None:
        """Raises ConfigError for what `read` would refuse, and where it can't be written."""
        require_kinds(PlacementFile.write, locals())
        try:
            write_whole(Path(path), self.content)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error

    def placement(self, layer: int, num_experts: int, parallel: ParallelConfig) -> ExpertPlacement:
        """Returns one layer's placement. Raises ConfigError: made for other sizes, or the layer isn't in it."""
        require_kinds(PlacementFile.placement, locals())
        for what, made, here in (
            ("experts", self.num_experts, num_experts),
            ("expert-parallel ranks", self.ep_size, parallel.ep_size),
        ):
            if made != here:
                raise ConfigError(f"the placement file is for {made} {what}, layer {layer} has {here}: plan for it")
        slots = self.layers.get(layer, self.layers.get(None))
        if slots is None:
            known = listed([number for number in self.layers if number is not None])
            raise ConfigError(f"the placement file has no layer {layer}: it has {known}; add it, or {ALL!r}")
        return ExpertPlacement(num_experts, parallel, slots)


def _parsed(value: Any) -> PlacementFile:
    """Raises ConfigError."""
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
        raise ConfigError(f"no placement file: expected an object with format {FORMAT!r}, version {VERSION}")
    sizes: list[int] = []
    for name in ("num_experts", "ep_size"):
        found = value.get(name)
        if type(found) is not int or found < 1:
            raise ConfigError(f"{name} is {shown(found)}: expected a whole number, at least 1")
        sizes.append(found)
    layers = value.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise ConfigError(f"layers is missing or empty: expected an object of layer numbers, or {ALL!r}")
    placed: dict[int | None, tuple[int, ...]] = {}
    for name, slots in layers.items():
        if (number := layer_number(name)) is None and name != ALL:
            raise ConfigError(f"layer {shown(name)}: expected a layer's number, or {ALL!r}")
        if not isinstance(slots, list) or not slots or not all(type(expert) is int for expert in slots):
            raise ConfigError(f"layer {name}: expected a list with the expert in each slot, -1 for none")
        try:
            placement = ExpertPlacement(sizes[0], ParallelConfig(sizes[1]), tuple(slots))
        except ConfigError as error:
            raise ConfigError(f"layer {name}: {error}") from error
        placed[number] = tuple(placement.slots)
    return PlacementFile(sizes[0], sizes[1], placed)

"""Gathers expert counts of a whole world, and reads and writes files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import torch

from eprt.config import MAX_EXPERTS
from eprt.errors import ConfigError
from eprt.files import write_whole
from eprt.json_files import layer_number, parse, read_bounded, shown
from eprt.kinds import require_kinds
from eprt.layer import ExpertParallelMoE
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of, shared_errors

FORMAT, VERSION, MAX_BYTES = "eprt expert counts", 1, 16 << 20
Counts = Mapping[int, tuple[int, ...]]  # layer number -> [E]


def gather_load(world: World, layers: Sequence[ExpertParallelMoE]) -> torch.Tensor:
    """Sums how often all ranks' tokens chose each expert: [layers, E] int64 on the CPU, equal on all ranks.

    Collective; synchronises a GPU.

    Raises:
        UsageError: a layer doesn't count. ConfigError: no layer, or layers of different numbers of experts. The same
            on every rank.
        WorldMismatch: other layers on some ranks.
    """
    with shared_errors(world, Header("rebalance", -1, 3)):
        require_kinds(gather_load, {"layers": layers})
        sizes = sorted({layer.config.num_experts for layer in layers})
        if len(sizes) != 1:
            found = f"layers of {' and '.join(map(str, sizes))} experts" if sizes else "no layer"
            raise ConfigError(f"gather_load got {found}: expected some of one size; ask for each kind by itself")
        own = torch.stack([layer.load() for layer in layers])
    settings = {"layers": " ".join(str(layer.dispatcher.layer) for layer in layers), "experts": str(own.shape[1])}
    exchange(world, Header("rebalance", -1, 3, fingerprint=fingerprint_of(settings), settings=settings))
    every = own.new_empty((world.size * own.shape[0], own.shape[1]))
    world.all_gather(every, own)
    return every.view(world.size, *own.shape).sum(0).cpu()


def zipf(num_experts: int, exponent: float, total: int = 1_000_000) -> tuple[int, ...]:
    """Returns [E] counts of a Zipf distribution: expert e gets a share proportional to 1 / (e + 1) ** exponent.

    Raises:
        ConfigError: no experts, or too many; an exponent that is negative, or 100 and more; a negative total.
    """
    require_kinds(zipf, locals())
    if not 1 <= num_experts <= MAX_EXPERTS or not 0 <= exponent < 100 or total < 0:
        raise ConfigError(
            f"Zipf over {num_experts} experts with exponent {exponent}, {total} in all: expected 1 to {MAX_EXPERTS} "
            "experts, an exponent from 0 to below 100, and a total from 0 on"
        )
    shares = [(place + 1) ** -float(exponent) for place in range(num_experts)]
    whole = sum(shares)
    return tuple(round(total * share / whole) for share in shares)


def write_counts(path: str | Path, counts: Mapping[int, Sequence[int]]) -> None:
    """Writes counts by layer number as JSON, for `read_counts` and `eprt plan-experts`. Raises ConfigError."""
    require_kinds(write_counts, locals())
    try:
        layers = {str(layer): [index(count) for count in row] for layer, row in counts.items()}
    except TypeError as error:
        raise ConfigError(f"{path}: counts are {shown(counts)}: expected whole numbers") from error
    value = {"format": FORMAT, "version": VERSION, "layers": layers}
    _checked(value, path)
    try:
        write_whole(Path(path), json.dumps(value) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def read_counts(path: str | Path) -> Counts:
    """Reads a file of `write_counts`. Raises ConfigError naming the file and what is wrong with it."""
    require_kinds(read_counts, locals())
    raw = read_bounded(Path(path), MAX_BYTES, ConfigError)
    return _checked(parse(raw, f"{path} is no file of expert counts", ConfigError), path)


def _checked(value: Any, path: str | Path) -> Counts:
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
        raise ConfigError(
            f"{path} is no file of expert counts: expected an object with format {FORMAT!r}, version {VERSION}"
        )
    layers = value.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise ConfigError(f"{path}: layers is missing or empty: expected an object of layer numbers")
    found: dict[int, tuple[int, ...]] = {}
    for name, row in layers.items():
        if (number := layer_number(name)) is None:
            raise ConfigError(f"{path}: layer {shown(name)}: expected a layer's number")
        if not isinstance(row, list) or not row or not all(type(n) is int and 0 <= n < 1 << 63 for n in row):
            raise ConfigError(f"{path}: layer {name}: expected a list of counts, one per expert, none negative")
        found[number] = tuple(row)
    return found

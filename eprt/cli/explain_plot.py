"""Draws `eprt explain --plot`: the time of a layer over tokens per rank, one line for each possible pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.plan import make_plan
from eprt.plan.model import roofline_us
from eprt.support import Device

TOKENS = tuple(2**power for power in range(13))


def curves(
    config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device
) -> dict[str, list[tuple[int, float]]]:
    """Returns (tokens per rank, microseconds) of a call by every pair that can run there, and of the roofline."""
    found: dict[str, list[tuple[int, float]]] = {}
    for tokens in TOKENS:
        sized = replace(runtime, max_tokens_per_rank=tokens, phase="prefill")
        try:
            candidates = make_plan(config, parallel, sized, device).candidates
        except UnsupportedError:
            continue
        best: dict[str, float] = {}
        for c in candidates:
            if c.support and c.us is not None:
                name = f"{c.dispatcher} + {c.executor}"
                best[name] = min(c.us, best.get(name, c.us))
        for name, us in best.items():
            found.setdefault(name, []).append((tokens, us))
        if best and (bound := roofline_us(config, parallel, tokens, device)) is not None:
            found.setdefault("roofline", []).append((tokens, bound))
    return found


def plot(config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device, path: Path) -> None:
    """Writes the plot; the file's ending names the format.

    Raises:
        ConfigError: matplotlib is missing or can't write the format, or nothing is known of any pair's time.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'eprt[plot]'") from error
    lines = curves(config, parallel, runtime, device)
    if not lines:
        raise ConfigError(f"--plot {path}: no time is known on {device}; eprt tune measures this machine's")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(1, 1, 1)
    for name, points in lines.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "k--" if name == "roofline" else "o-", linewidth=1, markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("microseconds: dispatch, experts, combine")
    axes.set_title(
        f"{parallel.world_size} x {device}, {parallel.ranks_per_host} per host: measured and modelled", fontsize=10
    )
    axes.legend(fontsize=7)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error

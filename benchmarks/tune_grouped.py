"""Compare schedules of the grouped GEMM under even and skewed routing: the source of `HOPPER` in
eprt/experts/grouped/schedules.py.

    python benchmarks/tune_grouped.py FILE [SHAPE[:fp8] ...] [--rows 8 24 64 ...] [--tiles]

For each shape of `eprt bench experts` (`:fp8` lets tokens be FP8) and each number of rows that an expert gets under
even routing, times whole experts by CUDA-graph replays, three draws of tokens in turn, under each of ROUTINGS: the
table's schedules of nearby heights and the same with other tails. With `--tiles` also those whose first or second tile
differs in one attribute. FILE has every time; printed is how much longer than the quickest each candidate takes, as
geometric mean of the routings, beside the one that the table takes. A candidate that doesn't compile, doesn't fit, or
computes something else than the table's has no time. One or two seconds a number of rows, beside compiling.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from one_rank import executor_of

from eprt.bench.experts import Ceilings
from eprt.bench.report import Report
from eprt.bench.routings import read_routing, sampled_tokens
from eprt.bench.shapes import SHAPES
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.grouped.schedules import ANY, HOPPER, Pair, Schedule, Tile, choose
from eprt.timing import device_microseconds
from eprt.tokens import FlatTokens

ROWS = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 176, 208, 256, 512, 1024, 2048)
ROUTINGS = ("uniform", "zipf:0.6:0", "zipf:1.1:0")
DRAWS = 3
TAILS = (0, 16, 32)
LOW, HIGH = 0.6, 5.4  # a tile's height over the rows of an expert, between which it is tried
TALL = 100  # rows from which on every height of at least 128 is tried
ERROR = 1e-2  # relative, in norm: sums of bf16 in another order; a wrong kernel is far beyond
OTHERS: dict[str, tuple[Any, ...]] = {
    "n": (64, 128, 192, 256),
    "k": (64, 128, 256),
    "stages": (-2, -1, 1, 2),  # more or fewer
    "halvings": (0, 1, 2),
    "warp_specialized": (False, True),
}


def neighbours(tile: Tile) -> Iterator[tuple[str, Tile]]:
    """Yields tiles that differ in one attribute, with its name and value."""
    for name, values in OTHERS.items():
        for value in values:
            found = tile.stages + value if name == "stages" else value
            if found != getattr(tile, name):
                yield f"{name} {found}", replace(tile, **{name: found})


def named(limit: float, m: int, tail: int) -> str:
    return f"{m} + {tail}, to {'any' if limit == ANY else format(limit, 'g')} rows"


def candidates(pair: Pair, rows: float, *, tiles: bool) -> dict[str, Schedule]:
    """Returns schedules for so many rows by name: height, tail, the table's limit, and what differs from it."""
    found: dict[str, Schedule] = {}
    for limit, known in HOPPER[pair]:
        if not ((rows >= TALL and known.m >= TALL) or LOW * rows <= known.m <= max(16, HIGH * rows)):
            continue
        found[named(limit, known.m, known.tail)] = known
        if known.first.swap and known.second.swap and not known.second.flatten:
            for tail in TAILS:
                if tail < known.m and (other := replace(known, tail=tail)) not in found.values():
                    found[named(limit, known.m, tail)] = other
        for gemm in ("first", "second") if tiles else ():
            for what, tile in neighbours(getattr(known, gemm)):
                found[f"{named(limit, known.m, known.tail)}, {gemm} {what}"] = replace(known, **{gemm: tile})
    return found


def time_schedule(executor: TritonGroupedExecutor, draws: list[FlatTokens], wanted: torch.Tensor) -> float | str:
    """Returns microseconds of a call, or why there are none.

    Args:
        wanted: what the first draw gives by the table's schedule.
    """
    out = torch.empty_like(wanted)
    try:
        executor(draws[0], out)
        wrong = float((out - wanted).float().norm() / wanted.float().norm())
        if not wrong < ERROR:
            return f"error {wrong:.1e}"
        return round(device_microseconds(*[partial(executor, each, out) for each in draws], repeats=2), 2)
    except Exception as error:  # noqa: BLE001  (whatever Triton, ptxas or the driver says: the next one may do)
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def tune(executor: TritonGroupedExecutor, shape: str, rows: int, *, tiles: bool) -> list[dict[str, Any]]:
    """Measures a row for each routing."""
    config, pair = executor.config, executor._pair
    tokens = rows * config.num_experts // config.top_k
    schedules = candidates(pair, rows, tiles=tiles)
    found: list[dict[str, Any]] = []
    for routing in ROUTINGS:
        routed = read_routing(routing, config.num_experts, config.top_k)[0]
        first = sampled_tokens(config, tokens, executor.device, routed)
        ids = [routed.draw(tokens, config.top_k, seed).to(executor.device) for seed in range(DRAWS)]
        draws = [replace(first, ids=each) for each in ids]
        wanted = torch.empty_like(first.hidden.data)
        executor(draws[0], wanted)
        us: dict[str, float | str] = {}
        for name, schedule in schedules.items():
            with patch("eprt.experts.grouped.choose", return_value=schedule):
                us[name] = time_schedule(executor, draws, wanted)
        found.append({"shape": shape, "rows_per_expert": rows, "tokens": tokens, "routing": routing, "us": us})
    return found


def summary(executor: TritonGroupedExecutor, found: list[dict[str, Any]]) -> str:
    """Returns a line: each candidate's geometric mean of its times over the quickest ones, the best first."""
    times = [{name: us for name, us in row["us"].items() if isinstance(us, float)} for row in found]
    best = [min(each.values(), default=0.0) for each in times]
    means = {
        name: math.prod(each[name] / least for each, least in zip(times, best, strict=True)) ** (1 / len(times))
        for name in times[0]
        if all(name in each for each in times)
    }
    rows, columns = found[0]["rows_per_expert"], executor.config.hidden_size
    taken = choose(executor._pair, rows, columns, hopper=True)
    table = next(named(limit, taken.m, taken.tail) for limit, each in HOPPER[executor._pair] if each is taken)
    ranked = ", ".join(f"{name}: {means[name]:.3f}" for name in sorted(means, key=means.__getitem__)[:8])
    return f"{found[0]['shape']}, {rows} rows, table {table}: {means.get(table, math.nan):.3f}; {ranked}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("shapes", nargs="*", default=list(SHAPES))
    options.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options.add_argument("--tiles", action="store_true")
    a = options.parse_args()
    device = torch.device("cuda", 0)
    command = shlex.join(["python", *sys.argv])
    report = Report("schedules", [], Ceilings.measure(device).as_dict(), command=command)
    for shape in a.shapes:
        name, _, activations = shape.partition(":")
        executor = executor_of(name, "triton_grouped", device, low_precision=activations == "fp8")
        if not isinstance(executor, TritonGroupedExecutor):
            raise TypeError(type(executor))
        for rows in a.rows:
            found = tune(executor, shape, rows, tiles=a.tiles)
            report.rows.extend(found)
            report.write(a.file)
            sys.stdout.write(summary(executor, found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

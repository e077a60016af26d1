"""Time candidate tiles of both grouped GEMMs: the source of `HOPPER` in eprt/experts/grouped/schedules.py.

    python benchmarks/tune_grouped.py result.json [shape ...]

For each shape of `eprt bench experts` (all with weights that the kernel multiplies, unless some are named;
`gpt-oss-120b:fp8` has FP8 activations) and each number of tokens, times CUDA-graph replays of either GEMM alone, over
the candidates below whose height suits the rows an expert gets. Writes every time, and prints the fastest pair beside
what the table would take and beside the floors.
What a candidate computes is compared with what the first one did. A candidate that doesn't compile or doesn't fit has
no time. Some three minutes a shape, most of them compiling.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_rank import executor_of

from eprt.bench.experts import SHAPES, Ceilings
from eprt.bench.routings import sample_ids
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.grouped.launch import Gemm, Rows, quantize_rows
from eprt.experts.grouped.schedules import FP8_PAIRS, Schedule, Tile, choose
from eprt.experts.sort_by_expert_triton import RowTiles, TileSchedule, sort_and_schedule
from eprt.rounding import round_up
from eprt.timing import device_microseconds
from eprt.tokens import Payload

TOKENS = (8, 32, 128, 512, 2048, 8192)
# Rows of a tile: (n, k, stages, warps, programs on a multiprocessor[, halvings]), all weights x tokens.
MXFP4: dict[int, tuple[tuple[int, ...], ...]] = {
    16: (
        (64, 128, 4, 4, 5), (64, 128, 4, 4, 6), (64, 256, 3, 4, 4), (64, 256, 4, 4, 3), (128, 128, 3, 4, 4),
        (128, 128, 4, 4, 4), (128, 64, 5, 4, 5), (128, 64, 6, 4, 4), (128, 256, 2, 4, 3), (128, 256, 3, 4, 2),
    ),
    32: (
        (64, 128, 4, 4, 4), (64, 256, 3, 4, 3), (128, 128, 3, 4, 3), (128, 128, 4, 4, 3), (128, 64, 4, 4, 4),
        (128, 64, 5, 4, 4), (128, 64, 6, 4, 4), (128, 64, 5, 4, 4, 1),
    ),
    64: (
        (128, 64, 4, 4, 3), (128, 64, 3, 4, 3, 1), (128, 64, 4, 4, 3, 1), (128, 64, 5, 4, 3, 1), (128, 64, 4, 4, 3, 2),
        (64, 64, 4, 4, 5, 1), (64, 64, 5, 4, 4, 1), (64, 128, 4, 4, 3, 1), (128, 128, 3, 4, 2, 1),
    ),
    128: (
        (128, 64, 3, 4, 2), (128, 64, 4, 4, 2), (128, 64, 5, 4, 2), (128, 64, 3, 4, 2, 1), (128, 64, 3, 4, 2, 2),
        (128, 64, 4, 4, 2, 2), (64, 64, 4, 4, 3), (64, 64, 4, 4, 4, 1), (64, 64, 5, 4, 3, 1), (64, 128, 3, 4, 3, 1),
        (128, 64, 3, 8, 2, 1), (128, 64, 4, 8, 2, 1), (128, 64, 4, 8, 1, 1), (256, 64, 4, 8, 1, 1),
    ),
    256: (
        (64, 64, 3, 4, 2), (64, 64, 4, 4, 1), (64, 64, 3, 4, 2, 1), (128, 64, 4, 8, 1), (128, 64, 4, 8, 1, 2),
    ),
}  # fmt: skip
# Warp-specialized tiles: (n, k, stages, warps of the plain kernel, 1, halvings).
ROLES: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    "w4a16": {
        16: ((256, 128, 8, 8, 1), (192, 128, 8, 8, 1)),
        32: ((256, 128, 6, 8, 1, 1), (192, 128, 6, 8, 1, 1)),
        64: ((256, 128, 5, 8, 1, 1), (192, 128, 6, 8, 1, 1), (128, 128, 5, 8, 1, 1)),
        128: ((192, 128, 3, 8, 1, 1), (192, 64, 6, 8, 1, 1), (128, 64, 6, 8, 1, 1)),
        256: ((128, 64, 5, 8, 1, 2), (128, 64, 5, 8, 1, 1), (128, 64, 4, 8, 1, 2)),
    },
    "w4a8": {
        16: ((256, 128, 8, 8, 1), (256, 256, 4, 8, 1), (128, 128, 8, 8, 1)),
        32: ((256, 128, 8, 8, 1, 1), (256, 256, 4, 8, 1, 1), (256, 128, 6, 8, 1)),
        64: ((256, 128, 6, 8, 1, 1), (256, 256, 3, 8, 1, 1), (192, 128, 6, 8, 1, 1), (128, 128, 8, 8, 1, 1)),
        128: (
            (192, 128, 5, 8, 1, 1),
            (192, 128, 4, 8, 1, 1),
            (128, 128, 6, 8, 1, 1),
            (128, 128, 6, 8, 1, 2),
        ),
        256: ((128, 128, 4, 8, 1, 2), (128, 128, 3, 8, 1, 2), (128, 128, 4, 8, 1, 1)),
    },
    "bf16": {
        64: ((256, 64, 4, 8, 1, 1), (128, 64, 6, 8, 1, 1), (128, 64, 8, 8, 1, 2)),
        128: ((256, 64, 4, 8, 1, 1), (128, 64, 5, 8, 1, 1)),
        256: ((128, 64, 4, 8, 1, 2),),
    },
}
# The same, and last whether it is weights x tokens.
BF16: dict[int, tuple[tuple[int, ...], ...]] = {
    16: (
        (64, 128, 3, 4, 3, 0, 1), (128, 64, 3, 4, 4, 0, 1), (64, 128, 4, 4, 3, 0, 1), (128, 64, 4, 4, 4, 0, 1),
        (64, 64, 6, 4, 5, 0, 1), (64, 128, 5, 4, 2, 0, 1),
    ),
    32: (
        (64, 128, 4, 4, 2, 0, 1), (64, 128, 3, 4, 3, 0, 1), (128, 64, 4, 4, 3, 0, 1), (128, 64, 3, 4, 4, 0, 1),
        (128, 64, 5, 4, 2, 0, 1),
    ),
    64: (
        (128, 64, 3, 4, 3, 0, 0), (128, 64, 4, 4, 2, 0, 0), (256, 64, 3, 8, 1, 0, 0), (256, 64, 4, 8, 1, 0, 0),
        (128, 64, 3, 4, 3, 0, 1), (128, 64, 3, 4, 3, 1, 1), (128, 64, 3, 4, 3, 2, 1), (128, 64, 4, 4, 2, 1, 1),
        (128, 64, 4, 4, 2, 2, 1), (256, 64, 3, 8, 1, 1, 1), (256, 64, 4, 8, 1, 1, 1), (128, 128, 2, 4, 2, 1, 1),
    ),
    128: (
        (256, 64, 4, 8, 1, 0, 0), (256, 64, 3, 8, 1, 0, 0), (128, 64, 3, 4, 2, 0, 0), (128, 64, 3, 8, 2, 0, 0),
        (256, 64, 4, 8, 1, 0, 1), (256, 64, 4, 8, 1, 1, 1), (256, 64, 4, 8, 1, 2, 1), (256, 64, 3, 8, 1, 2, 1),
        (128, 64, 3, 4, 2, 1, 1), (128, 64, 3, 4, 2, 2, 1), (128, 64, 3, 8, 2, 2, 1), (128, 128, 3, 8, 1, 2, 1),
    ),
    256: ((128, 64, 4, 8, 1, 0, 0), (128, 64, 3, 8, 1, 0, 1), (128, 64, 4, 8, 1, 1, 1), (128, 64, 4, 8, 1, 2, 1)),
}  # fmt: skip


def cut(n: int, k: int, stages: int, warps: int, ctas: int, halvings: int = 0, swap: int = 1) -> Tile:
    return Tile(n, k, stages, warps, ctas, bool(swap), halvings)


# The same of MXFP4 with tokens of E4M3, that of few rows.
FP8_TOKENS = {16: MXFP4[16][4:7], 32: MXFP4[32][2:4], 64: (), 128: (), 256: ()}
# Rows beyond a tile's height that an expert's last tile may take along (`Schedule.tail`), where tiles have `swap`.
TAILS: dict[str, dict[int, tuple[int, ...]]] = {
    "w4a16": {32: (0, 16), 64: (0, 16, 32), 128: (0, 16, 32), 256: (0, 16, 32)},
    "w4a8": {32: (0, 16), 64: (0, 16), 128: (16, 32), 256: (0, 32)},
    "bf16": {32: (0, 16), 64: (0, 16, 32), 128: (0, 16, 32), 256: (0, 32)},
}
CANDIDATES = {
    pair: {m: [cut(*each) for each in cuts] for m, cuts in table.items()}
    for pair, table in (("w4a16", MXFP4), ("i4a16", MXFP4), ("w4a8", FP8_TOKENS), ("bf16", BF16))
}
ROLES["i4a16"], TAILS["i4a16"] = ROLES["w4a16"], TAILS["w4a16"]
for pair, table in ROLES.items():
    for height, cuts in table.items():
        CANDIDATES[pair][height] += [replace(cut(*each), tma=True, warp_specialized=True) for each in cuts]
NAN = float("nan")
ERROR = 1e-2  # relative, in norm: sums of bf16 in another order; a wrong kernel is far beyond


def tiles(pair: str, m: int, tail: int, *, tma: bool) -> list[Tile]:
    """Returns those of one height. `tma`: with the copy engine for tokens as well, which only the second GEMM can use,
    and there also with one pipeline over all tiles."""
    found = [tile for tile in CANDIDATES[pair][m] if tile.swap or not tail]
    if not tma:
        return found
    by_engine = [replace(tile, tma=True) for tile in found if not tile.warp_specialized]
    flat = [replace(tile, flatten=True) for tile in by_engine if not (tile.halvings or tail) and pair == "bf16"]
    return found + by_engine + flat


def time_tile(gemm: Gemm, rows: Rows, work: TileSchedule, tile: Tile, out: torch.Tensor) -> float | str:
    """Returns microseconds, or why there are none. `out`: rows that are computed; the first to be asked writes them."""
    m, tail = work.tiles.m, work.tiles.tail
    found = torch.full((work.bound * m + tail, out.shape[1]), NAN, dtype=out.dtype, device=out.device)
    run = partial(gemm, rows, work, Schedule(m, tile, tile, tail=tail), tile, found)
    try:
        us = round(device_microseconds(run), 2)
    except Exception as error:  # noqa: BLE001  (whatever Triton, ptxas or the driver says: the next one may do)
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    found = found[: out.shape[0]].float()
    if out.isnan().all():
        out.copy_(found)
    wrong = float((found - out.float()).norm() / out.float().norm())
    return us if wrong < ERROR else f"error {wrong:.1e}"


def tune(executor: TritonGroupedExecutor, tokens: int) -> list[dict[str, Any]]:
    """Measures a row for each height, GEMM and tile."""
    config, device, L = executor.config, executor.device, executor.shard.num_local_experts
    ids = sample_ids(tokens, config.top_k, config.num_experts, device)
    valid, mean = int((ids < L).sum()), tokens * config.top_k / config.num_experts
    if not valid:
        return []
    gemms, candidates = executor._gemms, CANDIDATES[executor._pair]
    hidden = torch.randn(tokens, config.hidden_size, device=device).bfloat16()
    outs = [torch.full((valid, round_up(gemm.width, 16)), NAN, device=device).bfloat16() for gemm in gemms]
    rows: list[dict[str, Any]] = []
    heights = [m for m in candidates if mean / 4 <= m <= max(16, 4 * mean)]
    for m, tail in [(height, tail) for height in heights for tail in TAILS[executor._pair].get(height, (0,))]:
        _, source, work = sort_and_schedule(ids, 0, L, RowTiles(m, tail))
        between = outs[0][:, : gemms[1].matrix.cols]
        for index, gemm in enumerate(gemms):
            if index == 0:
                reads = replace(executor._rows(Payload.plain(hidden), None), source=source)
            else:  # what the first GEMM has written by now
                reads = quantize_rows(between, work, gemm) if executor._pair in FP8_PAIRS else Rows(between)
            for tile in tiles(executor._pair, m, tail, tma=index == 1):
                us = time_tile(gemm, reads, work, tile, outs[index][:, : gemm.width])
                rows.append({"tokens": tokens, "m": m, "tail": tail, "gemm": index, "tile": asdict(tile), "us": us})
                what = f"{tokens} tokens, m {m} + {tail}, gemm {index}, {tuple(asdict(tile).values())}"
                sys.stdout.write(f"{what}: {us}\n")
    return rows


def floor_us(executor: TritonGroupedExecutor, tokens: int, ceilings: Ceilings) -> float:
    """Returns the larger of two lower bounds: bytes of experts that are hit, and operations."""
    config, L = executor.config, executor.shard.num_local_experts
    ids = sample_ids(tokens, config.top_k, config.num_experts, torch.device("cpu"))
    local = ids[ids < L]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in executor.slot_tensors().values())
    flops = 2 * local.numel() * (config.gate_up_rows + config.intermediate_size) * config.hidden_size
    return max(weights * local.unique().numel() / L / ceilings.copy_bytes, flops / ceilings.bf16_flops) * 1e6


def summary(executor: TritonGroupedExecutor, rows: list[dict[str, Any]], ceilings: Ceilings) -> str:
    """For each number of tokens the fastest pair of one height, its distance to the floor, and the table's pair."""
    config, lines = executor.config, [""]
    timed = [row for row in rows if isinstance(row["us"], float)]
    for tokens in sorted({row["tokens"] for row in timed}):
        of = [
            [[r for r in timed if (r["tokens"], r["m"], r["tail"], r["gemm"]) == (tokens, *cut, i)] for i in range(2)]
            for cut in dict.fromkeys((row["m"], row["tail"]) for row in timed)
        ]
        pairs = [[min(each, key=lambda row: row["us"]) for each in pair] for pair in of if all(pair)]
        if not pairs:
            continue
        best = min(pairs, key=lambda pair: sum(row["us"] for row in pair))
        total, mean = sum(row["us"] for row in best), tokens * config.top_k / config.num_experts
        taken = choose(executor._pair, mean, config.hidden_size, hopper=True)
        cut = tokens, taken.m, taken.tail
        wanted = [(*cut, i, asdict(replace(tile, fallback=None))) for i, tile in enumerate((taken.first, taken.second))]
        names = ("tokens", "m", "tail", "gemm", "tile")
        now = [row["us"] for row in timed if tuple(row[name] for name in names) in wanted]
        cuts = ", ".join(str(tuple(row["tile"].values())) for row in best)
        ratio = total / floor_us(executor, tokens, ceilings)
        what = f"{tokens} tokens, {mean:g} rows an expert: m {best[0]['m']} + {best[0]['tail']}, {cuts}"
        lines.append(f"{what}: {total:.1f} us = {ratio:.2f} x floor; table {now}")
    return "\n".join([*lines, ""])


def main(path: str, shapes: list[str]) -> None:
    device = torch.device("cuda", 0)
    ceilings = Ceilings.measure(device)
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "limits": ceilings.as_dict(), "shapes": {}}
    for shape in shapes:
        name, _, activations = shape.partition(":")
        executor = executor_of(name, "triton_grouped", device, low_precision=activations == "fp8")
        assert isinstance(executor, TritonGroupedExecutor)
        rows = result["shapes"][shape] = []
        for tokens in TOKENS:
            rows.extend(tune(executor, tokens))
            Path(path).write_text(json.dumps(result, indent=1))
        sys.stdout.write(shape + summary(executor, rows, ceilings))


if __name__ == "__main__":
    known = [name for name, shape in SHAPES.items() if shape.config.weight_format in ("bf16", "mxfp4")]
    main(sys.argv[1], sys.argv[2:] or known)

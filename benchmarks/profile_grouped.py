r"""What `triton_grouped`'s kernels do with the multiprocessors, by Nsight Compute.

    ncu --profile-from-start off --clock-control none --csv --page raw $SECTIONS \
        python benchmarks/profile_grouped.py run SHAPE:TOKENS... > NCU.csv
    python benchmarks/profile_grouped.py read NCU.csv FILE

SECTIONS: a --section for each of SpeedOfLight, WarpStateStats, SchedulerStats, MemoryWorkloadAnalysis,
ComputeWorkloadAnalysis, Occupancy, LaunchStats, InstructionStats.

`run` calls one rank's experts of a shape of `eprt bench experts` once for each number of tokens, compiled before; with
the suffix :fp8 activations are quantised. `read` makes a row of each kernel. Under `compute-sanitizer` use
`python -m pytest -m gpu tests/gpu/test_mxfp4_kernels.py -k witness` instead: these sizes would take hours.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import torch
from one_rank import executor_of, tokens_of

from eprt.bench.report import Report
from eprt.bench.shapes import SHAPES

_STALL, _PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
_PERCENT = {
    "tensor": "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active.avg",
    "issue": "sm__issue_active.avg",
    "dram": "gpu__dram_throughput.avg",
    "l2": "lts__throughput.avg",
}


def run(cases: list[str]) -> None:
    device = torch.device("cuda", 0)
    for case in cases:
        shape, *counts = case.removesuffix(":fp8").split(":")
        executor = executor_of(shape, "triton_grouped", device, low_precision=case.endswith(":fp8"))
        for count in map(int, counts):
            tokens = tokens_of(SHAPES[shape].config, count, device)
            for _ in range(3):
                executor(tokens)
            torch.cuda.synchronize()
            sys.stdout.write(f"CASE {shape} {count}\n")
            sys.stdout.flush()
            torch.cuda.profiler.start()
            executor(tokens)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def read(log: str, path: str) -> None:
    lines = Path(log).read_text().splitlines()
    cases = [line.split()[1:] for line in lines if line.startswith("CASE ")]
    kernels = list(csv.DictReader(io.StringIO("\n".join(line for line in lines if line.startswith('"')))))[1:]
    report = Report("profile", [])
    for kernel in kernels:
        report.rows.append({"shape": cases[0][0], "tokens": int(cases[0][1]), **facts(kernel)})
        if kernel["Kernel Name"] == "_weighted_sum":  # a call's last
            del cases[0]
    report.write(Path(path))


def facts(kernel: dict[str, str]) -> dict[str, Any]:
    """us; % of what the multiprocessors, the memory and the L2 cache could do in that time; why warps waited, % of
    their time."""

    def number(name: str) -> float:
        return float((kernel.get(name) or "nan").replace(",", ""))

    found: dict[str, Any] = {
        "kernel": kernel["Kernel Name"],
        "us": round(number("gpu__time_duration.sum") / 1000, 1),
        "registers": int(number("launch__registers_per_thread")),
        "warps": number("sm__warps_active.avg.pct_of_peak_sustained_active"),
    }
    found |= {name: number(f"{metric}.pct_of_peak_sustained_elapsed") for name, metric in _PERCENT.items()}
    waits = {
        name.removeprefix(_STALL).removesuffix(_PER_ISSUE): number(name) for name in kernel if name.startswith(_STALL)
    }
    total = sum(waits.values())
    first = sorted(waits.items(), key=lambda item: -item[1])[:6]
    return found | {"waits": {name: round(100 * each / total) for name, each in first}}


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2:])
    else:
        read(*sys.argv[2:])

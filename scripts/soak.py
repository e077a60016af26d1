"""Run many steps on gloo ranks, every output checked, and say whether memory, descriptors or threads grew.

    .venv/bin/python scripts/soak.py --steps 20000 --output benchmarks/results/soak_cpu.json

Exit code 0: all outputs right, and nothing grew after the first tenth but for what the limits below allow.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from eprt.bench.report import Report
from eprt.conformance.faults.job import CheckedLayer
from eprt.ranks.launcher import RankContext, WorldPool

MORE_MB, MORE_DESCRIPTORS, MORE_THREADS = 16.0, 0, 0


@dataclass(frozen=True)
class Growth:
    """One rank's process at a step: resident memory in MB, open descriptors, threads, seconds since the first step."""

    step: int
    resident_mb: float
    descriptors: int
    threads: int
    seconds: float


def soak(context: RankContext, dispatcher: str, steps: int, looks: int = 10) -> list[Growth]:
    """Runs many steps, idle ranks included, and checks every output. Raises WrongOutput."""
    layer = CheckedLayer(context.world(), dispatcher)
    found: list[Growth] = []
    start = time.monotonic()
    for step in range(steps):
        layer.step(step)
        if step % max(1, steps // looks) == 0 or step == steps - 1:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            resident = int(status["VmRSS"].split()[0]) / 1024
            descriptors = len(os.listdir("/proc/self/fd"))
            found.append(Growth(step, resident, descriptors, int(status["Threads"]), time.monotonic() - start))
    layer.layer.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--dispatcher", default="torch")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with WorldPool(arguments.world, timeout_s=24 * 3600.0) as pool:
        by_rank = pool.run(soak, dispatcher=arguments.dispatcher, steps=arguments.steps)
    rows = [{"rank": rank, **asdict(seen)} for rank, some in enumerate(by_rank) for seen in some]
    growth = [(some[-1], some[min(1, len(some) - 1)]) for some in by_rank]
    worst = {
        "more_mb": max(last.resident_mb - first.resident_mb for last, first in growth),
        "more_descriptors": max(last.descriptors - first.descriptors for last, first in growth),
        "more_threads": max(last.threads - first.threads for last, first in growth),
        "seconds": max(last.seconds for last, _ in growth),
    }
    if arguments.output is not None:
        Report("soak", rows, worst).write(arguments.output)
    grew = (worst["more_mb"], worst["more_descriptors"], worst["more_threads"])
    ok = all(found <= limit for found, limit in zip(grew, (MORE_MB, MORE_DESCRIPTORS, MORE_THREADS), strict=True))
    sys.stdout.write(
        f"{'PASS' if ok else 'FAIL'}: {arguments.steps} steps on {arguments.world} gloo ranks by "
        f"{arguments.dispatcher} in {worst['seconds']:.0f} s, every output right; most growth of a rank after the "
        f"first tenth: {grew[0]:.1f} MB, {grew[1]} descriptors, {grew[2]} threads\n"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

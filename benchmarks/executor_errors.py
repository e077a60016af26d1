"""Measure how far executors are from the float32 reference at real sizes, on one GPU.

    python benchmarks/executor_errors.py FILE SHAPE executor executor ...

One rank's share of a shape of `eprt bench experts`, random weights. A row of FILE: the error in norm and the largest
one, both of the whole output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from one_rank import executor_of, tokens_of

from eprt.bench.report import Report
from eprt.bench.shapes import SHAPES
from eprt.conformance.oracle import relative_error

TOKENS = (8, 128, 1024)
WITNESS = "reference"


def main(path: str, shape: str, names: list[str]) -> None:
    device, config = torch.device("cuda", 0), SHAPES[shape].config
    batches = [tokens_of(config, count, device) for count in TOKENS]
    report, wanted = Report("executor errors", []), list[torch.Tensor]()
    for name in (WITNESS, *names):
        executor = executor_of(shape, name, device)
        outputs = [executor(batch).float() for batch in batches]
        del executor
        wanted = wanted or outputs
        for count, found, right in zip(TOKENS, outputs, wanted, strict=True):
            error, most = relative_error(found, right), float((found - right).abs().max() / right.abs().max())
            row = {"shape": shape, "executor": name, "tokens": count, "error": round(error, 6), "most": round(most, 6)}
            if name != WITNESS:
                report.rows.append(row)
                sys.stdout.write(f"{row}\n")
    report.write(Path(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

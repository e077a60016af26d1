"""Where tests run the repository's own kernels: on the GPU, or with TRITON_INTERPRET=1 on the CPU.

Triton's interpreter executes a kernel's own lines with numpy, one program of the grid after another: indexing, masks,
loops and arithmetic are proven, memory order, barriers and anything asynchronous are not, but for Gluon's kernel
(`gluon_order`). The variable must be set before triton is imported: `tests/unit/test_kernels_interpreted.py` starts a
process for it. Sizes are smaller there, as one program takes milliseconds.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or TRITON_INTERPRET=1: neither is here"
)
cuda_only = pytest.mark.skipif(INTERPRETED, reason="needs CUDA streams, graphs or events: the interpreter has none")
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: looks into what runs")

Sizes = TypeVar("Sizes")

if INTERPRETED:
    from support.stand_ins import gluon_interpreter, triton_interpreter

    triton_interpreter.apply()
    gluon_interpreter.apply()


def sized(cuda: Sizes, interpreted: Sizes) -> Sizes:
    return interpreted if INTERPRETED else cuda


def synchronize() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)

"""The GPUs that a test of several ranks needs, and why it is skipped without them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.plan import make_plan
from eprt.ranks.launcher import launch
from eprt.support import Device
from support.builders import JOB_S

GPUS = torch.cuda.device_count()
SHARED = GPUS == 1  # two ranks take turns on it, under the dispatcher that needs neither NCCL nor a library
SIZE = 2 if SHARED else min(4, GPUS)
launch_here = partial(launch, size=SIZE, device="cuda", timeout_s=JOB_S, share_gpu=SHARED)  # in ranks of its own
NEEDS_GPUS = "needs 2 CUDA devices of one host with peer access: this machine has {}"

several_gpus = [
    pytest.mark.gpu,
    pytest.mark.timeout(JOB_S + 60),
    pytest.mark.xdist_group("ranks"),  # one pool at a time: the ranks of two would wait for each other's turns
    pytest.mark.skipif(GPUS < 1, reason=NEEDS_GPUS.format(GPUS)),
]
a_gpu_each = pytest.mark.skipif(GPUS < 2, reason=NEEDS_GPUS.format(GPUS))


def skip_if_shared(dispatcher: str) -> None:
    """Skips the test of a dispatcher whose ranks can't share one GPU."""
    if SHARED and dispatcher != "symm":
        pytest.skip(f"{dispatcher} {NEEDS_GPUS.format(GPUS)}")


def this_gpu() -> Device:
    return Device.of(torch.device("cuda", 0))


def skip_if_refused(config: MoEConfig, runtime: RuntimeConfig) -> None:
    """Skips the test with the plan's reason if the plan refuses the layer on this machine."""
    skip_if_shared(runtime.dispatcher)
    try:
        make_plan(config, ParallelConfig(SIZE), runtime, this_gpu())
    except UnsupportedError as error:
        pytest.skip(f"the plan refuses {runtime.dispatcher}: {error}")

"""The GPUs that a test of several ranks needs, and why it is skipped without them."""

from __future__ import annotations

import pytest
import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.plan import make_plan
from eprt.support import Device
from support.builders import JOB_S

SIZE = min(4, torch.cuda.device_count())

several_gpus = [
    pytest.mark.gpu,
    pytest.mark.timeout(JOB_S + 60),
    pytest.mark.skipif(SIZE < 2, reason=f"needs 2 CUDA devices of one host with peer access: this machine has {SIZE}"),
]


def this_gpu() -> Device:
    return Device.of(torch.device("cuda", 0))


def skip_if_refused(config: MoEConfig, runtime: RuntimeConfig) -> None:
    """Skips the test with the plan's reason if the plan refuses the layer on this machine."""
    try:
        make_plan(config, ParallelConfig(SIZE), runtime, this_gpu())
    except UnsupportedError as error:
        pytest.skip(f"the plan refuses {runtime.dispatcher}: {error}")

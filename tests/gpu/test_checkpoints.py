"""ModelOpt NVFP4 checkpoints of every family through humming, on every dispatcher and payload: one process a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.cases.gpu_cases import PACKED, PACKED_SIZES, packed_case
from support.cases.gpu_limits import JOB_S
from support.cases.packed_checkpoints import Written, write
from support.jobs.packed_checkpoint_jobs import BOUND, COST, errors, run_layer

from eprt.support import Device

SIZE = min(4, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(JOB_S + 60),
    pytest.mark.skipif(SIZE < 2, reason=f"needs 2 CUDA devices: this machine has {SIZE}"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str], tuple[str, Written]]:
    """`written(family)`: (folder, what is in it), made once."""
    held: dict[str, tuple[str, Written]] = {}

    def get(family: str) -> tuple[str, Written]:
        if family not in held:
            folder = tmp_path_factory.mktemp(family)
            held[family] = (str(folder), write(folder, family, "nvfp4", PACKED_SIZES))
        return held[family]

    return get


@pytest.mark.parametrize(("family", "dispatcher", "payload"), PACKED)
def test_layer_of_an_nvfp4_checkpoint(pool, written, record_property, family, dispatcher, payload) -> None:
    case = packed_case(family, dispatcher, payload)
    if reason := case.refusal(Device.of(torch.device("cuda", 0)), SIZE):
        pytest.skip(reason)
    folder, layer = written(family)
    ranks = pool.run(run_layer, folder=folder, number=layer.layer, runtime=case.runtime)
    error, cost = errors(layer, ranks, payload)
    record_property("error", error)
    record_property("against_bf16_tokens", cost)
    assert error <= BOUND
    low, high = COST.get(payload, (0.0, BOUND))
    assert low <= cost <= high

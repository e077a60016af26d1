"""ModelOpt NVFP4 checkpoints of every family through humming, on every dispatcher and payload: one process a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cases.gpu_cases import PACKED, PACKED_SIZES, packed_case
from support.cases.gpu_ranks import several_gpus, skip_if_refused
from support.cases.packed_checkpoints import write
from support.jobs.checkpoint_jobs import BOUND, COST, Written, errors, run_layer

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

pytestmark = several_gpus


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
    skip_if_refused(case.config, case.runtime)
    folder, layer = written(family)
    ranks = pool.run(run_layer, folder=folder, number=layer.layer, runtime=case.runtime)
    error, cost = errors(layer, ranks, payload)
    record_property("error", error)
    record_property("against_bf16_tokens", cost)
    assert error <= BOUND
    low, high = COST.get(payload, (0.0, BOUND))
    assert low <= cost <= high

"""humming in CPU ranks: its own checks of every kernel, stand-ins for the two operators that would launch them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest

from eprt.config import MoEConfig, RuntimeConfig
from eprt.experts import EXECUTORS
from eprt.ranks.process import RankContext
from support.jobs.checkpoint_jobs import Ran, run_layer
from support.jobs.whole_layer_jobs import replayed_layer
from support.stand_ins.humming import Launches, described_h200


def _missing() -> list[str]:
    return [name for name in ("triton", "cuda", "humming") if find_spec(name) is None]


needs_humming = pytest.mark.skipif(bool(_missing()), reason=f"not installed: {', '.join(_missing())}")


@contextmanager
def humming_on_cpu() -> Iterator[None]:
    """humming's row of the table, able to run here; put back afterwards, since ranks outlive a test."""
    with tempfile.TemporaryDirectory() as folder, described_h200(folder), pytest.MonkeyPatch.context() as patch:
        Launches().install(patch)
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setitem(EXECUTORS, "humming", replace(EXECUTORS["humming"], devices=("cpu",)))
        yield


def run_layers(context: RankContext, folder: str, number: int, runtimes: list[RuntimeConfig]) -> list[Ran]:
    with humming_on_cpu():
        return [run_layer(context, folder, number, runtime) for runtime in runtimes]


def replayed_layers(
    context: RankContext, configs: list[MoEConfig], runtime: RuntimeConfig, rounds: list[list[int]]
) -> list[list[float]]:
    with humming_on_cpu():
        return [replayed_layer(context, config, runtime, rounds) for config in configs]
